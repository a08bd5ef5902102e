// SPDX-License-Identifier: Apache-2.0
// Gradients of rows on Hopper (kernels/ssd_backward/ssd_backward.hpp, 4). A CTA computes a chunk for a set of heads,
// one head at a time, from the state before the chunk and the gradient after it. README.md has a diagram of its
// warpgroups.
//
// Rounding: that of sm80's ssd_rows_kernel, with these differences. For dB and dC, the scales and the scaled x and g
// are rounded to bf16 instead of scaling in fp32, because the sums over heads stay in the accumulators. For dx, dt and
// D are included in the scores before these are rounded. The terms w_ij of the log-decays' gradients are summed by
// MMAs, for which w_ij / dt_j and dt_j are rounded to bf16.
#pragma once

#include "kernels/common/cuda/tile_copy.cuh"
#include "kernels/common/sm90/matrix.cuh"
#include "kernels/common/sm90/mbarrier.cuh"
#include "kernels/common/sm90/threads.cuh"
#include "kernels/common/sm90/tma.cuh"
#include "kernels/common/sm90/wgmma.cuh"
#include "kernels/common/sm90/wgmma_m64n32_ss.cuh"
#include "kernels/ssd_backward/cuda/ssd_backward_device.cuh"
#include "kernels/ssd_backward/sm90/ssd_rows.hpp"

namespace ringattn::sm90 {

using Bf16Mma = cuda::MmaTraits<Bf16>;
using Wgmma64 = Wgmma<Bf16, 64>;

// Named barrier: the sums of scores are in shared memory.
inline constexpr int kSetScoresBarrier = 1;

// Shared memory, the chunk and the heads of a CTA.
template <int kStates>
struct HopperRowsCta {
  using InputElement = Bf16;
  using Shape = HopperRowsShape<kStates>;

  const HopperSsdRows& params;
  const cuda::SsdRowsParams& p;
  unsigned char* const bytes;
  const std::uint32_t memory;
  const int nth;  // segment of the batch
  const int chunk;
  const cuda::SegmentCoord segment;
  const cuda::HeadBlock heads;

  __device__ __forceinline__ HopperRowsCta(const HopperSsdRows& given, unsigned char* shared)
      : params(given),
        p(given.rows),
        bytes(cuda::aligned_shared<1024>(shared)),
        memory(cuda::shared_address(bytes)),
        nth(static_cast<int>(blockIdx.x) / p.blocks / kChunksOfSegment),
        chunk(static_cast<int>(blockIdx.x) / p.blocks % kChunksOfSegment),
        segment(cuda::segment_coord(p.scan, p.first_segment + nth)),
        heads(cuda::head_block(p.scan, p.set_heads, static_cast<int>(blockIdx.x) % p.blocks)) {}

  __device__ __forceinline__ int tokens() const { return segment.tokens - chunk * kChunk; }
  __device__ __forceinline__ std::int64_t row() const { return segment.row + chunk * kChunk; }

  __device__ __forceinline__ std::uint32_t at(int offset) const { return memory + static_cast<std::uint32_t>(offset); }
  __device__ __forceinline__ std::uint32_t b() const { return memory; }
  __device__ __forceinline__ std::uint32_t c() const { return at(Shape::kC); }
  // x of a head; its other tiles are at Shape::kG, kState and kGradient.
  __device__ __forceinline__ std::uint32_t head(int index) const {
    return at(Shape::kHead + index % Shape::kStages * Shape::kStageBytes);
  }
  __device__ __forceinline__ std::uint32_t scores(int index) const {
    return at(Shape::kScores + index % 2 * Shape::kScoreBytes);
  }
  // (C · Bᵀ) · (g · xᵀ) · decays, in blocks on and below the diagonal.
  __device__ __forceinline__ std::uint32_t products(int index) const {
    return at(Shape::kProducts + index % 2 * Shape::kScoreBytes);
  }
  // [64] dA_cumsum in log2 units, then [64] dt.
  __device__ __forceinline__ const float* da_cumsum(int index) const {
    return reinterpret_cast<const float*>(bytes + Shape::kDaCumsum) +
           index % Shape::kDaCumsumStages * kChunkDaCumsumFloats;
  }
  __device__ __forceinline__ float* sums(int index) const {
    return reinterpret_cast<float*>(bytes + Shape::kSumsAt) + index % Shape::kSumStages * Shape::kSumFloats;
  }

  // Barriers of a head, and the parity of their phase. A wait for an empty buffer takes the opposite parity.
  __device__ __forceinline__ std::uint32_t full(int index) const { return barrier(index % Shape::kStages); }
  __device__ __forceinline__ std::uint32_t empty(int index) const {
    return barrier(Shape::kStages + index % Shape::kStages);
  }
  __device__ __forceinline__ std::uint32_t sums_full(int index) const {
    return barrier(2 * Shape::kStages + index % Shape::kSumStages);
  }
  __device__ __forceinline__ std::uint32_t sums_empty(int index) const {
    return barrier(2 * Shape::kStages + Shape::kSumStages + index % Shape::kSumStages);
  }
  __device__ __forceinline__ std::uint32_t scores_full(int index) const { return of_pair(0, index); }
  __device__ __forceinline__ std::uint32_t scores_empty(int index) const { return of_pair(1, index); }
  __device__ __forceinline__ std::uint32_t products_full(int index) const { return of_pair(2, index); }
  __device__ __forceinline__ std::uint32_t products_empty(int index) const { return of_pair(3, index); }
  __device__ __forceinline__ static std::uint32_t parity(int index) {
    return static_cast<std::uint32_t>(index / Shape::kStages) & 1U;
  }
  __device__ __forceinline__ static std::uint32_t sums_parity(int index) {
    return static_cast<std::uint32_t>(index / Shape::kSumStages) & 1U;
  }
  __device__ __forceinline__ static std::uint32_t pair_parity(int index) {
    return static_cast<std::uint32_t>(index / 2) & 1U;
  }

