// SPDX-License-Identifier: Apache-2.0
// delta_factors.cuh for decays per key dim (KDA). A CTA computes a chunk of one value head: T · diag(β), the scores,
// and q and k times their decays, one tile for each product of the chunk's passes. Decays are within the sums over key
// dims,
//
//   A_ij = β_i Σ_d k_id k_jd exp2(G_id − G_jd)       scores_ij = scale Σ_d q_id k_jd exp2(G_id − G_jd)
//
// and exponents must not be positive. Warp w has rows 16 w … 16 w + 15, a sub-chunk. Left of its diagonal block, with s
// the last token before the sub-chunk, the factors k_i exp2(G_i − G_s), q_i exp2(G_i − G_s) and k_j exp2(G_s − G_j) are
// rounded operands of mma.sync, made in registers. The diagonal block is a sum of fp32 terms. Then one
// warp inverts the matrix, while the others write the tiles.
#pragma once

#include "kernels/common/cuda/lane_sums.cuh"
#include "kernels/gated_delta/sm90/delta_factors.cuh"

namespace ringattn::sm90 {

// The shared memory of a chunk.
struct KeyFactorMemory {
  std::uint32_t base;
  unsigned char* bytes;

  __device__ __forceinline__ float* floats(int offset) const { return reinterpret_cast<float*>(bytes + offset); }
  // G of a token, from dim `dim` on.
  __device__ __forceinline__ const float* sums(int token, int dim) const {
    return floats(DeltaKeyFactorLayout::kSums) + token * DeltaKeyFactorLayout::kPitch + dim;
  }
  // Elements of q or k, from an even dim on.
  __device__ __forceinline__ const unsigned char* elements(int tile, int token, int dim) const {
    return bytes + tile + dim / cuda::kPanelColumns * kDeltaSquareBytes +
           cuda::swizzled(token, dim % cuda::kPanelColumns / 8) + dim % 8 * 2;
  }
  __device__ __forceinline__ float2 pair(int tile, int token, int dim) const {
    return unpack_bf16(*reinterpret_cast<const std::uint32_t*>(elements(tile, token, dim)));
  }
};

// G of the chunk's tokens: each thread has a dim. Tokens past the end have decay 1.
__device__ __forceinline__ void load_key_sums(const DeltaParams& p, const KeyFactorMemory& memory, std::int64_t row,
                                              int tokens, int head) {
  const int dim = thread_of_cta();
  const auto* const logs = static_cast<const float*>(p.log_decay.data) + row * p.log_decay.token_stride +
                           head * p.log_decay.head_stride + dim;
  float* const sums = memory.floats(DeltaKeyFactorLayout::kSums) + dim;
  float sum = 0.0F;
#pragma unroll 8
  for (int token = 0; token < kDeltaChunk; ++token) {
    if (token < tokens) sum = __fadd_rn(sum, log2_decay(logs[token * p.log_decay.token_stride]));
    sums[token * DeltaKeyFactorLayout::kPitch] = sum;
  }
}

// exp2(a − b) of two dims.
__device__ __forceinline__ float2 pair_decay(const float* a, const float* b) {
  const float2 first = *reinterpret_cast<const float2*>(a);
  const float2 second = *reinterpret_cast<const float2*>(b);
  return {cuda::exp2_approx(__fsub_rn(first.x, second.x)), cuda::exp2_approx(__fsub_rn(first.y, second.y))};
}
__device__ __forceinline__ std::uint32_t pack_product(float2 a, float2 b) {
  return pack_bf16(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y));
}

// The factors of an element of the two products, and where it is stored: −A transposed, as invert() needs it, and the
// scores as a panel.
class KeyFactorRow {
 public:
  __device__ __forceinline__ KeyFactorRow(const KeyFactorMemory& memory, int row, float scale) {
    norms_ = memory.floats(DeltaKeyFactorLayout::kNorms);
    square_ = memory.floats(DeltaKeyFactorLayout::kSquare) + row;
    of_k_ = -__fmul_rn(memory.floats(DeltaKeyFactorLayout::kBeta)[row], norms_[row]);
    of_q_ = __fmul_rn(scale, norms_[kDeltaChunk + row]);
  }

