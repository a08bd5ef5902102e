// SPDX-License-Identifier: Apache-2.0
// Gradients of rows (kernels/ssd_backward/ssd_backward.hpp, 4). A CTA computes a chunk for a set of heads, one head at
// a time, from the state before the chunk and the gradient after it. Eight warps (SsdTokens) compute everything that
// has a row per token and head: scores, dx, and the sums of dt. The other eight (SsdSets) accumulate the sums over
// heads: dB and dC. Between two heads there is one barrier.
//
// Rounding: states, their gradients, intra-chunk scores of dx, and the sums of intra-chunk scores over the set's heads
// are bf16. x, g, B and C are MMA operands without conversion; if they are fp16 and the other operand is bf16, they are
// split into a bf16 pair. Decays and scales are applied in fp32. All sums are fp32.
#pragma once

#include "kernels/ssd_backward/sm80/ssd_states.cuh"

namespace ringattn::sm80 {

inline constexpr int kTokensBarrier = 1;

// Parameters and shared-memory addresses that both groups of warps use.
template <class Element, int kDims, int kStates>
struct SsdRowsCta {
  using InputElement = Element;
  using Shape = SsdRowsShape<kDims, kStates>;

  const SsdRowsParams& p;
  const std::uint32_t memory;
  float* const floats;
  const int nth;  // segment of the batch
  const int chunk;
  const SegmentCoord segment;
  const HeadBlock heads;

  __device__ __forceinline__ SsdRowsCta(const SsdRowsParams& params, float* shared)
      : p(params),
        memory(cuda::shared_address(shared)),
        floats(shared),
        nth(static_cast<int>(blockIdx.x) / params.blocks / kChunksOfSegment),
        chunk(static_cast<int>(blockIdx.x) / params.blocks % kChunksOfSegment),
        segment(cuda::segment_coord(params.scan, params.first_segment + nth)),
        heads(cuda::head_block(params.scan, params.set_heads, static_cast<int>(blockIdx.x) % params.blocks)) {}

  // Tokens from the chunk's first one to the end of the segment. May exceed kChunk.
  __device__ __forceinline__ int tokens() const { return segment.tokens - chunk * kChunk; }
  __device__ __forceinline__ std::int64_t row() const { return segment.row + chunk * kChunk; }

  __device__ __forceinline__ std::uint32_t b() const { return memory; }
  __device__ __forceinline__ std::uint32_t c() const { return memory + Shape::kC; }
  __device__ __forceinline__ std::uint32_t scores() const { return memory + Shape::kScores; }
  // x of a head; its other tiles are at Shape::kG, kState and kGradient.
  __device__ __forceinline__ std::uint32_t head(int index) const {
    return memory + Shape::kHead + static_cast<std::uint32_t>(index % Shape::kStages * Shape::kStageBytes);
  }
  // [64] dA_cumsum in log2 units, then [64] dt.
  __device__ __forceinline__ const float* da_cumsum(int index) const {
    return floats + Shape::kDaCumsum / 4 + index % (Shape::kStages + 1) * kChunkDaCumsumFloats;
  }
  __device__ __forceinline__ float* sums(int index) const {
    return floats + Shape::kSums / 4 + index % 2 * Shape::kSumFloats;
  }

  __device__ __forceinline__ void issue_shared() const {
    copy_chunk_rows<Shape::kThreads, kStates>(b(), p.scan.b, row(), heads.group, tokens(), p.scan.state_dim);
    copy_chunk_rows<Shape::kThreads, kStates>(c(), p.scan.c, row(), heads.group, tokens(), p.scan.state_dim);
  }

