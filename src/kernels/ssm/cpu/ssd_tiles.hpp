// SPDX-License-Identifier: Apache-2.0
// Arithmetic of `cpu_ssd_amx`: products of a chunk of 64 tokens by AMX tiles, in bf16 (amx_ssd-inl.hpp). state_dim and
// head_dim are multiples of 32, and states are [state_dim, head_dim].
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringattn::cpu {

// Rows of bf16, `stride` bytes apart.
struct SsdRows {
  const std::byte* data = nullptr;
  std::int64_t stride = 0;

  const std::byte* at(int row) const { return data + row * stride; }
};

// One thread's operands, aligned to 64 bytes. Tiles are 1 KiB, and a step is 32 elements of the summed dim.
struct SsdTiles {
  int state_dim = 0;
  int head_dim = 0;
  // Shared by the heads of a group.
  std::byte* c = nullptr;        // left: [2 · 32 tokens, steps of state_dim, 2, tile]
  std::byte* b_pairs = nullptr;  // right: [4 · 16 tokens, steps of state_dim, tile]
  std::byte* b = nullptr;        // left, transposed: [state_dim / 32, 2 steps of tokens, 2, tile]
  float* scores = nullptr;       // [64, 64]: C · Bᵀ
  // A head's.
  std::byte* weights = nullptr;   // left: intra-chunk scores, [2 · 32 tokens, 2 steps of tokens, 2, tile]
  std::byte* x = nullptr;         // right: [head_dim / 16, 2 steps of tokens, tile]
  std::byte* scaled_x = nullptr;  // right: x times its factor in the state, hi and lo, [2] of x
  float* products = nullptr;      // [2, 32, 32]
};

// A head's rows of a chunk.
struct SsdTileHead {
  int tokens = 0;
  int next_tokens = 0;          // of the next chunk, which are prefetched
  const float* dt = nullptr;    // [64]
  const float* sums = nullptr;  // [64]: cumulative log-decays, base 2
  SsdRows x;
  // For finish().
  const float* d = nullptr;  // null: no skip
  SsdRows z;                 // null data: no gate
  float scale = 1.0F;
  std::byte* y = nullptr;     // null: accumulate()
  std::int64_t y_stride = 0;  // bytes
};

struct SsdTileOps {
  // Packs `tokens` rows of B, and with C computes the scores of a chunk. c.data may be null.
  void (*load_group)(const SsdTiles& tiles, const SsdRows& b, const SsdRows& c, int tokens);
  // state ← a(chunk) · state + what the chunk adds, within 2^−16 of fp32.
  void (*accumulate)(const SsdTiles& tiles, const SsdTileHead& head, float* state);
  // Rounds a state to bf16: [head_dim / 16, steps of state_dim, tile].
  void (*round_state)(const SsdTiles& tiles, const float* state, std::byte* rounded);
  // Writes y, then updates the state and its rounded copy with x times its factor rounded to bf16.
  void (*finish)(const SsdTiles& tiles, const SsdTileHead& head, float* state, std::byte* rounded);
};

// Null: the processor, the kernel or the target lacks AMX tiles of bf16.
const SsdTileOps* ssd_tile_ops();

}  // namespace ringattn::cpu