  // By one thread.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = kWarpgroup / 32;  // of three warpgroups; two warps of the fourth leave sums too
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), 3 * kWarps);
    }
    for (int i = 0; i < Shape::kSumStages; ++i) {
      barrier_init(sums_full(i), 3 * kWarps + 2);
      barrier_init(sums_empty(i), 1);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(scores_full(i), kWarps);
      barrier_init(scores_empty(i), kWarps);
      barrier_init(products_full(i), kWarps);
      barrier_init(products_empty(i), 2);
    }
    barrier_init_fence();
  }
  // Called by a warp whose lanes are all done.
  __device__ __forceinline__ static void arrive(std::uint32_t barrier) {
    __syncwarp();
    if (thread_of_cta() % 32 == 0) barrier_arrive(barrier);
  }

 private:
  __device__ __forceinline__ std::uint32_t barrier(int nth_of_all) const {
    return at(Shape::kBarriers + nth_of_all * kBarrierBytes);
  }
  __device__ __forceinline__ std::uint32_t of_pair(int which, int index) const {
    return barrier(2 * (Shape::kStages + Shape::kSumStages + which) + index % 2);
  }
};

// Copies `rows` rows of a chunk into panels of 64 columns, and zero-fills the rest.
__device__ __forceinline__ void copy_rows_to_panels(std::uint32_t target, const cuda::SsmTensor& tensor,
                                                    std::int64_t row, int head, int rows, int columns, int thread,
                                                    int threads) {
  const auto* const source = cuda::element_at<std::uint16_t>(tensor, row, head);
  const int vectors = columns / 8;
#pragma unroll 1
  for (int i = thread; i < kChunk * vectors; i += threads) {
    const int token = i / vectors;
    const int vector = i % vectors;
    const bool present = token < rows;
    cuda::copy_chunk(
        target + static_cast<std::uint32_t>(vector / 8 * cuda::panel_bytes(kChunk)) + cuda::swizzled(token, vector % 8),
        reinterpret_cast<const char*>(source + (present ? token : 0) * tensor.token_stride + vector * 8), present,
        tensor.aligned);
  }
  cuda::copy_commit();
  cuda::copy_wait<0>();
}

// Advances of a descriptor by 16 · k columns of a K-major operand in panels of 64 rows, and by 16 · k rows of an
// MN-major one.
__device__ __forceinline__ std::uint32_t columns_16(int k) {
  return static_cast<std::uint32_t>((k / 4 * cuda::panel_bytes(64) + k % 4 * 32) >> 4);
}
__device__ __forceinline__ std::uint32_t rows_16(int k) {
  return static_cast<std::uint32_t>(k * 16 * cuda::kPanelRowBytes >> 4);
}

// d = A · Bᵀ for A [64, 16 · kSteps] and B [64, 16 · kSteps]. Issues the MMAs.
template <int kSteps>
__device__ __forceinline__ void multiply_transposed(float (&d)[8][4], std::uint32_t a_tile, std::uint32_t b_tile) {
  const std::uint32_t a = warp_uniform(descriptor_low(a_tile));
  const std::uint32_t b = warp_uniform(descriptor_low(b_tile));
  pin(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    Wgmma64::ss(d, descriptor(a + columns_16(k)), descriptor(b + columns_16(k)), k > 0);
  }
  wgmma_commit();
}

// Operand A of 16 rows, from a multiple of 16 on, and columns [16 k, 16 k + 16) of a panel, and the same of the
// transposed panel. Panels are aligned to 1,024 bytes, so the swizzle flips bits of the address for k = 0.
__device__ __forceinline__ void load_rows(std::uint32_t (&r)[4], std::uint32_t panel, int row, int k, int lane) {
  cuda::load_matrix(r, ((panel + cuda::swizzled(lane % 16, lane / 16)) ^ static_cast<std::uint32_t>(k << 5)) +
                           static_cast<std::uint32_t>(row * cuda::kPanelRowBytes));
}
__device__ __forceinline__ void load_columns(std::uint32_t (&r)[4], std::uint32_t panel, int column, int k, int lane) {
  cuda::load_matrix_transposed(r, panel + cuda::swizzled(16 * k + lane % 8 + lane / 16 * 8, column / 8 + lane / 8 % 2));
}
// This thread's pair of columns in each tile of 8 columns of its row of a panel, and of the row 8 below.
struct PairsOfThread {
  std::uint32_t first;

  __device__ __forceinline__ explicit PairsOfThread(std::uint32_t panel)
      : first(panel + cuda::swizzled(tile_row_of_thread(), 0) + static_cast<std::uint32_t>(thread_of_cta() % 4 * 4)) {}

  __device__ __forceinline__ std::uint32_t at(int tile, int half) const {
    return (first ^ static_cast<std::uint32_t>(tile << 4)) +
           static_cast<std::uint32_t>(half * 8 * cuda::kPanelRowBytes);
  }
};