  // Issues the copies of the index-th head, as one cp.async group per thread.
  __device__ __forceinline__ void issue_head(int index) const {
    if (index < heads.count) {
      const int head_of_all = heads.first + index;
      const std::uint32_t target = head(index);
      const int thread = static_cast<int>(threadIdx.x);
      const std::int64_t of_chunk =
          (std::int64_t{nth} * kChunksOfSegment + chunk) * p.scan.head_count + head_of_all - p.scan.first_head;
      copy_chunk_rows<Shape::kThreads, kDims>(target, p.scan.x, row(), head_of_all, tokens(), p.scan.head_dim);
      copy_chunk_rows<Shape::kThreads, kDims>(target + Shape::kG, p.g, row(), head_of_all, tokens(), p.scan.head_dim);
#pragma unroll
      for (int i = 0; i < kDims * kStates / kVectorElements / Shape::kThreads; ++i) {
        const int element = (i * Shape::kThreads + thread) * kVectorElements;
        const auto at = static_cast<std::uint32_t>(element / kStates * Shape::kBPitch + element % kStates * 2);
        const std::int64_t from =
            of_chunk * (kDims * kStates) + chunk_state_offset<kDims>(element / kStates, element % kStates);
        cuda::copy_16(target + Shape::kState + at, p.states + from, true);
        cuda::copy_16(target + Shape::kGradient + at, p.gradients + from, true);
      }
      if (thread < kChunkDaCumsumFloats / 4) {
        const std::int64_t from =
            ((segment.index * p.scan.heads + head_of_all) * kChunksOfSegment + chunk) * kChunkDaCumsumFloats;
        cuda::copy_16(cuda::shared_address(da_cumsum(index)) + thread * 16, p.scan.da_cumsum + from + thread * 4, true);
      }
    }
    cuda::copy_commit();
  }
};

// Two adjacent elements of a tile in shared memory.
template <class Element>
__device__ __forceinline__ float2 load_pair_of(std::uint32_t tile, int row, int column, int pitch) {
  return unpack(static_cast<std::uint32_t>(cuda::load_shared_number(tile_at(tile, row, column, pitch))), Element());
}

// Scores, dx and the sums of dt, by eight warps. Warps 2 i and 2 i + 1 have rows [16 i, 16 i + 16): of scores, the
// blocks on and below the diagonal in turn, and of dx half of the dims each.
template <class Element, int kDims, int kStates>
class SsdTokens {
 public:
  using Cta = SsdRowsCta<Element, kDims, kStates>;
  using Shape = typename Cta::Shape;
  static constexpr int kXPitch = Shape::kXPitch;
  static constexpr int kBPitch = Shape::kBPitch;

  __device__ __forceinline__ SsdTokens(const Cta& cta, int warp, int lane)
      : cta_(cta), lane_(lane), block_row_(warp / 2), half_(warp % 2) {}

  // C · Bᵀ, the same for all heads.
  __device__ __forceinline__ void compute_cb() {
#pragma unroll
    for (int k = 0; k < kStates / 16; ++k) {
      multiply_blocks(cb_, tile_at(cta_.c(), 16 * block_row_, 16 * k, kBPitch), cta_.b(), 16 * k, kBPitch);
    }
  }

  __device__ __forceinline__ void compute(int index) {
    compute_scores(index);
    cuda::named_sync(kTokensBarrier, Shape::kGroupThreads);
    compute_dx(index);
  }

  // The warp that has no block of scores.
  __device__ __forceinline__ bool finishes_heads() const { return block_row_ == 0 && half_ == 1; }

