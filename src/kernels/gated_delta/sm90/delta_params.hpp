// SPDX-License-Identifier: Apache-2.0
// Kernel parameters and shared-memory layouts of sm90_gated_delta. Runs are passed by value, kDeltaRunsPerLaunch per
// launch, so no upload is needed and no call waits. kernels/instances.cmake lists the instantiation, and
// sm90_gated_delta.cpp launches it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <iterator>

#include "kernels/common/cuda/aligned_shared.hpp"
#include "kernels/common/cuda/panels.hpp"
#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn::sm90 {

inline constexpr int kDeltaDim = 128;  // of keys and values
inline constexpr int kDeltaChunk = static_cast<int>(kChunkTokens);
inline constexpr int kDeltaChunksOfSegment = static_cast<int>(kSegmentTokens / kChunkTokens);
inline constexpr int kDeltaStateFloats = kDeltaDim * kDeltaDim;
inline constexpr int kDeltaRunsPerLaunch = 64;

// q, k, v or o of a chunk and head: two panels of 64 dims.
inline constexpr int kDeltaTileBytes = 2 * cuda::panel_bytes(kDeltaChunk);
inline constexpr int kDeltaSquareBytes = cuda::panel_bytes(kDeltaChunk);  // [64, 64]: T or scores

// What delta_factors_kernel writes for a chunk and value head, in the layout of shared memory, so that one bulk copy
// loads it. T · diag(β) as a swizzled bf16 panel, then fp32 vectors over the chunk's tokens j, with n_j the factor of
// qk_l2norm of k_j, or 1:
struct DeltaFactors {
  static constexpr int kInverse = 0;                     // [64, 64]
  static constexpr int kKeyDecay = kDeltaSquareBytes;    // [64]: exp2(G_j) · n_j
  static constexpr int kStateDecay = kKeyDecay + 256;    // [64]: exp2(G_last − G_j) · n_j
  static constexpr int kQueryDecay = kStateDecay + 256;  // [64]: scale · exp2(G_j) · (the norm's factor of q_j)
  static constexpr int kChunkDecay = kQueryDecay + 256;  // [1]: exp2(G_last)
  static constexpr int kBytes = kKeyDecay + 1024;        // 1,024-byte alignment of what follows in a stage
  // With key_decays, decays of tokens are in the tiles of DeltaDecayed, and the only vector is that of the chunk.
  static constexpr int kDimDecay = kDeltaSquareBytes;  // [128]: exp2(G_last)
};

// With key_decays, q and k of a chunk and head times their decays and norms, rounded, as swizzled tiles.
struct DeltaDecayed {
  static constexpr int kKeys = 0;                                 // k_j exp2(G_j)
  static constexpr int kUpdateKeys = kKeys + kDeltaTileBytes;     // k_j exp2(G_last − G_j)
  static constexpr int kQueries = kUpdateKeys + kDeltaTileBytes;  // scale q_j exp2(G_j)
  static constexpr int kBytes = kQueries + kDeltaTileBytes;
};

struct DeltaRunEntry {
  std::int64_t row;
  std::int64_t tokens;
  std::int64_t segment;  // index of its first segment in the task
  const float* initial;  // [value_heads, key_dim, value_dim]
  float* final;
};

// A tensor [rows, heads, …]. Strides count elements.
struct DeltaTensor {
  const void* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
};

struct DeltaParams {
  DeltaRunEntry runs[kDeltaRunsPerLaunch];
  std::int32_t run_count;
  // Segments of the launch, with consecutive indices in the task. They lie in `runs`.
  std::int64_t first_segment;
  std::int32_t segments;

  std::int32_t value_heads, heads_per_key;
  std::int32_t first_head, head_count;  // value heads of the launch
  bool key_decays, qk_l2norm;
  bool computes_scores;  // of the factors' kernel
  float scale;

  DeltaTensor q, k, v, log_decay, beta;
  void* o;
  std::int64_t o_token_stride, o_head_stride;
  bool o_aligned;  // each row of each head is aligned to 16 bytes

