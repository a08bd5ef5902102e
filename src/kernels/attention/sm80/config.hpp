// SPDX-License-Identifier: Apache-2.0
// Configurations of sm80_attention: tiles, warps and shared memory for an AttentionSpec. A pure function of the spec,
// so that all ranks agree on it. sm80_attention.hpp declares the launchers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/common/cuda/config_table.hpp"
#include "kernels/common/cuda/panels.hpp"

namespace ringattn::sm80 {

// A strip is the unit of loads into a pipeline stage if O is divided into slices: kStripColumns columns of a K tile, or
// kStripKeys rows of a V tile.
inline constexpr int kStripColumns = 128;
inline constexpr int kStripKeys = 16;

struct AttentionConfig {
  int head_dim = 0;
  int head_dim_v = 0;
  int key_tile = 0;         // keys per KV tile
  int warps = 0;            // per CTA
  int rows_of_warp = 0;     // query rows per warp, a multiple of 16
  int stages = 0;           // pipeline stages of K and V tiles, or of strips of them; 1: K and V are loaded alternately
  int ctas = 0;             // per multiprocessor, for the limits of registers and shared memory
  int columns_at_once = 0;  // blocks of 16 columns of O that P V accumulates concurrently
  bool end_basic_block = true;  // see TileStep::attend()
  int slices = 1;               // column slices of O, one for each warp of those that share rows (sliced/tile_step.cuh)

  constexpr int query_tile() const { return warps / slices * rows_of_warp; }
  // Returns true if there is a kernel for keys with explicit positions.
  constexpr bool supports_positions() const { return slices == 1; }
  constexpr int threads() const { return 32 * warps; }
  // Scratch memory per multiprocessor: for each CTA the rows' merged partials, and a flag that it is in use.
  constexpr int scratch_floats() const { return ctas * (query_tile() * (head_dim_v + 2) + 1); }
  // Bytes of shared memory per CTA with slices, without tile addresses: Q and probabilities, stages of strips, and for
  // each row the maxima of each 16 keys and four partial sums of each.
  constexpr int sliced_bytes() const {
    return query_tile() * (cuda::padded_row_bytes(head_dim) + cuda::padded_row_bytes(key_tile)) +
           stages * kStripKeys * cuda::padded_row_bytes(head_dim_v) + query_tile() * (key_tile / 16) * (1 + 4) * 4;
  }
  // Bytes of shared memory per CTA: Q, stages of K and V, and 32 tile addresses. Rows are padded to 64 columns.
  constexpr int shared_bytes() const {
    constexpr int kAddresses = 32 * 48;
    if (slices > 1) return sliced_bytes() + kAddresses;
    const int k_row = cuda::padded_row_bytes(head_dim);
    return query_tile() * k_row + stages * key_tile * (k_row + cuda::padded_row_bytes(head_dim_v)) + kAddresses;
  }
};

// Configurations with compiled kernels. Chosen by speed on an H200 (bench/notes/attention-portable.md).
inline constexpr AttentionConfig kAttentionConfigs[] = {
    {64, 64, /*key_tile=*/128, /*warps=*/4, /*rows_of_warp=*/32, /*stages=*/2, /*ctas=*/2, /*columns_at_once=*/1},
    {96, 96, 64, 4, 32, 2, 2, 2},
    {128, 128, 64, 4, 32, 2, 2, 1},
    {192, 128, 64, 4, 32, 1, 2, 1},
    {256, 256, 64, 4, 16, 1, 2, 1, /*end_basic_block=*/false},
    {512, 512, 64, /*warps=*/8, 32, /*stages=*/3, /*ctas=*/1, /*columns_at_once=*/4, true, /*slices=*/8},
    {576, 512, 64, 8, 32, 3, 1, 4, true, 8},
};

// The compiled configuration for these head dims.
consteval AttentionConfig config_for(int head_dim, int head_dim_v) {
  return cuda::config_of_dims(kAttentionConfigs, head_dim, head_dim_v);
}

// Returns the configuration for a spec, or nullopt if the kernel doesn't support it (attention_missing() says why).
std::optional<AttentionConfig> choose_config(const AttentionSpec& spec);
// Text for KernelRow::missing.
std::vector<std::string> attention_missing(const AttentionSpec& spec);

// One line, e.g. "tile 128x64, 4 warps of 32 rows, 2 stages of keys, 97.5 KiB".
std::string describe(const AttentionConfig& config);
// All configurations, each after its head dims. Text for KernelRow::configs.
std::vector<std::string> attention_configs();

// An AttentionConfig as the template parameter of the attention kernels.
// kPositions_: keys have explicit positions (kernels/attention/key_positions.hpp).
template <class Element_, AttentionConfig kConfig, bool kPositions_ = false>
struct KernelConfig {
  using Element = Element_;
  static constexpr bool kPositions = kPositions_;
  static constexpr int kDim = kConfig.head_dim;
  static constexpr int kDimV = kConfig.head_dim_v;
  static constexpr int kKeyTile = kConfig.key_tile;
  static constexpr int kQueryTile = kConfig.query_tile();
  static constexpr int kRowBlocks = kConfig.rows_of_warp / 16;  // of 16 rows, per warp
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kStages = kConfig.stages;
  static constexpr int kCtas = kConfig.ctas;
  static constexpr int kColumnsAtOnce = kConfig.columns_at_once;
  static constexpr bool kEndBasicBlock = kConfig.end_basic_block;
  static constexpr int kSlices = kConfig.slices;
};

}  // namespace ringattn::sm80