  __device__ __forceinline__ void store_product(int column, float product) const {
    square_[column * DeltaFactorLayout::kPitch] = __fmul_rn(__fmul_rn(of_k_, norms_[column]), product);
  }
  __device__ __forceinline__ float score(int column, float product) const {
    return __fmul_rn(__fmul_rn(of_q_, norms_[column]), product);
  }

 private:
  const float* norms_;
  float* square_;
  float of_k_, of_q_;
};

// A warp's rows, left of the diagonal block.
template <class Element>
__device__ __forceinline__ void multiply_earlier_tokens(const KeyFactorMemory& memory, float scale) {
  using Layout = DeltaKeyFactorLayout;
  using Mma = cuda::MmaTraits<Element>;
  constexpr int kSteps = kDeltaDim / 16;
  const int warp = thread_of_cta() / 32;
  const int lane = thread_of_cta() % 32;
  if (warp == 0) return;
  const int first_row = 16 * warp + lane / 4;
  const int before = 16 * warp - 1;
  const int first_dim = lane % 4 * 2;
  std::uint32_t keys[kSteps][4];
  std::uint32_t queries[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = first_row + r % 2 * 8;
      const int dim = 16 * step + first_dim + r / 2 * 8;
      const float2 decay = pair_decay(memory.sums(row, dim), memory.sums(before, dim));
      keys[step][r] = pack_product(memory.pair(Layout::kKeys, row, dim), decay);
      queries[step][r] = pack_product(memory.pair(Layout::kQueries, row, dim), decay);
    }
  }
  const KeyFactorRow rows[2] = {{memory, first_row, scale}, {memory, first_row + 8, scale}};
#pragma unroll 1
  for (int n = 0; n < 2 * warp; ++n) {
    const int token = 8 * n + lane / 4;
    float kk[4] = {};
    float qk[4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t earlier[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int dim = 16 * step + first_dim + r * 8;
        earlier[r] = pack_product(memory.pair(Layout::kKeys, token, dim),
                                  pair_decay(memory.sums(before, dim), memory.sums(token, dim)));
      }
      Mma::mma(kk, keys[step], earlier[0], earlier[1], kk);
      Mma::mma(qk, queries[step], earlier[0], earlier[1], qk);
    }
    const int column = 8 * n + first_dim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half].store_product(column, kk[2 * half]);
      rows[half].store_product(column + 1, kk[2 * half + 1]);
      cuda::store_shared(
          memory.base + Layout::kScores + cuda::swizzled(first_row + 8 * half, n) + first_dim * 2,
          pack_bf16(rows[half].score(column, qk[2 * half]), rows[half].score(column + 1, qk[2 * half + 1])));
    }
  }
}