  // Stores the sums of intra-chunk scores over the heads.
  __device__ __forceinline__ void store_scores() const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (column_of(u) > block_row_) continue;
#pragma unroll
      for (int t = 0; t < 2; ++t) store_score_pairs(u, t, weights_[u][t]);
    }
  }

 private:
  __device__ __forceinline__ int column_of(int u) const { return half_ + 2 * u; }  // of a block

  // sum[u] += left · (rows of the u-th block of `right`)ᵀ, for 16 columns of both.
  __device__ __forceinline__ void multiply_blocks(float (&sum)[2][2][4], std::uint32_t left, std::uint32_t right,
                                                  int column, int pitch) const {
    if (column_of(0) > block_row_) return;
    std::uint32_t a[4];
    load_matrix(a, left + down_first(lane_, pitch));
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (column_of(u) > block_row_) continue;
      std::uint32_t b[4];
      load_matrix(b, tile_at(right, 16 * column_of(u), column, pitch) + right_first(lane_, pitch));
      cuda::MmaTraits<Element>::mma(sum[u][0], a, b[0], b[1], sum[u][0]);
      cuda::MmaTraits<Element>::mma(sum[u][1], a, b[2], b[3], sum[u][1]);
    }
  }

  __device__ __forceinline__ void store_score_pairs(int u, int t, const float (&values)[4]) const {
    const std::uint32_t target = tile_at(cta_.scores(), 16 * block_row_ + lane_ / 4,
                                         16 * column_of(u) + 8 * t + lane_ % 4 * 2, kIntraChunkPitch);
    cuda::store_shared(target, Bf16Mma::pack(values[0], values[1]));
    cuda::store_shared(target + 8 * kIntraChunkPitch, Bf16Mma::pack(values[2], values[3]));
  }

  // (C · Bᵀ) · decays to shared memory, for dx. Adds (g · xᵀ) · decays · dt to the sums over heads. Their product with
  // C · Bᵀ is the gradient of the logarithms of the decays.
  __device__ __forceinline__ void compute_scores(int index) {
    float* const sums = cta_.sums(index);
    const float* const da_cumsum = cta_.da_cumsum(index);
    const std::uint32_t x = cta_.head(index);
    float gx[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < kDims / 16; ++k) {
      multiply_blocks(gx, tile_at(x + Shape::kG, 16 * block_row_, 16 * k, kXPitch), x, 16 * k, kXPitch);
    }
    const float of_rows[2] = {da_cumsum[16 * block_row_ + lane_ / 4], da_cumsum[16 * block_row_ + lane_ / 4 + 8]};
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int block_column = column_of(u);
      if (block_column > block_row_) continue;
      const bool diagonal = block_column == block_row_;
      float w[2][4];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int column = 16 * block_column + 8 * t + lane_ % 4 * 2;
        const float2 to = *reinterpret_cast<const float2*>(da_cumsum + column);
        const float2 dt = *reinterpret_cast<const float2*>(da_cumsum + kChunk + column);
        float decayed[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int offset = 8 * t + lane_ % 4 * 2 + e % 2 - lane_ / 4 - e / 2 * 8;  // column − row, on the diagonal
          const bool present = !diagonal || offset <= 0;
          const float decay = cuda::exp2_approx(__fsub_rn(of_rows[e / 2], e % 2 == 0 ? to.x : to.y));
          const float weight = __fmul_rn(__fmul_rn(gx[u][t][e], decay), e % 2 == 0 ? dt.x : dt.y);
          decayed[e] = present ? __fmul_rn(cb_[u][t][e], decay) : 0.0F;
          w[t][e] = present ? __fmul_rn(cb_[u][t][e], weight) : 0.0F;
          if (present) weights_[u][t][e] = __fadd_rn(weights_[u][t][e], weight);
          if (diagonal && offset == 0) sums[Shape::kSkip + column + e % 2] = gx[u][t][e];
        }
        store_score_pairs(u, t, decayed);
      }
      if (diagonal) {
        cuda::store_diagonal_sums(w, lane_, sums + Shape::kWithin + 16 * block_row_);
        continue;
      }
      const int block = cuda::block_below(block_row_, block_column);
      float columns[2][2];
      float rows[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows[i] =
            cuda::sum_quad(__fadd_rn(__fadd_rn(w[0][2 * i], w[0][2 * i + 1]), __fadd_rn(w[1][2 * i], w[1][2 * i + 1])));
#pragma unroll
        for (int e = 0; e < 2; ++e) columns[i][e] = __fadd_rn(w[i][e], w[i][e + 2]);
      }
      cuda::store_column_sums(columns, lane_, sums + Shape::kColumns + 16 * block);
      if (lane_ % 4 == 0) {
        sums[Shape::kRows + 16 * block + lane_ / 4] = rows[0];
        sums[Shape::kRows + 16 * block + lane_ / 4 + 8] = rows[1];
      }
    }
  }

  __device__ __forceinline__ void compute_dx(int index) const {
    constexpr int kHalf = kDims / 2;
    float* const sums = cta_.sums(index);
    const float* const da_cumsum = cta_.da_cumsum(index);
    const std::uint32_t x = cta_.head(index);
    const std::uint32_t g = x + Shape::kG;
    const int first_row = 16 * block_row_ + lane_ / 4;
    const int first_dim = half_ * kHalf;
    float dx[kHalf / 8][4] = {};
    // B · Gᵀ
#pragma unroll
    for (int k = 0; k < kStates / 16; ++k) {
      std::uint32_t raw[4];
      load_matrix(raw, tile_at(cta_.b(), 16 * block_row_, 16 * k, kBPitch) + down_first(lane_, kBPitch));
      const InputOperand<Element, 4> b(raw);
#pragma unroll
      for (int n = 0; n < kHalf / 16; ++n) {
        std::uint32_t right[4];
        load_matrix(right,
                    tile_at(x + Shape::kGradient, first_dim + 16 * n, 16 * k, kBPitch) + right_first(lane_, kBPitch));
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
          for (const auto& addend : b.addend) {
            Bf16Mma::mma(dx[2 * n + t], addend, right[2 * t], right[2 * t + 1], dx[2 * n + t]);
          }
        }
      }
    }
    const float last = da_cumsum[kChunk - 1];
    const float after[2] = {cuda::exp2_approx(__fsub_rn(last, da_cumsum[first_row])),
                            cuda::exp2_approx(__fsub_rn(last, da_cumsum[first_row + 8]))};
    float from_gradients[2] = {};
