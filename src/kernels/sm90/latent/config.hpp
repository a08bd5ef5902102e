// SPDX-License-Identifier: Apache-2.0
// How `sm90_mla` and `sm90_mla_split1k` decode over latents: rows [c, k_r] that all query heads share as their keys,
// and whose first columns are their values.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/decode.hpp"
#include "kernels/merge.hpp"
#include "kernels/sm90/decode/config.hpp"

namespace ringattn::sm90 {

inline constexpr int kLatentDim = 576;   // latent and rotary key
inline constexpr int kLatentDimV = 512;  // the latent
inline constexpr int kMlaKeyTile = 64;   // keys of a tile
inline constexpr int kMlaStages = 2;     // tiles in shared memory
inline constexpr int kMlaTileParts = 5;  // of a tile that arrive by themselves: 128 columns each, and the rotary keys
inline constexpr int kMlaConsumerThreads = 256;
inline constexpr int kMlaThreads = kMlaConsumerThreads + 128;
// Registers of a thread that the three warpgroups have between them: what a CTA is launched with.
inline constexpr int kMlaRegisters = 3 * 168;
// Of more work_tiles than this, each folded by a cta_group, those of two blocks of rows share what they read: else they
// might ask for nearly all that the L2 cache gives.
inline constexpr int kMaxCtaGroupWorkTiles = 8;
inline constexpr int kMaxMlaSequences = 256;  // of a launch: each CTA keeps a number for each

// How latents of 8 bits are stored.
inline constexpr RowFormat kFp8LatentFormat{.encoding = RowEncoding::kLatent, .rope = kLatentDim - kLatentDimV};

// In powers of two. A tile's probabilities are at row_max 2^12, and the sum over a group stays far below fp32's end.
inline constexpr float kFarAbove = 12.0F;

// The rows of the table that the same compiled kernels are. KvSplits of fewer keys are more work_tiles, and other bits.
struct MlaVariant {
  std::string_view name;
  int tiles_per_kv_split;  // a power of two
};
inline constexpr MlaVariant kMlaVariant{"sm90_mla", kTilesPerKvSplit};  // groups of 4,096 keys
inline constexpr MlaVariant kMlaSplit1kVariant{"sm90_mla_split1k", 1024 / kMlaKeyTile};

// See KernelRow::missing and KernelRow::configs.
std::vector<std::string> mla_missing(const DecodeSpec& spec);
std::vector<std::string> mla_configs(const MlaVariant& row);

}  // namespace ringattn::sm90