// A warp's diagonal block, and zeros in the scores to the right of it. Lanes 8 g … 8 g + 7 have columns g, g + 4, g + 8
// and g + 12, and lane l of them dims 4 l + 32 m … 4 l + 32 m + 3. From row to row the keys of the columns are
// multiplied by the next token's decays: one exp2 for each row and dim, not for each term.
__device__ __forceinline__ void multiply_own_tokens(const KeyFactorMemory& memory, float scale) {
  using Layout = DeltaKeyFactorLayout;
  constexpr int kParts = kDeltaDim / 32;
  const int warp = thread_of_cta() / 32;
  const int lane = thread_of_cta() % 32;
  const int first_row = 16 * warp;
  const int group = lane / 8;
  const int first_dim = lane % 8 * 4;
  const auto four = [&](int tile, int row, int part, float(&elements)[4]) {
    const uint2 words = *reinterpret_cast<const uint2*>(memory.elements(tile, first_row + row, first_dim + 32 * part));
    const float2 low = unpack_bf16(words.x);
    const float2 high = unpack_bf16(words.y);
    elements[0] = low.x;
    elements[1] = low.y;
    elements[2] = high.x;
    elements[3] = high.y;
  };
  // Sums of rows 4 · block … 4 · block + 3 with columns group + 4 · of: of k, then of q.
  float sums[4][4][8] = {};
#pragma unroll 1  // unrolled, it does not fit the instruction cache
  for (int part = 0; part < kParts; ++part) {
    float keys[4][4];  // of columns group + 4 · of, times their decays up to the row
#pragma unroll
    for (int of = 0; of < 4; ++of) four(Layout::kKeys, 4 * of + group, part, keys[of]);
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      float k[4];
      float q[4];
      float decays[4] = {};
      four(Layout::kKeys, row, part, k);
      four(Layout::kQueries, row, part, q);
      if (row > 0) {
        const int dim = first_dim + 32 * part;
        const float4 own = *reinterpret_cast<const float4*>(memory.sums(first_row + row, dim));
        const float4 before = *reinterpret_cast<const float4*>(memory.sums(first_row + row - 1, dim));
        decays[0] = cuda::exp2_approx(__fsub_rn(own.x, before.x));
        decays[1] = cuda::exp2_approx(__fsub_rn(own.y, before.y));
        decays[2] = cuda::exp2_approx(__fsub_rn(own.z, before.z));
        decays[3] = cuda::exp2_approx(__fsub_rn(own.w, before.w));
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int of = 0; of <= row / 4; ++of) {
          float(&sum)[8] = sums[row / 4][of];
          // A select instead of a branch: branches would delay the loads of later rows.
          keys[of][e] = __fmul_rn(keys[of][e], of < row / 4 || group < row % 4 ? decays[e] : 1.0F);
          sum[row % 4] = __fmaf_rn(k[e], keys[of][e], sum[row % 4]);
          sum[4 + row % 4] = __fmaf_rn(q[e], keys[of][e], sum[4 + row % 4]);
        }
      }
    }
  }
  // Lanes 0 … 3 of a group have the sums of k, the others those of q.
  const bool is_score = lane % 8 >= 4;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const int row = 4 * block + lane % 4;
    const KeyFactorRow factors(memory, first_row + row, scale);
#pragma unroll
    for (int of = 0; of < 4; ++of) {
      const int column = 4 * of + group;
      const float sum = of <= block ? cuda::sum_over_eight_lanes(sums[block][of]) : 0.0F;
      if (is_score) {
        const float score = column <= row ? factors.score(first_row + column, sum) : 0.0F;
        cuda::store_shared_half(memory.base + Layout::kScores +
                                    cuda::swizzled(first_row + row, (first_row + column) / 8) +
                                    static_cast<std::uint32_t>(column % 8 * 2),
                                pack_bf16(score, 0.0F));
      } else if (column < row) {
        factors.store_product(first_row + column, sum);
      }
    }
  }
  for (int block = warp + 1; block < kDeltaChunk / 16; ++block) {
    cuda::store_shared(memory.base + Layout::kScores + cuda::swizzled(first_row + lane % 16, 2 * block + lane / 16),
                       uint4{0, 0, 0, 0});
  }
}

// q and k of the chunk times their decays, by threads `first` … of the CTA.
__device__ __forceinline__ void store_decayed(const KeyFactorMemory& memory, float scale, int first,
                                              unsigned char* tiles) {
  using Layout = DeltaKeyFactorLayout;
  constexpr int kVectors = kDeltaDim / 8;
  const float* const norms = memory.floats(Layout::kNorms);
#pragma unroll 1
  for (int i = thread_of_cta() - first; i < kDeltaChunk * kVectors; i += kFactorThreads - first) {
    const int token = i / kVectors;
    const int vector = i % kVectors;
    const float of_k = norms[token];
    const float of_q = __fmul_rn(scale, norms[kDeltaChunk + token]);
    std::uint32_t keys[4];
    std::uint32_t update_keys[4];
    std::uint32_t queries[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int dim = 8 * vector + 2 * r;
      const float2 sum = *reinterpret_cast<const float2*>(memory.sums(token, dim));
      const float2 decay = {cuda::exp2_approx(sum.x), cuda::exp2_approx(sum.y)};
      const float2 rest = pair_decay(memory.sums(kDeltaChunk - 1, dim), memory.sums(token, dim));
      const float2 k = memory.pair(Layout::kKeys, token, dim);
      const float2 q = memory.pair(Layout::kQueries, token, dim);
      keys[r] = pack_product(k, {__fmul_rn(of_k, decay.x), __fmul_rn(of_k, decay.y)});
      update_keys[r] = pack_product(k, {__fmul_rn(of_k, rest.x), __fmul_rn(of_k, rest.y)});
      queries[r] = pack_product(q, {__fmul_rn(of_q, decay.x), __fmul_rn(of_q, decay.y)});
    }
    const std::uint32_t offset =
        static_cast<std::uint32_t>(vector / 8 * kDeltaSquareBytes) + cuda::swizzled(token, vector % 8);
    const auto store = [tiles, offset](int tile, const std::uint32_t(&words)[4]) {
      __stcg(reinterpret_cast<uint4*>(tiles + tile + offset), make_uint4(words[0], words[1], words[2], words[3]));
    };
    store(DeltaDecayed::kKeys, keys);
    store(DeltaDecayed::kUpdateKeys, update_keys);
    store(DeltaDecayed::kQueries, queries);
  }
}