#pragma unroll
    for (int n = 0; n < kHalf / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 at = load_pair_of<Element>(x, first_row + 8 * i, first_dim + 8 * n + lane_ % 4 * 2, kXPitch);
        dx[n][2 * i] = __fmul_rn(after[i], dx[n][2 * i]);
        dx[n][2 * i + 1] = __fmul_rn(after[i], dx[n][2 * i + 1]);
        from_gradients[i] = __fmaf_rn(at.x, dx[n][2 * i], __fmaf_rn(at.y, dx[n][2 * i + 1], from_gradients[i]));
      }
    }
    // scoresᵀ · g
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      if (k < block_row_) continue;
      std::uint32_t scores[1][4];
      load_matrix_transposed(scores[0], tile_at(cta_.scores(), 16 * k, 16 * block_row_, kIntraChunkPitch) +
                                            right_first(lane_, kIntraChunkPitch));
#pragma unroll
      for (int n = 0; n < kHalf / 16; ++n) {
        std::uint32_t raw[4];
        load_matrix_transposed(raw, tile_at(g, 16 * k, first_dim + 16 * n, kXPitch) + down_first(lane_, kXPitch));
        const InputOperand<Element, 4> operand(raw);
        multiply_factor(dx[2 * n], scores, operand, 0);
        multiply_factor(dx[2 * n + 1], scores, operand, 1);
      }
    }
    const int head = cta_.heads.first + index;
    const float skip = cta_.p.scan.d != nullptr ? cta_.p.scan.d[head] : 0.0F;
    const int tokens = cta_.tokens();
    const std::int64_t first = cta_.row();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + 8 * i;
      const float dt = da_cumsum[kChunk + row];
      float of_dt = 0.0F;
