// SPDX-License-Identifier: Apache-2.0
// The factors of a chunk's products that do not depend on the state, besides q, k and v: T · diag(β) with T = (I + A)⁻¹
// and A_ij = β_i (k_i · k_j) exp2(G_i − G_j) for j < i, decays of the chunk's tokens, and the scores scale · (q_i ·
// k_j) exp2(G_i − G_j) for j ≤ i. A CTA computes a chunk for up to four value heads that share q and k. Its warpgroup
// computes k · kᵀ and q · kᵀ by wgmma and scales them for each head. Then each warp inverts one head's matrix.
//
// The inverse. Lane l owns columns l and l + 32 of T and computes them by substitution, in blocks of 16 rows: sums over
// the rows above the block, then the block's triangle, all by fma, ascending. −A is stored transposed above the
// diagonal of a square in shared memory, so that one 16-byte load, the same for all lanes, brings four rows' elements.
// T is stored below the diagonal. Lanes read only columns of T that they wrote.
#pragma once

#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/warpgroup_gemm.cuh"
#include "kernels/gated_delta/sm90/delta_segment.cuh"

namespace ringattn::sm90 {

inline constexpr float kDeltaLog2E = 1.44269504F;
// The log2 decay of one token is at least this (kernels/gated_delta/gated_delta.hpp).
inline constexpr float kDeltaMinLog = -150.0F;

// The decay of one token in log2 units, clamped. NaN stays NaN.
__device__ __forceinline__ float log2_decay(float log_decay) {
  float log;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(log) : "f"(__fmul_rn(log_decay, kDeltaLog2E)), "f"(kDeltaMinLog));
  return log;
}

// G of the chunk's tokens, and β, by one warp. Tokens past the end have decay 1 and β = 0, so that they change nothing.
__device__ __forceinline__ void load_gates(const DeltaParams& p, std::int64_t row, int tokens, int head, float* sums,
                                           float* beta) {
  const int lane = thread_of_warpgroup() % 32;
  float log[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    const bool present = token < tokens;
    log[i] = present ? log2_decay(delta_number(p.log_decay, row + token, head)) : 0.0F;
    beta[token] = present ? delta_number(p.beta, row + token, head) : 0.0F;
  }
  float sum = __fadd_rn(log[0], log[1]);  // of this lane's pair and the 2^step − 1 pairs before
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float before = __shfl_up_sync(0xffffffffU, sum, distance);
    if (lane >= distance) sum = __fadd_rn(before, sum);
  }
  const float before = __shfl_up_sync(0xffffffffU, sum, 1);
  sums[2 * lane] = lane == 0 ? log[0] : __fadd_rn(before, log[0]);
  sums[2 * lane + 1] = sum;
}

// The norm's factor of one row of k or q: 1 / sqrt(Σ x² + eps). Each thread computes one row of the two tiles.
__device__ __forceinline__ void compute_norms(std::uint32_t keys, float* norms) {
  const int row = thread_of_warpgroup() % kDeltaChunk;
  const std::uint32_t tile = keys + thread_of_warpgroup() / kDeltaChunk * kDeltaTileBytes;
  float sum = 0.0F;
#pragma unroll 1
  for (int chunk = 0; chunk < kDeltaDim / 8; ++chunk) {
    const uint4 vector = cuda::load_shared_16(tile + chunk / 8 * kDeltaSquareBytes + cuda::swizzled(row, chunk % 8));
    const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = unpack_bf16(words[w]);
      sum = __fmaf_rn(pair.y, pair.y, __fmaf_rn(pair.x, pair.x, sum));
    }
  }
  norms[thread_of_warpgroup()] = __fdiv_rn(1.0F, __fsqrt_rn(__fadd_rn(sum, kQkL2NormEps)));
}

