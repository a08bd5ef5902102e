// SPDX-License-Identifier: Apache-2.0
// States with one decay per head (Mamba-2), for the SSD kernel and for its gradients: those of segments from zero,
// chunk by chunk with one product, (scaled B)ᵀ · x. A state is [state_dim, width], where `width` is head_dim, padded to
// whole vectors.
//
// With `descending`, the states are gradients of states (kernels/ssd_backward/ssd_backward.hpp). The task then has dy
// for x, C for B and B for C, and its runs go from the gradient of the final state to that of the initial one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/ssm/cpu/ssd_tiles.hpp"
#include "kernels/ssm/cpu/ssm_levels.hpp"

namespace ringattn::cpu {

inline constexpr int kChunkRows = static_cast<int>(kChunkTokens);
inline constexpr int kMaxSsdDim = 256;
inline constexpr float kMinLogDecay = -150.0F;  // log-decay of one token (ssm.hpp)

// Hands out arrays of one allocation, or counts their floats if there is none. An array begins 64 bytes from the last.
class ScratchArrays {
 public:
  explicit ScratchArrays(float* base) : base_(base) {}

  template <class T>
  void take(T*& array, int rows, int columns) {
    if (base_ != nullptr) array = reinterpret_cast<T*>(base_ + floats_);
    const std::size_t bytes = static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns) * sizeof(T);
    floats_ += (bytes + 63) / 64 * 16;
  }
  std::size_t floats() const { return floats_; }

 private:
  float* base_;
  std::size_t floats_ = 0;
};

// Decays of a head's chunk.
struct SsdDecays {
  float* dt = nullptr;    // [kChunkRows]
  float* sums = nullptr;  // [kChunkRows]: cumulative log-decays (dA_cumsum)
  float* bias = nullptr;  // [kChannelBlock], all equal

  void lay_out(ScratchArrays& arrays);
};

// One thread's scratch for a head's chunk.
struct SsdScratch : SsdDecays {
  float* row = nullptr;         // [state_dim]
  float* b = nullptr;           // [state_dim, kChunkRows]: transposed
  float* scaled = nullptr;      // [state_dim, kChunkRows]: scaled B
  float* x = nullptr;           // [kChunkRows, width]; with `descending`, times silu(z)
  float* z = nullptr;           // [width]
  float* added = nullptr;       // [state_dim, width]: the chunk's contribution to the state
  float* decays = nullptr;      // [kChunkRows]
  float* chunk_logs = nullptr;  // [heads of a work tile, chunks]: log-decays of chunks

  void lay_out(int heads, int state_dim, int width, ScratchArrays& arrays);
};

class SsdLevels : public SsmLevels {
 protected:
  // `scratch_floats`: what the derived kernel takes after SsdScratch.
  // `block_logs`: floats of a head's log-decay.
  SsdLevels(const SsmSpec& spec, const CpuBackend& backend, int heads_per_tile, std::size_t scratch_floats,
            bool descending = false, int block_logs = 1);

  static int width_of(const SsmSpec& spec);
  // `count` rounded up to whole vectors of `lanes`.
  static int padded(int count, int lanes) { return (count + lanes - 1) / lanes * lanes; }

  SsdScratch scratch_of(ScratchArrays& arrays) const;
  void accumulate_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* scratch, float* states,
                       float* logs) const override;
  void join(const SsmTask& task, int head_block, const float* logs, const float* before, const float* local,
            float* result) const override;
  void load_state(const float* head, float* state) const override;
  void store_state(const float* state, float* head) const override;

  int width() const { return width_; }
  std::size_t block_floats() const { return static_cast<std::size_t>(spec().state_dim * width_); }
  int group_of(int head) const { return head / (spec().heads / spec().groups); }

  // Loads rows [row, row + tokens) of B, and zeros after them.
  void load_b(const SsmRotation& rotation, const TensorView& b, std::int64_t row, int tokens, int group,
              SsdScratch& scratch) const;
  // Rows [row, row + tokens) of B or C of bf16 where they lie, or with RoPE in `rotated`, [tokens, state_dim].
  SsdRows load_bc_rows(const SsmRotation& rotation, const TensorView& view, std::int64_t row, int tokens, int group,
                       std::byte* rotated) const;
  // Loads x and the decays.
  void load_head(const SsmTask& task, std::int64_t row, int tokens, int head, SsdScratch& scratch) const;
  // Loads dt, and computes the cumulative log-decay of each token.
  void load_decays(const SsmTask& task, std::int64_t row, int tokens, int head, SsdDecays& decays) const;
  // state ← fma(a(chunk), state, Σ_j a(tokens after j) · dt_j · x_j ⊗ B_j), or with `descending` Σ_j a(tokens up to j)
  // · x_j ⊗ B_j.
  void accumulate_chunk(int tokens, float* state, SsdScratch& scratch) const;

 private:
  void join_states(float log, const float* before, const float* local, float* result) const;
  static Shape shape_of(const SsmSpec& spec, int heads_per_tile, std::size_t scratch_floats, bool descending,
                        int block_logs);

  int heads_per_tile_;
  int width_;
  bool descending_;
};

}  // namespace ringattn::cpu