// By value: a conditional of two elements of an array would select an address, and the array would be in memory.
__device__ __forceinline__ float select(bool condition, float yes, float no) { return condition ? yes : no; }

// This lane has elements on the diagonal of a 16 x 16 block, in its even or odd columns: those of rows lane / 4 and
// lane / 4 + 8.
__device__ __forceinline__ bool on_diagonal(int lane) { return lane % 4 == lane / 8; }
__device__ __forceinline__ bool has_odd_row(int lane) { return lane / 4 % 2 != 0; }

// The first warpgroup: 16 rows of scores per warp. Of a product of 64 x 64, a warp uses only the blocks on and below
// the diagonal. Its nth block starts at column 16 (warp − n). So the code of a block is the same for all warps, which
// matters because all code of the kernel has to fit into the instruction cache.
template <int kStates>
class HopperScores {
 public:
  using Cta = HopperRowsCta<kStates>;
  using Shape = typename Cta::Shape;

  __device__ __forceinline__ explicit HopperScores(const Cta& cta)
      : cta_(cta), warp_(warp_uniform(thread_of_warpgroup() / 32)), lane_(thread_of_warpgroup() % 32) {}

  __device__ __forceinline__ void run() {
    {
      float all[8][4];
      multiply_transposed<kStates / 16>(all, cta_.c(), cta_.b());
      wgmma_wait<0>();
      pin(all);
      select_blocks(cb_, all);
    }
    const int count = cta_.heads.count;
#pragma unroll 1
    for (int index = 0; index < count; ++index) {
      float gx[4][2][4];
      const std::uint32_t x = cta_.head(index);
      const float skip = cta_.p.scan.d != nullptr ? cta_.p.scan.d[cta_.heads.first + index] : 0.0F;
      barrier_wait(cta_.full(index), Cta::parity(index));
      {
        float all[8][4];
        multiply_transposed<kRowsDims / 16>(all, x + Shape::kG, x);
        wgmma_wait<0>();
        pin(all);
        select_blocks(gx, all);
      }
      Cta::arrive(cta_.empty(index));
      compute(index, gx, skip);
    }
    // The sums of intra-chunk scores over the heads. They overwrite the scores of the last head but one.
    barrier_wait(cta_.scores_empty(count), Cta::pair_parity(count) ^ 1U);
    const PairsOfThread scores(cta_.scores(count));
#pragma unroll
    for (int n = 0; n < 4; ++n) store_block(scores, n, weights_[n]);
    named_arrive(kSetScoresBarrier, 2 * kWarpgroup);
  }