// Scales k · kᵀ by −1 and the norms' factors, and q · kᵀ by `scale` and the norms' factors. This is the same for all
// heads.
__device__ __forceinline__ void scale_by_norms(float (&kk)[8][4], float (&qk)[8][4], const float* norms, float scale) {
  const int first_row = tile_row_of_thread();
  float of_k[2];
  float of_q[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    of_k[half] = -norms[first_row + 8 * half];
    of_q[half] = __fmul_rn(scale, norms[kDeltaChunk + first_row + 8 * half]);
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 columns = *reinterpret_cast<const float2*>(norms + 8 * n + thread_of_cta() % 4 * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float column = e % 2 == 0 ? columns.x : columns.y;
      kk[n][e] = __fmul_rn(kk[n][e], __fmul_rn(of_k[e / 2], column));
      qk[n][e] = __fmul_rn(qk[n][e], __fmul_rn(of_q[e / 2], column));
    }
  }
}

// One head: stores −A, transposed, above the diagonal of `square`, and unless null the rounded scores as a panel in
// global memory. A quad stores 16 bytes at a time: a panel for each head in shared memory would leave room for two CTAs
// instead of three.
__device__ __forceinline__ void scale_by_decays(const float (&kk)[8][4], const float (&qk)[8][4], const float* sums,
                                                const float* beta, float* square, unsigned char* scores) {
  const int warp = thread_of_warpgroup() / 32;
  const int lane = thread_of_warpgroup() % 32;
  const int first_row = tile_row_of_thread();
  const float row_sum[2] = {sums[first_row], sums[first_row + 8]};
  const float row_beta[2] = {beta[first_row], beta[first_row + 8]};
  float* const own = square + lane % 4 * 2 * DeltaFactorLayout::kPitch + first_row;
  unsigned char* const own_scores = scores + first_row * cuda::kPanelRowBytes + lane % 4 * 4;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k > warp) {  // above the diagonal
      if (scores != nullptr) {
        __stcg(reinterpret_cast<uint4*>(scores + cuda::swizzled(16 * warp + lane % 16, 2 * k + lane / 16)),
               make_uint4(0, 0, 0, 0));
      }
      continue;
    }
#pragma unroll
    for (int n = 2 * k; n < 2 * k + 2; ++n) {
      const float2 column_sums = *reinterpret_cast<const float2*>(sums + 8 * n + lane % 4 * 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half;
        float score[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int below = row - (8 * n + lane % 4 * 2 + e);  // rows below the diagonal
          const float decay = cuda::exp2_approx(__fsub_rn(row_sum[half], e == 0 ? column_sums.x : column_sums.y));
          if (below > 0) {
            own[(8 * n + e) * DeltaFactorLayout::kPitch + 8 * half] =
                __fmul_rn(__fmul_rn(row_beta[half], decay), kk[n][2 * half + e]);
          }
          score[e] = below >= 0 ? __fmul_rn(decay, qk[n][2 * half + e]) : 0.0F;
        }
        if (scores != nullptr) {
          // The swizzle of rows lane / 4 and that + 8 of each 16.
          *reinterpret_cast<std::uint32_t*>(own_scores + half * 8 * cuda::kPanelRowBytes + ((n ^ lane / 4) << 4)) =
              pack_bf16(score[0], score[1]);
        }
      }
    }
  }
}

// One warp: replaces −A by T.
__device__ __forceinline__ void invert(float* square) {
  constexpr int kPitch = DeltaFactorLayout::kPitch;
  const int lane = thread_of_warpgroup() % 32;
#pragma unroll 1
  for (int block = 0; block < 4; ++block) {
    const int first = 16 * block;
    const bool both = block >= 2;  // the second column is zero in the rows of the other blocks
    float t[2][16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      t[0][i] = first + i == lane ? 1.0F : 0.0F;
      t[1][i] = first + i == lane + 32 ? 1.0F : 0.0F;
    }
    // Subtracts row j of T times column j of A, from the block's rows from `begin` on.
    const auto subtract = [&](int j, int begin, float of_first, float of_second, bool second) {
#pragma unroll
      for (int i = begin / 4 * 4; i < 16; i += 4) {
        const float4 a = *reinterpret_cast<const float4*>(square + j * kPitch + first + i);
        const float elements[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (i + e < begin) continue;
          t[0][i + e] = __fmaf_rn(elements[e], of_first, t[0][i + e]);
          if (second) t[1][i + e] = __fmaf_rn(elements[e], of_second, t[1][i + e]);
        }
      }
    };
    const int rows_of_first = first < 32 ? first : 32;
#pragma unroll 4
    for (int j = 0; j < rows_of_first; ++j) {
      subtract(j, 0, j >= lane ? square[j * kPitch + lane] : 0.0F, 0.0F, false);
    }
#pragma unroll 2
    for (int j = 32; j < first; ++j) {
      subtract(j, 0, square[j * kPitch + lane], j >= lane + 32 ? square[j * kPitch + lane + 32] : 0.0F, true);
    }
    if (both) {
#pragma unroll
      for (int j = 0; j < 15; ++j) subtract(first + j, j + 1, t[0][j], t[1][j], true);
    } else {
#pragma unroll
      for (int j = 0; j < 15; ++j) subtract(first + j, j + 1, t[0][j], 0.0F, false);
    }
    float* const own = square + first * kPitch + lane;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (lane <= first + i) own[i * kPitch] = t[0][i];
      if (lane + 32 <= first + i) own[i * kPitch + 32] = t[1][i];
    }
  }
}