#pragma unroll
      for (int n = 0; n < kHalf / 16; ++n) {
        float2 pairs[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          const int column = first_dim + 16 * n + 8 * t + lane_ % 4 * 2;
          const float2 at = load_pair_of<Element>(x, row, column, kXPitch);
          const float* const value = dx[2 * n + t] + 2 * i;
          of_dt = __fmaf_rn(at.x, value[0], __fmaf_rn(at.y, value[1], of_dt));
          pairs[t] = make_float2(__fmul_rn(dt, value[0]), __fmul_rn(dt, value[1]));
          if (cta_.p.scan.d != nullptr) {
            const float2 of_g = load_pair_of<Element>(g, row, column, kXPitch);
            pairs[t] = make_float2(__fmaf_rn(skip, of_g.x, pairs[t].x), __fmaf_rn(skip, of_g.y, pairs[t].y));
          }
        }
        cuda::store_gradient_pairs<Element>(cta_.p.dx, first + row, head, first_dim + 16 * n + lane_ % 4 * 2,
                                            cta_.p.scan.head_dim, row < tokens, pairs[0], pairs[1], lane_);
      }
      of_dt = cuda::sum_quad(of_dt);
      const float from = __fmul_rn(dt, cuda::sum_quad(from_gradients[i]));
      if (lane_ % 4 == 0) {
        sums[Shape::kOfDt + half_ * kChunk + row] = of_dt;
        sums[Shape::kFromGradients + half_ * kChunk + row] = from;
      }
    }
  }

  const Cta& cta_;
  const int lane_;
  const int block_row_;
  const int half_;
  float cb_[2][2][4] = {};
  float weights_[2][2][4] = {};  // Σ_heads (g · xᵀ) · decays · dt
};

// dB and dC of the set, by eight warps. A warp has 32 tokens and a quarter of the states.
template <class Element, int kDims, int kStates>
class SsdSets {
 public:
  using Cta = SsdRowsCta<Element, kDims, kStates>;
  using Shape = typename Cta::Shape;
  static constexpr int kXPitch = Shape::kXPitch;
  static constexpr int kBPitch = Shape::kBPitch;
  static constexpr int kColumns = kStates / 4;

  __device__ __forceinline__ SsdSets(const Cta& cta, int warp, int lane)
      : cta_(cta), warp_(warp), lane_(lane), first_row_(warp % 2 * 32), first_column_(warp / 2 * kColumns) {}