 private:
  // blocks[n] = the nth block: columns [16 (warp − n), 16 (warp − n) + 16) of `all`. For n > warp it is some other
  // block, which is not used. There are two steps of selects, so that register indices are constant and the code is the
  // same for all warps.
  __device__ __forceinline__ void select_blocks(float (&blocks)[4][2][4], const float (&all)[8][4]) const {
    const bool by_one = warp_ % 2 != 0;
    const bool by_two = warp_ / 2 != 0;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float turned[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          turned[n] = select(by_one, all[2 * ((5 - n) % 4) + t][e], all[2 * ((4 - n) % 4) + t][e]);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) blocks[n][t][e] = select(by_two, turned[(n + 2) % 4], turned[n]);
      }
    }
  }

  __device__ __forceinline__ void store_block(const PairsOfThread& target, int n, const float (&values)[2][4]) const {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const std::uint32_t words[2] = {Bf16Mma::pack(values[t][0], values[t][1]),
                                      Bf16Mma::pack(values[t][2], values[t][3])};
      const int tile = 2 * (warp_ - n) + t;
      if (n <= warp_) {
        cuda::store_shared(target.at(tile, 0), words[0]);
        cuda::store_shared(target.at(tile, 1), words[1]);
      }
    }
  }

  // (C · Bᵀ) · decays · dt and D to shared memory, for dx. Adds (g · xᵀ) · decays · dt to the sums over heads. The
  // products (C · Bᵀ) · (g · xᵀ) · decays, for dt and the log-decays, go to shared memory too. Every warp computes all
  // four blocks, and stores those it has: without branches the compiler interleaves blocks.
  __device__ __forceinline__ void compute(int index, const float (&gx)[4][2][4], float skip) {
    const float* const da_cumsum = cta_.da_cumsum(index) + 16 * warp_;  // from the warp's first row on
    const float of_first = da_cumsum[0];
    const float of_rows[2] = {da_cumsum[lane_ / 4], da_cumsum[lane_ / 4 + 8]};
    const float from_first[2] = {cuda::exp2_approx(__fsub_rn(of_rows[0], of_first)),
                                 cuda::exp2_approx(__fsub_rn(of_rows[1], of_first))};
    const float* const of_columns = da_cumsum + lane_ % 4 * 2;
    const PairsOfThread scores(cta_.scores(index));
    const PairsOfThread products(cta_.products(index));
    store_skips(index, gx[0]);
    barrier_wait(cta_.scores_empty(index), Cta::pair_parity(index) ^ 1U);
    barrier_wait(cta_.products_empty(index), Cta::pair_parity(index) ^ 1U);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int before = 16 * (n < warp_ ? n : warp_);  // tokens from the block's columns to the warp's rows
      float decays[2][4];
      float of_dx[2][4];
      float terms[2][4];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float2 to = *reinterpret_cast<const float2*>(of_columns - before + 8 * t);
        if (n == 0) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const bool later = 8 * t + lane_ % 4 * 2 + e % 2 > lane_ / 4 + e / 2 * 8;  // the column's token
            const float log = __fsub_rn(of_rows[e / 2], e % 2 == 0 ? to.x : to.y);
            decays[t][e] = cuda::exp2_approx(later ? -INFINITY : log);
          }
        } else {
          // Before all rows of the warp: the product of the decays to its first row and from there.
          const float to_first[2] = {cuda::exp2_approx(__fsub_rn(of_first, to.x)),
                                     cuda::exp2_approx(__fsub_rn(of_first, to.y))};
#pragma unroll
          for (int e = 0; e < 4; ++e) decays[t][e] = __fmul_rn(from_first[e / 2], to_first[e % 2]);
        }
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const float2 dt = *reinterpret_cast<const float2*>(of_columns + kChunk - before + 8 * t);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float of_column = e % 2 == 0 ? dt.x : dt.y;
          const float decayed = __fmul_rn(cb_[n][t][e], decays[t][e]);
          weights_[n][t][e] = __fadd_rn(weights_[n][t][e], __fmul_rn(__fmul_rn(gx[n][t][e], decays[t][e]), of_column));
          terms[t][e] = __fmul_rn(decayed, gx[n][t][e]);
          of_dx[t][e] = __fmul_rn(decayed, of_column);
        }
      }
      if (n == 0) add_to_diagonal(of_dx, skip);
      store_block(scores, n, of_dx);
      store_block(products, n, terms);
    }
    Cta::arrive(cta_.scores_full(index));
    Cta::arrive(cta_.products_full(index));
  }

  __device__ __forceinline__ void add_to_diagonal(float (&block)[2][4], float value) const {
    const float even = on_diagonal(lane_) && !has_odd_row(lane_) ? value : 0.0F;
    const float odd = on_diagonal(lane_) && has_odd_row(lane_) ? value : 0.0F;
    block[0][0] = __fadd_rn(block[0][0], even);
    block[0][1] = __fadd_rn(block[0][1], odd);
    block[1][2] = __fadd_rn(block[1][2], even);
    block[1][3] = __fadd_rn(block[1][3], odd);
  }

  // ⟨g_i, x_i⟩ of the warp's tokens.
  __device__ __forceinline__ void store_skips(int index, const float (&gx)[2][4]) const {
    barrier_wait(cta_.sums_empty(index), Cta::sums_parity(index) ^ 1U);
    if (on_diagonal(lane_)) {
      float* const skips = cta_.sums(index) + Shape::kSkip + 16 * warp_ + lane_ / 4;
      skips[0] = has_odd_row(lane_) ? gx[0][1] : gx[0][0];
      skips[8] = has_odd_row(lane_) ? gx[1][3] : gx[1][2];
    }
    Cta::arrive(cta_.sums_full(index));
  }

  const Cta& cta_;
  const int warp_;
  const int lane_;
  float cb_[4][2][4];
  float weights_[4][2][4] = {};
};

// The second warpgroup: dx of 16 tokens a warp.
template <int kStates>
class HopperTokens {
 public:
  using Cta = HopperRowsCta<kStates>;
  using Shape = typename Cta::Shape;

  __device__ __forceinline__ explicit HopperTokens(const Cta& cta)
      : cta_(cta), warp_(thread_of_warpgroup() / 32), lane_(thread_of_warpgroup() % 32) {}

  __device__ __forceinline__ void run() const {
    const bool with_tma = cta_.params.maps_dx && cta_.tokens() >= kChunk;
#pragma unroll 1
    for (int index = 0; index < cta_.heads.count; ++index) {
      const std::uint32_t x = cta_.head(index);
      const float* const da_cumsum = cta_.da_cumsum(index);
      const int row = 16 * warp_ + lane_ / 4;
      float dx[8][4];
      barrier_wait(cta_.full(index), Cta::parity(index));
      multiply_transposed<kStates / 16>(dx, cta_.b(), x + Shape::kGradient);
      const float last = da_cumsum[kChunk - 1];
      float after[2];
      float scales[2];
      std::uint32_t of_x[4][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        after[i] = cuda::exp2_approx(__fsub_rn(last, da_cumsum[row + 8 * i]));
        scales[i] = __fmul_rn(after[i], da_cumsum[kChunk + row + 8 * i]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) load_rows(of_x[k], x, 16 * warp_, k, lane_);
      wgmma_wait<0>();
      pin(dx);
      const float2 of_gradients = products(dx, of_x);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dx[n][e] = __fmul_rn(scales[e / 2], dx[n][e]);
      }
      add_within_chunk(dx, index, x + Shape::kG);
      Cta::arrive(cta_.empty(index));
      barrier_wait(cta_.sums_empty(index), Cta::sums_parity(index) ^ 1U);
      if (lane_ % 4 == 0) {
        float* const sums = cta_.sums(index);
        sums[Shape::kOfDt + row] = __fmul_rn(after[0], of_gradients.x);
        sums[Shape::kOfDt + row + 8] = __fmul_rn(after[1], of_gradients.y);
        sums[Shape::kFromGradients + row] = __fmul_rn(scales[0], of_gradients.x);
        sums[Shape::kFromGradients + row + 8] = __fmul_rn(scales[1], of_gradients.y);
      }
      Cta::arrive(cta_.sums_full(index));
      if (with_tma) {
        store_by_tma(dx, cta_.heads.first + index);
      } else {
        store_by_threads(dx, cta_.heads.first + index);
      }
    }
    if (with_tma && lane_ == 0) tma_store_wait();
  }

