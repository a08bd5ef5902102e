// SPDX-License-Identifier: Apache-2.0
// Arithmetic of `cpu_gla_amx`: products of a chunk of 64 tokens by AMX tiles, in bf16 (amx_gla-inl.hpp). state_dim and
// head_dim are multiples of 32, and states are [state_dim, head_dim].
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/ssm/cpu/decayed_tiles.hpp"
#include "kernels/ssm/cpu/ssd_tiles.hpp"

namespace ringattn::cpu {

// One thread's operands, aligned to 64 bytes. Tiles and steps as in DecayedTiles.
struct GlaTiles {
  DecayedTiles keys;
  int head_dim = 0;
  std::byte* weights = nullptr;  // left: decayed q · kᵀ, [2 · 32 tokens, 2 steps of tokens, 2, tile]
  std::byte* v = nullptr;        // right: [head_dim / 16, 2 steps of tokens, tile]
  float* products = nullptr;     // [2, 64, 32]
};

// A head's rows of a chunk.
struct GlaTileHead {
  int tokens = 0;
  int next_tokens = 0;  // of the next chunk, which are prefetched
  SsdRows k;
  SsdRows q;           // null data: accumulate()
  SsdRows log_decays;  // fp32, natural
  SsdRows v;
  float scale = 1.0F;
  std::byte* y = nullptr;
  std::int64_t y_stride = 0;  // bytes
};

struct GlaTileOps {
  // state ← a(chunk) · state + what the chunk adds, within 2^−16 of fp32, and logs ← logs + the chunk's, base 2.
  void (*accumulate)(const GlaTiles& tiles, const GlaTileHead& head, float* state, float* logs);
  // Rounds a state to bf16: [head_dim / 16, steps of state_dim, tile].
  void (*round_state)(const GlaTiles& tiles, const float* state, std::byte* rounded);
  // Writes y, then updates the state and its rounded copy with decayed keys rounded to bf16.
  void (*finish)(const GlaTiles& tiles, const GlaTileHead& head, float* state, std::byte* rounded);
};

// Null: the processor, the kernel or the target lacks AMX tiles of bf16.
const GlaTileOps* gla_tile_ops();

}  // namespace ringattn::cpu