template <class Element>
__global__ void __launch_bounds__(kFactorThreads, 2) delta_key_factors_kernel(const __grid_constant__ DeltaParams p) {
  using Layout = DeltaKeyFactorLayout;
  extern __shared__ unsigned char delta_dynamic[];
  unsigned char* const shared = cuda::aligned_shared<1024>(delta_dynamic);
  const KeyFactorMemory memory{cuda::shared_address(shared), shared};
  const int thread = thread_of_cta();
  const int head = p.first_head + static_cast<int>(blockIdx.x) % p.head_count;
  const int chunk = static_cast<int>(blockIdx.x) / p.head_count % kDeltaChunksOfSegment;
  const DeltaSegment segment = delta_segment(p, static_cast<int>(blockIdx.x) / p.head_count / kDeltaChunksOfSegment);
  if (chunk >= segment.chunks()) return;
  const int key_head = head / p.heads_per_key;
  const std::int64_t row = segment.row + std::int64_t{chunk} * kDeltaChunk;
  const int tokens = segment.tokens_of(chunk);
  cuda::copy_tile<kDeltaChunk, kDeltaDim, kFactorThreads>(memory.base + Layout::kKeys, delta_rows(p.k, row, key_head),
                                                          0, tokens);
  cuda::copy_tile<kDeltaChunk, kDeltaDim, kFactorThreads>(memory.base + Layout::kQueries,
                                                          delta_rows(p.q, row, key_head), 0, tokens);
  cuda::copy_commit();
  load_key_sums(p, memory, row, tokens, head);
  float* const beta = memory.floats(Layout::kBeta);
  if (thread < kDeltaChunk) beta[thread] = thread < tokens ? delta_number(p.beta, row + thread, head) : 0.0F;
  cuda::copy_wait<0>();
  __syncthreads();
  float* const norms = memory.floats(Layout::kNorms);
  if (p.qk_l2norm) {
    compute_norms(memory.base + Layout::kKeys, norms);
  } else {
    norms[thread] = 1.0F;
  }
  __syncthreads();
  multiply_earlier_tokens<Element>(memory, p.scale);
  multiply_own_tokens(memory, p.scale);
  proxy_fence();
  __syncthreads();
  const std::int64_t index = delta_chunk_index(p, segment, head, chunk);
  unsigned char* const factors = p.factors + index * DeltaFactors::kBytes;
  if (thread < 32) {
    float* const square = memory.floats(Layout::kSquare);
    invert(square);
    __syncwarp();
    round_inverse(square, beta, memory.base + Layout::kSquare);
    proxy_fence();
    __syncwarp();
    if (thread == 0) {
      tma_store_bytes(factors + DeltaFactors::kInverse, memory.base + Layout::kSquare, kDeltaSquareBytes);
      tma_store_commit();
      tma_store_wait();
    }
    return;
  }
  if (thread == 32 && p.computes_scores) {
    tma_store_bytes(p.scores + index * kDeltaSquareBytes, memory.base + Layout::kScores, kDeltaSquareBytes);
    tma_store_commit();
  }
  __syncwarp();
  for (int dim = thread - 32; dim < kDeltaDim; dim += kFactorThreads - 32) {
    reinterpret_cast<float*>(factors + DeltaFactors::kDimDecay)[dim] =
        cuda::exp2_approx(*memory.sums(kDeltaChunk - 1, dim));
  }
  store_decayed(memory, p.scale, 32, p.decayed + index * DeltaDecayed::kBytes);
  if (thread == 32) tma_store_wait();
}

}  // namespace ringattn::sm90