 private:
  // Σ_dims x · d of both rows, for all lanes of a quad.
  __device__ __forceinline__ static float2 products(const float (&dx)[8][4], const std::uint32_t (&of_x)[4][4]) {
    float sums[2] = {};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 x = cuda::unpack(of_x[n / 2][n % 2 * 2 + i], Bf16());
        sums[i] = __fmaf_rn(x.x, dx[n][2 * i], __fmaf_rn(x.y, dx[n][2 * i + 1], sums[i]));
      }
    }
    return make_float2(cuda::sum_quad(sums[0]), cuda::sum_quad(sums[1]));
  }

  // dx += scoresᵀ · g. Scores above the diagonal are zero.
  __device__ __forceinline__ void add_within_chunk(float (&dx)[8][4], int index, std::uint32_t g) const {
    std::uint32_t scores[4][4];
    barrier_wait(cta_.scores_full(index), Cta::pair_parity(index));
#pragma unroll
    for (int k = 0; k < 4; ++k) load_columns(scores[k], cta_.scores(index), 16 * warp_, k, lane_);
    Cta::arrive(cta_.scores_empty(index));
    const std::uint32_t right = warp_uniform(descriptor_low(g));
    pin(dx);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) Wgmma64::rs(dx, scores[k], descriptor(right + rows_16(k)), true);
    wgmma_commit();
    wgmma_wait<0>();
    pin(dx);
  }

  // Each warp stores its own rows.
  __device__ __forceinline__ void store_by_tma(const float (&dx)[8][4], int head) const {
    if (lane_ == 0) tma_store_wait_read();  // the tile's last store has read it
    __syncwarp();
    const std::uint32_t tile = cta_.at(Shape::kDx) + static_cast<std::uint32_t>(16 * warp_ * cuda::kPanelRowBytes);
    const std::uint32_t row = tile + cuda::swizzled(lane_ % 16, lane_ / 16);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float(&left)[4] = dx[2 * k];
      const float(&right)[4] = dx[2 * k + 1];
      store_matrix(row ^ static_cast<std::uint32_t>(k << 5),
                   {Bf16Mma::pack(left[0], left[1]), Bf16Mma::pack(left[2], left[3]), Bf16Mma::pack(right[0], right[1]),
                    Bf16Mma::pack(right[2], right[3])});
    }
    proxy_fence();
    __syncwarp();
    if (lane_ == 0) {
      tma_store_box(&cta_.params.dx, tile, 0, head, static_cast<int>(cta_.row()) + 16 * warp_);
      tma_store_commit();
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store_by_threads(const float (&dx)[8][4], int head) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * warp_ + lane_ / 4 + 8 * i;
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        cuda::store_gradient_pairs<Bf16>(cta_.p.dx, cta_.row() + row, head, 8 * n + lane_ % 4 * 2, kRowsDims,
                                         row < cta_.tokens(), make_float2(dx[n][2 * i], dx[n][2 * i + 1]),
                                         make_float2(dx[n + 1][2 * i], dx[n + 1][2 * i + 1]), lane_);
      }
    }
  }

  const Cta& cta_;
  const int warp_;
  const int lane_;
};

// The third warpgroup: dB and dC of the set, 16 tokens a warp, as accumulators over all heads.
template <int kStates>
class HopperSets {
 public:
  using Cta = HopperRowsCta<kStates>;
  using Shape = typename Cta::Shape;
  using WgmmaStates = Wgmma<Bf16, kStates>;

  __device__ __forceinline__ explicit HopperSets(const Cta& cta)
      : cta_(cta), warp_(thread_of_warpgroup() / 32), lane_(thread_of_warpgroup() % 32) {}