// Called by one warp. Stores T · diag(β) as a panel, with zeros above the diagonal. The panel overwrites T: its row i
// ends no later than row i / 2 of T did.
__device__ __forceinline__ void round_inverse(const float* square, const float* beta, std::uint32_t panel) {
  const int lane = thread_of_warpgroup() % 32;
  const int chunk = lane % 8;  // of eight columns
  float factors[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) factors[e] = beta[8 * chunk + e];
#pragma unroll 4
  for (int row = lane / 8; row < kDeltaChunk; row += 4) {
    const int below = row - 8 * chunk;  // rows below the diagonal, in the first column
    const auto* const vectors = reinterpret_cast<const float4*>(square + row * DeltaFactorLayout::kPitch + 8 * chunk);
    const float4 low = vectors[0];
    const float4 high = vectors[1];
    const float elements[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float rounded[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) rounded[e] = e <= below ? __fmul_rn(elements[e], factors[e]) : 0.0F;
    std::uint32_t packed[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) packed[r] = pack_bf16(rounded[2 * r], rounded[2 * r + 1]);
    __syncwarp();  // all lanes have read these rows
    cuda::store_shared(panel + cuda::swizzled(row, chunk), uint4{packed[0], packed[1], packed[2], packed[3]});
  }
}

// Each warp: the decays of a head's chunk, in global memory.
__device__ __forceinline__ void store_decays(const float* sums, const float* norms, float scale,
                                             unsigned char* factors) {
  const int lane = thread_of_warpgroup() % 32;
  const auto at = [factors](int offset) { return reinterpret_cast<float*>(factors + offset); };
  const float last = sums[kDeltaChunk - 1];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    const float decay = cuda::exp2_approx(sums[token]);
    at(DeltaFactors::kKeyDecay)[token] = __fmul_rn(decay, norms[token]);
    at(DeltaFactors::kStateDecay)[token] = __fmul_rn(cuda::exp2_approx(__fsub_rn(last, sums[token])), norms[token]);
    at(DeltaFactors::kQueryDecay)[token] = __fmul_rn(__fmul_rn(scale, decay), norms[kDeltaChunk + token]);
  }
  if (lane == 0) *at(DeltaFactors::kChunkDecay) = cuda::exp2_approx(last);
}