  __device__ __forceinline__ void compute(int index) {
    float* const sums = cta_.sums(index);
    const float* const da_cumsum = cta_.da_cumsum(index);
    const std::uint32_t x = cta_.head(index);
    const float last = da_cumsum[kChunk - 1];
    store_inner(index, sums);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = first_row_ + 16 * m + lane_ / 4;
      float sum[kColumns / 8][4] = {};
      multiply_states(sum, x + Shape::kG, x + Shape::kState, m);
      const float before[2] = {cuda::exp2_approx(da_cumsum[row]), cuda::exp2_approx(da_cumsum[row + 8])};
      float from_states[2] = {};
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 c = load_pair_of<Element>(cta_.c(), row + 8 * i, first_column_ + 8 * n + lane_ % 4 * 2, kBPitch);
          const float* const value = sum[n] + 2 * i;
          from_states[i] = __fmaf_rn(c.x, value[0], __fmaf_rn(c.y, value[1], from_states[i]));
          dc_[m][n][2 * i] = __fmaf_rn(before[i], value[0], dc_[m][n][2 * i]);
          dc_[m][n][2 * i + 1] = __fmaf_rn(before[i], value[1], dc_[m][n][2 * i + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float from = __fmul_rn(before[i], cuda::sum_quad(from_states[i]));
        if (lane_ % 4 == 0) sums[Shape::kFromStates + warp_ / 2 * kChunk + row + 8 * i] = from;
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = first_row_ + 16 * m + lane_ / 4;
      float sum[kColumns / 8][4] = {};
      multiply_states(sum, x, x + Shape::kGradient, m);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale =
            __fmul_rn(cuda::exp2_approx(__fsub_rn(last, da_cumsum[row + 8 * i])), da_cumsum[kChunk + row + 8 * i]);
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          db_[m][n][2 * i] = __fmaf_rn(scale, sum[n][2 * i], db_[m][n][2 * i]);
          db_[m][n][2 * i + 1] = __fmaf_rn(scale, sum[n][2 * i + 1], db_[m][n][2 * i + 1]);
        }
      }
    }
  }

  // Adds the terms within the chunk, and stores both gradients.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int block_row = first_row_ / 16 + m;
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k) {
        if (k <= block_row) {
          std::uint32_t scores[1][4];
          load_matrix(scores[0], tile_at(cta_.scores(), 16 * block_row, 16 * k, kIntraChunkPitch) +
                                     down_first(lane_, kIntraChunkPitch));
          multiply_scores(dc_[m], scores, cta_.b(), k);
        }
        if (k >= block_row) {
          std::uint32_t scores[1][4];
          load_matrix_transposed(scores[0], tile_at(cta_.scores(), 16 * k, 16 * block_row, kIntraChunkPitch) +
                                                right_first(lane_, kIntraChunkPitch));
          multiply_scores(db_[m], scores, cta_.c(), k);
        }
      }
    }
    const SsmParams& s = cta_.p.scan;
    const int groups = s.heads / s.group_heads;
    const int set = (cta_.heads.first - cta_.heads.group * s.group_heads) / cta_.p.set_heads;
    const int sets = (s.group_heads + cta_.p.set_heads - 1) / cta_.p.set_heads;
    const std::int64_t all = std::int64_t{sets} * cta_.p.rows * groups * s.state_dim;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = first_row_ + 16 * m + 8 * i + lane_ / 4;
        if (token >= cta_.tokens()) continue;
        float* const db = cta_.p.set_db + ((set * cta_.p.rows + cta_.row() + token) * groups + cta_.heads.group) *
                                              std::int64_t{s.state_dim};
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const int column = first_column_ + 8 * n + lane_ % 4 * 2;
          if (column >= s.state_dim) continue;
          *reinterpret_cast<float2*>(db + column) = make_float2(db_[m][n][2 * i], db_[m][n][2 * i + 1]);
          *reinterpret_cast<float2*>(db + all + column) = make_float2(dc_[m][n][2 * i], dc_[m][n][2 * i + 1]);
        }
      }
    }
  }

 private:
  // sum += (rows of `left` [64, kDims]) · `right` [kDims, kStates], for 16 of the warp's rows and all its columns.
  __device__ __forceinline__ void multiply_states(float (&sum)[kColumns / 8][4], std::uint32_t left,
                                                  std::uint32_t right, int m) const {
#pragma unroll
    for (int k = 0; k < kDims / 16; ++k) {
      std::uint32_t raw[4];
      load_matrix(raw, tile_at(left, first_row_ + 16 * m, 16 * k, kXPitch) + down_first(lane_, kXPitch));
      const InputOperand<Element, 4> rows(raw);
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        std::uint32_t b[4];
        load_matrix_transposed(b, tile_at(right, 16 * k, first_column_ + 16 * n, kBPitch) + down_first(lane_, kBPitch));
#pragma unroll
        for (int t = 0; t < 2; ++t) {
#pragma unroll
          for (const auto& addend : rows.addend) {
            Bf16Mma::mma(sum[2 * n + t], addend, b[2 * t], b[2 * t + 1], sum[2 * n + t]);
          }
        }
      }
    }
  }

  // sum += scores · (tokens [16 k, 16 k + 16) of B or C).
  __device__ __forceinline__ void multiply_scores(float (&sum)[kColumns / 8][4], const std::uint32_t (&scores)[1][4],
                                                  std::uint32_t tile, int k) const {
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      std::uint32_t raw[4];
      load_matrix_transposed(raw, tile_at(tile, 16 * k, first_column_ + 16 * n, kBPitch) + down_first(lane_, kBPitch));
      const InputOperand<Element, 4> operand(raw);
      multiply_factor(sum[2 * n], scores, operand, 0);
      multiply_factor(sum[2 * n + 1], scores, operand, 1);
    }
  }

  // The warp's part of ⟨S, G⟩: diagonals of S · Gᵀ.
  __device__ __forceinline__ void store_inner(int index, float* sums) const {
    constexpr int kBlocks = kDims / 16;  // 4 or 8
    constexpr int kSteps = kStates / 16 / (8 / kBlocks);
    const std::uint32_t x = cta_.head(index);
    float sum[2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int column = 16 * (warp_ / kBlocks * kSteps + k);
      std::uint32_t left[4];
      std::uint32_t right[4];
      load_matrix(left,
                  tile_at(x + Shape::kState, 16 * (warp_ % kBlocks), column, kBPitch) + down_first(lane_, kBPitch));
      load_matrix(right,
                  tile_at(x + Shape::kGradient, 16 * (warp_ % kBlocks), column, kBPitch) + right_first(lane_, kBPitch));
      Bf16Mma::mma(sum[0], left, right[0], right[1], sum[0]);
      Bf16Mma::mma(sum[1], left, right[2], right[3], sum[1]);
    }
    float inner = 0.0F;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (lane_ % 4 * 2 + e == lane_ / 4) inner = __fadd_rn(sum[0][e], sum[1][2 + e]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) inner = __fadd_rn(inner, __shfl_xor_sync(0xffffffffU, inner, step));
    if (lane_ == 0) sums[Shape::kInner + warp_] = inner;
  }

  const Cta& cta_;
  const int warp_;
  const int lane_;
  const int first_row_;
  const int first_column_;
  float db_[2][kColumns / 8][4] = {};
  float dc_[2][kColumns / 8][4] = {};
};