  __device__ __forceinline__ void run() {
    const int row = 16 * warp_ + lane_ / 4;
    const int count = cta_.heads.count;
#pragma unroll 1
    for (int index = 0; index < count; ++index) {
      const std::uint32_t x = cta_.head(index);
      const std::uint32_t g = x + Shape::kG;
      const float* const da_cumsum = cta_.da_cumsum(index);
      float y[4][4];  // S · C of half of the dims, because of registers
      barrier_wait(cta_.full(index), Cta::parity(index));
      multiply_half(y, cta_.c(), x + Shape::kState, 0);
      const float last = da_cumsum[kChunk - 1];
      const float before[2] = {cuda::exp2_approx(da_cumsum[row]), cuda::exp2_approx(da_cumsum[row + 8])};
      float scales[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scales[i] =
            __fmul_rn(cuda::exp2_approx(__fsub_rn(last, da_cumsum[row + 8 * i])), da_cumsum[kChunk + row + 8 * i]);
      }
      std::uint32_t scaled_g[4][4];
      load_scaled(scaled_g, g, before);
      accumulate(dc_, scaled_g, x + Shape::kState);
      wgmma_wait<1>();
      pin(y);
      float from_states[2] = {};
      add_products(from_states, y, g, 0);
      multiply_half(y, cta_.c(), x + Shape::kState, 1);
      wgmma_wait<0>();
      pin(y);
      pin(dc_);
      add_products(from_states, y, g, 1);
      multiply_half(y, x + Shape::kState, x + Shape::kGradient, 0);
      std::uint32_t scaled_x[4][4];
      load_scaled(scaled_x, x, scales);
      accumulate(db_, scaled_x, x + Shape::kGradient);
      wgmma_wait<1>();
      pin(y);
      float inner = diagonal(y, 0);
      multiply_half(y, x + Shape::kState, x + Shape::kGradient, 1);
      wgmma_wait<0>();
      pin(y);
      pin(dc_);
      pin(db_);
      barrier_wait(cta_.sums_empty(index), Cta::sums_parity(index) ^ 1U);
      Cta::arrive(cta_.empty(index));  // after that wait, because of kDaCumsumStages
      inner = __fadd_rn(inner, diagonal(y, 1));
#pragma unroll
      for (int step = 1; step < 32; step *= 2) inner = __fadd_rn(inner, __shfl_xor_sync(0xffffffffU, inner, step));
      float* const sums = cta_.sums(index);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float from = __fmul_rn(before[i], cuda::sum_quad(from_states[i]));
        if (lane_ % 4 == 0) sums[Shape::kFromStates + row + 8 * i] = from;
      }
      if (lane_ == 0) sums[Shape::kInner + warp_] = inner;
      Cta::arrive(cta_.sums_full(index));
    }
    named_sync(kSetScoresBarrier, 2 * kWarpgroup);
    add_within_chunk(count);
    store();
  }

 private:
  // Rows of a tile times a factor each, as A fragments rounded to bf16.
  __device__ __forceinline__ void load_scaled(std::uint32_t (&scaled)[4][4], std::uint32_t panel,
                                              const float (&factors)[2]) const {
    const std::uint32_t pairs[2] = {Bf16Mma::pack(factors[0], factors[0]), Bf16Mma::pack(factors[1], factors[1])};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      std::uint32_t raw[4];
      load_rows(raw, panel, 16 * warp_, k, lane_);
#pragma unroll
      for (int r = 0; r < 4; ++r) scaled[k][r] = cuda::multiply_pairs(raw[r], pairs[r % 2]);
    }
  }

  // Issues y = left · rightᵀ for half of the rows of `right`, for tiles of [64, kStates].
  __device__ __forceinline__ static void multiply_half(float (&y)[4][4], std::uint32_t left, std::uint32_t right,
                                                       int half) {
    const std::uint32_t a = warp_uniform(descriptor_low(left));
    const std::uint32_t b =
        warp_uniform(descriptor_low(right + static_cast<std::uint32_t>(half * cuda::panel_bytes(kRowsDims / 2))));
    pin(y);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStates / 16; ++k) {
      wgmma_m64n32_ss(y, descriptor(a + columns_16(k)), descriptor(b + columns_16(k)), k > 0);
    }
    wgmma_commit();
  }

  // The lane's part of the diagonal of S · Gᵀ, for ⟨S, G⟩, if it lies in this half.
  __device__ __forceinline__ float diagonal(const float (&y)[4][4], int half) const {
    const bool odd_warp = warp_ % 2 != 0;
    const bool odd_row = has_odd_row(lane_);
    const float first = select(odd_warp, select(odd_row, y[2][1], y[2][0]), select(odd_row, y[0][1], y[0][0]));
    const float second = select(odd_warp, select(odd_row, y[3][3], y[3][2]), select(odd_row, y[1][3], y[1][2]));
    return select(on_diagonal(lane_) && warp_ / 2 == half, __fadd_rn(first, second), 0.0F);
  }

  // Adds Σ_dims g · y for half of the dims.
  __device__ __forceinline__ void add_products(float (&sums)[2], const float (&y)[4][4], std::uint32_t g,
                                               int half) const {
    std::uint32_t words[2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k) load_rows(words[k], g, 16 * warp_, 2 * half + k, lane_);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 of_g = cuda::unpack(words[n / 2][n % 2 * 2 + i], Bf16());
        sums[i] = __fmaf_rn(of_g.x, y[n][2 * i], __fmaf_rn(of_g.y, y[n][2 * i + 1], sums[i]));
      }
    }
  }

  // Issues d += rows · (tile [64, kStates]).
  __device__ __forceinline__ static void accumulate(float (&d)[kStates / 8][4], const std::uint32_t (&rows)[4][4],
                                                    std::uint32_t tile) {
    const std::uint32_t right = warp_uniform(descriptor_low(tile, cuda::panel_bytes(64)));
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) WgmmaStates::rs(d, rows[k], descriptor(right + rows_16(k)), true);
    wgmma_commit();
  }

  // dC += scores · B, dB += scoresᵀ · C.
  __device__ __forceinline__ void add_within_chunk(int count) {
    std::uint32_t rows[4][4];
    std::uint32_t columns[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      load_rows(rows[k], cta_.scores(count), 16 * warp_, k, lane_);
      load_columns(columns[k], cta_.scores(count), 16 * warp_, k, lane_);
    }
    accumulate(dc_, rows, cta_.b());
    accumulate(db_, columns, cta_.c());
    wgmma_wait<0>();
    pin(dc_);
    pin(db_);
  }

  __device__ __forceinline__ void store() const {
    const cuda::SsmParams& s = cta_.p.scan;
    const int groups = s.heads / s.group_heads;
    const int set = (cta_.heads.first - cta_.heads.group * s.group_heads) / cta_.p.set_heads;
    const int sets = (s.group_heads + cta_.p.set_heads - 1) / cta_.p.set_heads;
    const std::int64_t all = std::int64_t{sets} * cta_.p.rows * groups * kStates;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 16 * warp_ + lane_ / 4 + 8 * i;
      if (token >= cta_.tokens()) continue;
      float* const db = cta_.p.set_db +
                        ((set * cta_.p.rows + cta_.row() + token) * groups + cta_.heads.group) * std::int64_t{kStates} +
                        lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < kStates / 8; ++n) {
        *reinterpret_cast<float2*>(db + 8 * n) = make_float2(db_[n][2 * i], db_[n][2 * i + 1]);
        *reinterpret_cast<float2*>(db + all + 8 * n) = make_float2(dc_[n][2 * i], dc_[n][2 * i + 1]);
      }
    }
  }

  const Cta& cta_;
  const int warp_;
  const int lane_;
  float db_[kStates / 8][4] = {};
  float dc_[kStates / 8][4] = {};
};