  // Scratch memory. Factors, scores and decayed tiles are those of one launch: its first segment is at the front.
  unsigned char* factors;  // [segments of the launch, value_heads, 32 chunks, DeltaFactors::kBytes]
  unsigned char* scores;   // [segments of the launch, value_heads, 32 chunks, 64, 64]: rounded scores, swizzled
  unsigned char* decayed;  // [segments of the launch, value_heads, 32 chunks, DeltaDecayed::kBytes], with key_decays
  // [segments of the task, value_heads, value_dim, key_dim], transposed: U, which delta_carry_kernel replaces by the
  // state before the segment. That of a run's first segment without an initial state is zero and not stored.
  float* states;
  float* transitions;  // [segments of the task, value_heads, key_dim, key_dim]: M, transposed
};
static_assert(sizeof(DeltaParams) <= 4000, "kernel arguments are at most 4 KiB");

// One token of each sequence (GatedDeltaKernel::update).
struct DeltaUpdateParams {
  std::int64_t sequences;
  std::int32_t value_heads, heads_per_key;
  bool key_decays, qk_l2norm;
  float scale;
  DeltaTensor q, k, v, log_decay, beta;
  void* o;
  std::int64_t o_token_stride, o_head_stride;
  float* states;              // [slots, value_heads, key_dim, value_dim]
  const std::int32_t* slots;  // [sequences]; null: slot of a sequence is its index; < 0: padding
};

// delta_carry_kernel, by the columns of a state that a CTA has. With fewer columns, more CTAs share a head; each takes
// less time for a segment, but reads the same M. `step_seconds`: the time for a segment, on an H200 whose
// multiprocessors all have a CTA (bench/notes/gated_delta.md).
struct DeltaCarryForm {
  int width;
  double step_seconds;
};
inline constexpr DeltaCarryForm kDeltaCarryForms[] = {{8, 1.4e-6}, {16, 2.0e-6}, {32, 3.7e-6}};

// The form that is fastest for `states` states of a head each, and its seconds for one segment of each. CTAs of one
// form take equally long, and a multiprocessor has one.
struct DeltaCarryChoice {
  int form;
  double step_seconds;
};
constexpr DeltaCarryChoice choose_delta_carry(std::int64_t states, int multiprocessors) {
  DeltaCarryChoice choice{-1, 0.0};
  for (int form = 0; form < static_cast<int>(std::size(kDeltaCarryForms)); ++form) {
    const std::int64_t ctas = states * (kDeltaDim / kDeltaCarryForms[form].width);
    const std::int64_t waves = (ctas + multiprocessors - 1) / multiprocessors;
    const double seconds = static_cast<double>(waves) * kDeltaCarryForms[form].step_seconds;
    if (choice.form < 0 || seconds < choice.step_seconds) choice = {form, seconds};
  }
  return choice;
}

// Warpgroup 0 is the producer. Each of the others computes 64 columns of v of one value head.
inline constexpr int kDeltaThreads = 3 * 128;

// Offsets in bytes in a CTA's shared memory, which is aligned to 1,024 bytes.
template <bool kOutputs, bool kKeyDecays>
struct DeltaLayout {
  static constexpr int kStages = kOutputs ? (kKeyDecays ? 2 : 3) : (kKeyDecays ? 3 : 4);
  // Registers per thread after setmaxnreg, from 168 each at launch. A consumer of delta_state_kernel holds two states:
  // with 232 ptxas waits for each product before it issues the next. With 24, the other kernel's producer spills.
  static constexpr int kProducerRegisters = kOutputs ? 40 : 24;
  static constexpr int kConsumerRegisters = kOutputs ? 232 : 240;
  // In a stage.
  static constexpr int kKeys = 0;
  static constexpr int kValues = kKeys + kDeltaTileBytes;
  static constexpr int kQueries = kValues + kDeltaTileBytes;
  static constexpr int kAfterQueries = kQueries + (kOutputs ? kDeltaTileBytes : 0);
  static constexpr int kUpdateKeys = kKeyDecays ? kAfterQueries : kKeys;
  static constexpr int kFactors = kAfterQueries + (kKeyDecays ? kDeltaTileBytes : 0);
  static constexpr int kScores = kFactors + DeltaFactors::kBytes;
  static constexpr int kStageBytes = kScores + (kOutputs ? kDeltaSquareBytes : 0);
  // Bytes that bulk copies load into a stage.
  static constexpr int kBulkBytes = DeltaFactors::kBytes + (kOutputs ? kDeltaSquareBytes : 0) +
                                    (kKeyDecays ? (kOutputs ? 3 : 2) * kDeltaTileBytes : 0);