template <class Element>
__global__ void __launch_bounds__(kFactorThreads, 3)
    delta_factors_kernel(const __grid_constant__ DeltaParams p, int head_blocks) {
  using Layout = DeltaFactorLayout;
  extern __shared__ unsigned char delta_dynamic[];
  unsigned char* const shared = cuda::aligned_shared<1024>(delta_dynamic);
  const std::uint32_t base = cuda::shared_address(shared);
  const int nth_block = static_cast<int>(blockIdx.x) % head_blocks;
  const int chunk = static_cast<int>(blockIdx.x) / head_blocks % kDeltaChunksOfSegment;
  const DeltaSegment segment = delta_segment(p, static_cast<int>(blockIdx.x) / head_blocks / kDeltaChunksOfSegment);
  if (chunk >= segment.chunks()) return;

  // The block's heads: those of the launch's range in a part of a key head's heads.
  const int blocks_of_key = (p.heads_per_key + kFactorHeads - 1) / kFactorHeads;
  const int key_head = p.first_head / p.heads_per_key + nth_block / blocks_of_key;
  const int block_begin = key_head * p.heads_per_key + nth_block % blocks_of_key * kFactorHeads;
  const int key_end = (key_head + 1) * p.heads_per_key;
  const int range_end = p.first_head + p.head_count;
  const int first_head = block_begin > p.first_head ? block_begin : p.first_head;
  int end_head = block_begin + kFactorHeads;
  if (end_head > key_end) end_head = key_end;
  if (end_head > range_end) end_head = range_end;
  const int heads = end_head - first_head;
  if (heads <= 0) return;

  const std::int64_t row = segment.row + std::int64_t{chunk} * kDeltaChunk;
  const int tokens = segment.tokens_of(chunk);
  cuda::copy_tile<kDeltaChunk, kDeltaDim, kFactorThreads>(base + Layout::kKeys, delta_rows(p.k, row, key_head), 0,
                                                          tokens);
  // q is also read for its norms' factors, which go with the decays.
  cuda::copy_tile<kDeltaChunk, kDeltaDim, kFactorThreads>(base + Layout::kQueries, delta_rows(p.q, row, key_head), 0,
                                                          tokens);
  cuda::copy_commit();
  const int warp = thread_of_warpgroup() / 32;
  const auto floats = [shared](int offset) { return reinterpret_cast<float*>(shared + offset); };
  float* const sums = floats(Layout::kSums);
  float* const beta = floats(Layout::kBeta);
  float* const norms = floats(Layout::kNorms);
  if (warp < heads) {
    load_gates(p, row, tokens, first_head + warp, sums + warp * kDeltaChunk, beta + warp * kDeltaChunk);
  }
  cuda::copy_wait<0>();
  proxy_fence();
  __syncthreads();
  float kk[8][4];
  float qk[8][4];
  multiply_transposed<Element, kDeltaDim, kDeltaChunk, kDeltaChunk, kDeltaChunk>(kk, base + Layout::kKeys,
                                                                                 base + Layout::kKeys);
  multiply_transposed<Element, kDeltaDim, kDeltaChunk, kDeltaChunk, kDeltaChunk>(qk, base + Layout::kQueries,
                                                                                 base + Layout::kKeys);
  if (p.qk_l2norm) {
    compute_norms(base + Layout::kKeys, norms);
  } else {
    norms[thread_of_warpgroup()] = 1.0F;
  }
  wgmma_wait<0>();
  pin(kk);
  pin(qk);
  __syncthreads();  // norms are written; all warps have read the tiles, which squares overwrite
  scale_by_norms(kk, qk, norms, p.scale);
  const std::int64_t first_index = delta_chunk_index(p, segment, first_head, chunk);
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    const std::int64_t index = first_index + head * kDeltaChunksOfSegment;
    scale_by_decays(kk, qk, sums + head * kDeltaChunk, beta + head * kDeltaChunk,
                    floats(Layout::kSquare + head * Layout::kSquareBytes),
                    p.computes_scores ? p.scores + index * kDeltaSquareBytes : nullptr);
  }
  __syncthreads();
  if (warp >= heads) return;
  unsigned char* const factors = p.factors + (first_index + warp * kDeltaChunksOfSegment) * DeltaFactors::kBytes;
  store_decays(sums + warp * kDeltaChunk, norms, p.scale, factors);
  float* const square = floats(Layout::kSquare + warp * Layout::kSquareBytes);
  invert(square);
  __syncwarp();
  const std::uint32_t panel = cuda::shared_address(square);
  round_inverse(square, beta + warp * kDeltaChunk, panel);
  proxy_fence();
  __syncwarp();
  if (thread_of_warpgroup() % 32 == 0) {
    tma_store_bytes(factors + DeltaFactors::kInverse, panel, kDeltaSquareBytes);
    tma_store_commit();
    tma_store_wait();
  }
}

}  // namespace ringattn::sm90
