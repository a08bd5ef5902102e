// SPDX-License-Identifier: Apache-2.0
// Operands of a chunk of 64 tokens with a decay per key dim, for AMX tiles of bf16 (amx_decayed-inl.hpp): what linear
// attention and the gated delta rule (KDA) have in common.
#pragma once

#include <cstddef>

namespace ringattn::cpu {

// One thread's, aligned to 64 bytes. Tiles are 1 KiB, and a step is 32 elements of the summed dim; `steps` is dim / 32.
// Rows after the chunk's last token are zeros, with decays of 1.
struct DecayedTiles {
  int dim = 0;  // a multiple of 32
  // In: fp32 rows, and log-decays to base 2, which become decays.
  float* k = nullptr;       // [64, dim]
  float* q = nullptr;       // [64, dim]; null: neither scores nor decayed queries are computed
  float* decays = nullptr;  // [64, dim]
  // Within the call.
  float* scaled_k = nullptr;    // [64, dim]: k times the decays of the sub-chunk's tokens after it
  float* diagonal = nullptr;    // [dim, 16]: a sub-chunk's keys, transposed
  std::byte* near_k = nullptr;  // left: k times the decays of the sub-chunk up to it, [4 · 16 tokens, steps, tile]
  std::byte* near_q = nullptr;  // likewise
  std::byte* far_k = nullptr;   // right: keys of sub-chunk t < s, decayed up to s, [6 pairs (s, t), steps, tile]
  // Out.
  std::byte* k_rows = nullptr;           // left: k decayed from the chunk's start, [2 · 32 tokens, steps, 2, tile]
  std::byte* q_rows = nullptr;           // likewise
  std::byte* k_transposed = nullptr;     // left: k decayed to the chunk's end, [steps, 2 steps of tokens, 2, tile]
  std::byte* k_transposed_lo = nullptr;  // what rounding k_transposed lost, rounded; null: not wanted
  float* kk = nullptr;                   // [64, 64]: decayed k · kᵀ below the diagonal; null: not wanted
  float* qk = nullptr;                   // [64, 64]: decayed q · kᵀ up to the diagonal
  float* chunk_decays = nullptr;         // [dim]: of the whole chunk
};

}  // namespace ringattn::cpu