  static constexpr int kBarriers = kStages * kStageBytes;  // full and empty, per stage
  static constexpr int kBytes = kBarriers + 8 * 2 * kStages;
  static constexpr int kSharedBytes = cuda::aligned_shared_bytes(kBytes, 1024);
  static_assert(kStageBytes % 1024 == 0 && kSharedBytes <= 227 * 1024);
};

// delta_factors_kernel: a warp computes a value head, and the heads share q and k of one key head.
inline constexpr int kFactorHeads = 4;
inline constexpr int kFactorThreads = 32 * kFactorHeads;
struct DeltaFactorLayout {
  // fp32 rows of 64, padded: stores of a warp's accumulators, transposed, are free of bank conflicts, and rows stay
  // aligned to 16 bytes.
  static constexpr int kPitch = 68;
  static constexpr int kSquareBytes = kDeltaChunk * kPitch * 4;

  static constexpr int kKeys = 0;
  static constexpr int kQueries = kKeys + kDeltaTileBytes;
  static constexpr int kSquare = 0;  // [heads], overwrites the tiles
  static_assert(kQueries + kDeltaTileBytes <= kFactorHeads * kSquareBytes);
  static constexpr int kSums = kSquare + kFactorHeads * kSquareBytes;    // [heads][64]: G
  static constexpr int kBeta = kSums + kFactorHeads * kDeltaChunk * 4;   // [heads][64]
  static constexpr int kNorms = kBeta + kFactorHeads * kDeltaChunk * 4;  // [2][64]: factors of k and q
  static constexpr int kBytes = kNorms + 2 * kDeltaChunk * 4;
  static constexpr int kSharedBytes = cuda::aligned_shared_bytes(kBytes, 1024);
  static_assert(3 * (kSharedBytes + 1024) <= 228 * 1024);  // three CTAs
};

// delta_key_factors_kernel: a CTA computes a chunk of a value head.
struct DeltaKeyFactorLayout {
  // fp32 rows of 128, padded: rows that lanes read side by side are in different banks.
  static constexpr int kPitch = 132;

  static constexpr int kKeys = 0;
  static constexpr int kQueries = kKeys + kDeltaTileBytes;
  static constexpr int kScores = kQueries + kDeltaTileBytes;               // [64, 64]
  static constexpr int kSums = kScores + kDeltaSquareBytes;                // [64][128]: G
  static constexpr int kSquare = kSums + kDeltaChunk * kPitch * 4;         // [64, 64], as in DeltaFactorLayout
  static constexpr int kBeta = kSquare + DeltaFactorLayout::kSquareBytes;  // [64]
  static constexpr int kNorms = kBeta + kDeltaChunk * 4;                   // [2][64]: factors of k and q
  static constexpr int kBytes = kNorms + 2 * kDeltaChunk * 4;
  static constexpr int kSharedBytes = cuda::aligned_shared_bytes(kBytes, 1024);
  static_assert(2 * (kSharedBytes + 1024) <= 228 * 1024);  // two CTAs
};

// The kernels, bf16. Functions enqueue and throw if a launch fails.
struct GatedDeltaLauncher {
  void (*load)();  // loads all kernels onto the current device
  void (*factors)(const DeltaParams& params, cudaStream_t stream);
  void (*states)(const DeltaParams& params, cudaStream_t stream);
  void (*carry)(const DeltaParams& params, int form, cudaStream_t stream);  // an index of kDeltaCarryForms
  void (*outputs)(const DeltaParams& params, cudaStream_t stream);
  void (*update)(const DeltaUpdateParams& params, cudaStream_t stream);
};

extern const GatedDeltaLauncher gated_delta_bf16_128;

}  // namespace ringattn::sm90