// By one warp: loads a head.
template <int kStates>
__device__ __forceinline__ void load_head(const HopperRowsCta<kStates>& cta, int index) {
  using Shape = typename HopperRowsCta<kStates>::Shape;
  const cuda::SsdRowsParams& p = cta.p;
  const int lane = thread_of_warpgroup() % 32;
  const bool with_tma = cta.params.maps && cta.tokens() >= kChunk;
  const int head = cta.heads.first + index;
  const std::uint32_t x = cta.head(index);
  const std::uint32_t full = cta.full(index);
  if (!with_tma) {
    copy_rows_to_panels(x, p.scan.x, cta.row(), head, cta.tokens(), kRowsDims, lane, 32);
    copy_rows_to_panels(x + Shape::kG, p.g, cta.row(), head, cta.tokens(), kRowsDims, lane, 32);
    proxy_fence();
    __syncwarp();
  }
  if (lane != 0) return;
  const std::int64_t of_chunk =
      (std::int64_t{cta.nth} * kChunksOfSegment + cta.chunk) * p.scan.head_count + head - p.scan.first_head;
  const std::int64_t of_da_cumsum =
      ((cta.segment.index * p.scan.heads + head) * kChunksOfSegment + cta.chunk) * kChunkDaCumsumFloats;
  constexpr int kStateElements = kRowsDims * kStates;
  barrier_arrive_expect(full, kChunkDaCumsumFloats * 4 + 2 * Shape::kStateBytes + (with_tma ? 2 * Shape::kXBytes : 0));
  if (with_tma) {
    tma_load_box(x, &cta.params.x, full, 0, head, static_cast<int>(cta.row()));
    tma_load_box(x + Shape::kG, &cta.params.g, full, 0, head, static_cast<int>(cta.row()));
  }
  tma_load_bytes(cuda::shared_address(cta.da_cumsum(index)), p.scan.da_cumsum + of_da_cumsum, kChunkDaCumsumFloats * 4,
                 full);
  tma_load_bytes(x + Shape::kGradient, p.gradients + of_chunk * kStateElements, Shape::kStateBytes, full);
  tma_load_bytes(x + Shape::kState, p.states + of_chunk * kStateElements, Shape::kStateBytes, full);
}

// Called by one warp. load_first_heads() loads the heads whose buffers are empty at the start, and load_other_heads()
// the others.
template <int kStates>
__device__ __forceinline__ void load_first_heads(const HopperRowsCta<kStates>& cta) {
  constexpr int kStages = HopperRowsCta<kStates>::Shape::kStages;
#pragma unroll 1
  for (int index = 0; index < kStages && index < cta.heads.count; ++index) load_head(cta, index);
}
template <int kStates>
__device__ __forceinline__ void load_other_heads(const HopperRowsCta<kStates>& cta) {
  using Cta = HopperRowsCta<kStates>;
#pragma unroll 1
  for (int index = Cta::Shape::kStages; index < cta.heads.count; ++index) {
    barrier_wait(cta.empty(index), Cta::parity(index) ^ 1U);
    load_head(cta, index);
    __syncwarp();
  }
}

// By one warp: ddt and the parameters' terms.
template <int kStates>
__device__ __forceinline__ void finish_heads(const HopperRowsCta<kStates>& cta) {
  using Cta = HopperRowsCta<kStates>;
  const int lane = thread_of_warpgroup() % 32;
  const cuda::DtGradient<Cta> dt{cta};
  auto inputs = dt.load(0, lane);
#pragma unroll 1
  for (int index = 0; index < cta.heads.count; ++index) {
    const auto next = dt.load(index + 1 < cta.heads.count ? index + 1 : index, lane);
    barrier_wait(cta.sums_full(index), Cta::sums_parity(index));
    dt.finish(index, lane, inputs);
    Cta::arrive(cta.sums_empty(index));
    inputs = next;
  }
}

// From the products (C · Bᵀ) · (g · xᵀ) · decays of a chunk, by MMAs of two warps, `half`:
//   Σ_{j < t ≤ i} products · dt_j for each token t, as sums of rows before t, whose right operand is dt_j for j < t,
//   then of columns. A warp has one half of each block of 16 tokens. Σ_{i ≥ t} products of column t. A warp has blocks
//   `half` and 3 − half.
template <class Shape>
__device__ __forceinline__ void sum_products(int half, std::uint32_t products, const float* dt, float* sums, int lane) {
  constexpr std::uint32_t kOnes = 0x3F803F80;
  // Keeps an operand's elements for j < t, of the same eight tokens j and t.
  const std::uint32_t triangle =
      (lane % 4 * 2 < lane / 4 ? 0xFFFFU : 0U) | (lane % 4 * 2 + 1 < lane / 4 ? 0xFFFF0000U : 0U);
  const std::uint32_t kept[2] = {half == 0 ? triangle : ~0U, half == 0 ? 0U : triangle};
  std::uint32_t right[4][2];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 pair = *reinterpret_cast<const float2*>(dt + 16 * k + 8 * i + lane % 4 * 2);
      right[k][i] = Bf16Mma::pack(pair.x, pair.y);
    }
  }
  float sum[4][4] = {};
