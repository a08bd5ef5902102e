// SPDX-License-Identifier: Apache-2.0
// Arithmetic of `cpu_gated_delta_amx`: products of a chunk of 64 tokens by AMX tiles, in bf16 (amx_delta-inl.hpp).
// key_dim and value_dim are multiples of 32, and states are [key_dim, columns].
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/ssm/cpu/decayed_tiles.hpp"
#include "kernels/ssm/cpu/ssd_tiles.hpp"

namespace ringattn::cpu {

// One thread's operands, aligned to 64 bytes. Tiles and steps as in DecayedTiles, whose k_rows, q_rows and k_transposed
// have no decays in GDN, where the value heads of a key head share them, and its products.
struct DeltaTiles {
  DecayedTiles keys;
  std::byte* k_columns = nullptr;  // right: kᵀ in GDN, [4 · 16 tokens, steps, tile]
  // A value head's.
  float* a = nullptr;             // [64, 64]: decayed k · kᵀ below the diagonal, zeros elsewhere
  float* inverse = nullptr;       // [64, 64]: T
  std::byte* t = nullptr;         // left: T, [2 · 32 tokens, 2 steps of tokens, 2, tile]
  std::byte* t_lo = nullptr;      // what rounding T lost, rounded
  std::byte* weights = nullptr;   // left: decayed q · kᵀ, likewise
  float* row_decays = nullptr;    // [64]: of the chunk up to a token in GDN; KDA: ones
  float* after_decays = nullptr;  // [64]: of the chunk's tokens after a token in GDN; KDA: ones
  std::byte* w = nullptr;         // right: v − decayed k · S, 32 columns, [2 · 16 columns, 2 steps of tokens, tile]
  std::byte* u = nullptr;         // right, likewise
  std::byte* scaled_u = nullptr;  // right: u · after_decays, likewise
  float* products = nullptr;      // [2, 64, 32]
};

// A value head's rows of a chunk.
struct DeltaTileHead {
  int tokens = 0;
  int next_tokens = 0;          // of the next chunk, which are prefetched
  const float* beta = nullptr;  // [64], zeros after the last token
  const float* sums = nullptr;  // [64]: cumulative log-decays of GDN, base 2; null: KDA
  SsdRows v;                    // null data: zeros
  bool outputs = false;         // rows of o are computed
  float scale = 1.0F;
  std::byte* o = nullptr;
  std::int64_t o_stride = 0;  // bytes
};

struct DeltaTileOps {
  // GDN: packs `tokens` rows of k, and with q of q, and computes k · kᵀ and q · kᵀ.
  void (*load_keys)(const DeltaTiles& tiles, const SsdRows& k, const SsdRows& q, int tokens, int next_tokens,
                    bool normalized);
  // KDA: widens k, and with q also q, and the head's log-decays (natural, fp32), and computes what DecayedTiles says.
  void (*load_decayed_keys)(const DeltaTiles& tiles, const SsdRows& k, const SsdRows& q, const SsdRows& log_decays,
                            int tokens, int next_tokens, bool normalized);
  // Computes T, and with head.outputs the weights of u in o.
  void (*solve)(const DeltaTiles& tiles, const DeltaTileHead& head);
  // Rounds a state to bf16: [columns / 16, steps of key_dim, tile].
  void (*round_state)(const DeltaTiles& tiles, const float* state, int columns, std::byte* rounded);
  // Writes o with head.outputs, then updates the state and its rounded copy.
  void (*advance)(const DeltaTiles& tiles, const DeltaTileHead& head, float* state, int columns, std::byte* rounded);
};

// Null: the processor, the kernel or the target lacks AMX tiles of bf16.
const DeltaTileOps* delta_tile_ops();

}  // namespace ringattn::cpu