template <class Element, int kDims, int kStates>
__global__ void __launch_bounds__(SsdRowsShape<kDims, kStates>::kThreads, 1)
    ssd_rows_kernel(const __grid_constant__ SsdRowsParams p) {
  extern __shared__ __align__(16) float ssd_memory[];
  using Shape = SsdRowsShape<kDims, kStates>;
  const SsdRowsCta<Element, kDims, kStates> cta(p, ssd_memory);
  if (cta.tokens() <= 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int count = cta.heads.count;
  const auto for_each_head = [&](auto compute) {
#pragma unroll 1
    for (int index = 0; index < count; ++index) {
      if constexpr (Shape::kStages > 1) cuda::copy_wait<Shape::kStages - 2>();
      __syncthreads();  // the head has landed, and all reads of the previous one are done
      cta.issue_head(index + Shape::kStages - 1);
      if constexpr (Shape::kStages == 1) {
        cuda::copy_wait<0>();
        __syncthreads();
      }
      compute(index);
    }
    __syncthreads();
  };
  cta.issue_shared();  // part of the first head's group
  for (int index = 0; index < Shape::kStages - 1; ++index) cta.issue_head(index);
  if (warp < Shape::kGroupThreads / 32) {
    SsdTokens<Element, kDims, kStates> tokens(cta, warp, lane);
    cuda::DtGradient<SsdRowsCta<Element, kDims, kStates>> dt{cta};
    typename decltype(dt)::Inputs inputs{};
    for_each_head([&](int index) {
      if (index == 0) tokens.compute_cb();
      if (tokens.finishes_heads()) {
        if (index > 0) dt.finish(index - 1, lane, inputs);
        inputs = dt.load(index, lane);
      }
      tokens.compute(index);
    });
    tokens.store_scores();
    if (tokens.finishes_heads()) dt.finish(count - 1, lane, inputs);
    __syncthreads();
  } else {
    SsdSets<Element, kDims, kStates> sets(cta, warp - Shape::kGroupThreads / 32, lane);
    for_each_head([&](int index) { sets.compute(index); });
    __syncthreads();  // the scores are stored
    sets.finish();
  }
}

}  // namespace ringattn::sm80