#pragma unroll
  for (int row = 0; row < 4; ++row) {
#pragma unroll
    for (int k = 0; k <= row; ++k) {
      std::uint32_t left[4];
      load_rows(left, products, 16 * row, k, lane);
      Bf16Mma::mma(sum[k], left, right[k][0] & kept[0], right[k][1] & kept[1], sum[k]);
#pragma unroll
      for (int block = k + 1; block <= row; ++block) {
        Bf16Mma::mma(sum[block], left, right[k][0], right[k][1], sum[block]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * half + lane % 4 * 2 + e % 2 > lane / 4 + e / 2 * 8) sum[row][e] = 0.0F;  // i < t
    }
  }
#pragma unroll
  for (int block = 0; block < 4; block += 2) {
    float columns[2][2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int e = 0; e < 2; ++e) columns[t][e] = __fadd_rn(sum[block + t][e], sum[block + t][e + 2]);
    }
    cuda::store_column_sums<16>(columns, lane, sums + Shape::kWithin + 16 * block + 8 * half);
  }
#pragma unroll
  for (int nth = 0; nth < 2; ++nth) {
    const int block = nth == 0 ? half : 3 - half;
    float of_columns[4] = {};
#pragma unroll
    for (int row = 2 * nth; row < 4; ++row) {  // blocks above the diagonal are zero
      std::uint32_t left[4];
      load_columns(left, products, 16 * block, row, lane);
      Bf16Mma::mma(of_columns, left, kOnes, kOnes, of_columns);
    }
    if (lane % 4 == 0) {
      float* const of_dt = sums + Shape::kOfDt + kChunk + 16 * block + lane / 4;
      of_dt[0] = of_columns[0];
      of_dt[8] = of_columns[2];
    }
  }
}

// By two warps: sum_products() of each head.
template <int kStates>
__device__ __forceinline__ void sum_heads(const HopperRowsCta<kStates>& cta, int warp) {
  using Cta = HopperRowsCta<kStates>;
  using Shape = typename Cta::Shape;
  const int lane = thread_of_warpgroup() % 32;
#pragma unroll 1
  for (int index = 0; index < cta.heads.count; ++index) {
    barrier_wait(cta.sums_empty(index), Cta::sums_parity(index) ^ 1U);
    barrier_wait(cta.products_full(index), Cta::pair_parity(index));
    sum_products<Shape>(warp, cta.products(index), cta.da_cumsum(index) + kChunk, cta.sums(index), lane);
    Cta::arrive(cta.products_empty(index));
    Cta::arrive(cta.sums_full(index));
  }
}

template <int kStates>
__global__ void __launch_bounds__(kRowsThreads, 1) ssd_rows_kernel(const __grid_constant__ HopperSsdRows p) {
  extern __shared__ unsigned char ssd_shared[];
  using Shape = HopperRowsShape<kStates>;
  const HopperRowsCta<kStates> cta(p, ssd_shared);
  if (cta.tokens() <= 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread_of_warpgroup() / 32;
  const int warpgroup = static_cast<int>(warp_uniform(threadIdx.x / kWarpgroup));
  // The first heads arrive while B and C are copied.
  if (warpgroup == 3 && warp == 0) {
    if (thread % 32 == 0) cta.init_barriers();
    __syncwarp();
    load_first_heads<kStates>(cta);
    __syncwarp();
  }
  copy_rows_to_panels(cta.b(), p.rows.scan.b, cta.row(), cta.heads.group, cta.tokens(), kStates, thread, kRowsThreads);
  copy_rows_to_panels(cta.c(), p.rows.scan.c, cta.row(), cta.heads.group, cta.tokens(), kStates, thread, kRowsThreads);
  // Scores and products above the diagonal stay zero.
  static_assert(Shape::kProducts == Shape::kScores + 2 * Shape::kScoreBytes);
  for (int i = thread; i < 4 * Shape::kScoreBytes / 16; i += kRowsThreads) {
    reinterpret_cast<uint4*>(cta.bytes + Shape::kScores)[i] = make_uint4(0, 0, 0, 0);
  }
  proxy_fence();
  __syncthreads();
  if (warpgroup == 0) {
    change_registers<kRowsScoreRegisters, 128>();
    HopperScores<kStates>(cta).run();
  } else if (warpgroup == 1) {
    change_registers<kRowsTokenRegisters, 128>();
    HopperTokens<kStates>(cta).run();
  } else if (warpgroup == 2) {
    change_registers<kRowsSetRegisters, 128>();
    HopperSets<kStates>(cta).run();
  } else {
    change_registers<kRowsProducerRegisters, 128>();
    if (warp == 0) load_other_heads<kStates>(cta);
    if (warp == 1) finish_heads<kStates>(cta);
    if (warp >= 2) sum_heads<kStates>(cta, warp - 2);
  }
}

}  // namespace ringattn::sm90
