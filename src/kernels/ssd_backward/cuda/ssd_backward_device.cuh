// SPDX-License-Identifier: Apache-2.0
// Device functions of the SSD backward kernels of sm80 and sm90: states of chunks in memory, sums of the gradients of
// log-decays, the gradient of dt, and stores of gradients; and the host's attribute of large shared memory.
#pragma once

#include "base/cuda.hpp"
#include "kernels/ssd_backward/cuda/ssd_backward_params.hpp"
#include "kernels/ssm/cuda/ssm_device.cuh"

namespace ringattn::cuda {

// Allows a kernel `bytes` of dynamic shared memory.
template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
}

// The coordinates of a segment for gradients. Its flags describe the gradient after it.
__device__ inline SegmentCoord gradient_coord(const SsmParams& p, std::int64_t nth) {
  SegmentCoord coord = segment_coord(p, nth);
  const SsmRunEntry& run = p.runs[run_of<&SsmRunEntry::segment>(p, coord.index)];
  const std::int64_t last = (run.tokens - 1) / kSegmentTokens;
  const std::int64_t in_run = coord.index - run.segment;
  coord.first_of_super = in_run == last || in_run % kSegmentsOfSuper == kSegmentsOfSuper - 1;
  coord.from_zero = in_run / kSegmentsOfSuper == last / kSegmentsOfSuper && run.initial == nullptr;
  return coord;
}

// Stores a state, rounded, in the order of chunk_state_offset(). Element [t][e] is of dim `dim` + e / 2 · 8 and of
// column 8 t + lane % 4 · 2 + e % 2. Lanes exchange pairs, so that each stores four adjacent elements.
template <int kDims, int kTiles>
__device__ __forceinline__ void store_chunk_state(const float (&state)[kTiles][4], __nv_bfloat16* target, int dim,
                                                  int lane) {
  const bool odd = lane % 2 != 0;
  const int column = odd ? lane % 4 * 2 + 8 - 2 : lane % 4 * 2;
#pragma unroll
  for (int t = 0; t < kTiles; t += 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t first = MmaTraits<__nv_bfloat16>::pack(state[t][2 * half], state[t][2 * half + 1]);
      const std::uint32_t second = MmaTraits<__nv_bfloat16>::pack(state[t + 1][2 * half], state[t + 1][2 * half + 1]);
      const std::uint32_t other = __shfl_xor_sync(0xffffffffU, odd ? first : second, 1);
      __stcg(reinterpret_cast<uint2*>(target + chunk_state_offset<kDims>(dim + half * 8, t * 8 + column)),
             odd ? make_uint2(other, second) : make_uint2(first, other));
    }
  }
}

// Index of the 16 × 16 block (row, column) below the diagonal.
__device__ __forceinline__ constexpr int block_below(int row, int column) { return row * (row - 1) / 2 + column; }

// Sum over the four lanes that hold a row of an accumulator.
__device__ __forceinline__ float sum_quad(float value) {
  value = __fadd_rn(value, __shfl_xor_sync(0xffffffffU, value, 1));
  return __fadd_rn(value, __shfl_xor_sync(0xffffffffU, value, 2));
}

// Computes the column sums of two tiles of 16 × 8 and stores them kStride apart. `columns` [t][e]: the lane's sum of
// column lane % 4 · 2 + e of tile t. Lanes with lane & 4 store no column.
template <int kStride = 8>
__device__ __forceinline__ void store_column_sums(const float (&columns)[2][2], int lane, float* target) {
  const bool second_tile = (lane & 16) != 0;
  const bool second_column = (lane & 8) != 0;
  float pair[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float given = second_tile ? columns[0][e] : columns[1][e];
    pair[e] = __fadd_rn(second_tile ? columns[1][e] : columns[0][e], __shfl_xor_sync(0xffffffffU, given, 16));
  }
  const float given = second_column ? pair[0] : pair[1];
  float sum = __fadd_rn(second_column ? pair[1] : pair[0], __shfl_xor_sync(0xffffffffU, given, 8));
  sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffU, sum, 4));
  if ((lane & 4) == 0) target[lane / 16 * kStride + lane % 4 * 2 + lane / 8 % 2] = sum;
}

// For each column t of a 16 × 16 block on the diagonal, Σ_{i ≥ t} Σ_{j < t} w_ij.
__device__ __forceinline__ void store_diagonal_sums(const float (&w)[2][4], int lane, float* target) {
  float columns[2][2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float before = 0.0F;  // sum of the tiles before this one
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float sum = __fadd_rn(w[t][2 * half], w[t][2 * half + 1]);
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffU, sum, step, 4);
        if (lane % 4 >= step) sum = __fadd_rn(sum, other);
      }
      const float previous = __shfl_up_sync(0xffffffffU, sum, 1, 4);
      const float first = __fadd_rn(before, lane % 4 > 0 ? previous : 0.0F);
      const float second = __fadd_rn(first, w[t][2 * half]);
      before = __shfl_sync(0xffffffffU, sum, 3, 4);
      const int row = lane / 4 + 8 * half;
      const int column = 8 * t + lane % 4 * 2;
      if (column <= row) columns[t][0] = __fadd_rn(columns[t][0], first);
      if (column + 1 <= row) columns[t][1] = __fadd_rn(columns[t][1], second);
    }
  }
  store_column_sums(columns, lane, target);
}

// The gradient of dt and the parameters' terms of a head and chunk, by one warp. A lane has two adjacent tokens.
template <class Cta>
struct DtGradient {
  using Shape = typename Cta::Shape;
  using Element = typename Cta::InputElement;
  // The inputs that load() reads before it waits for the sums of the head.
  struct Inputs {
    Element dt[2];  // as given: converting them would wait for the load
    float a;
    float bias;
  };
  const Cta& cta;

  __device__ __forceinline__ Inputs load(int index, int lane) const {
    const int head = cta.heads.first + index;
    Inputs inputs{{}, cta.p.scan.a[head], dt_bias_of(cta.p.scan.dt_bias, head)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * lane + i;
      if (token < cta.tokens()) inputs.dt[i] = *element_at<Element>(cta.p.scan.dt, cta.row() + token, head);
    }
    return inputs;
  }

  // Inclusive prefix sum over groups of kWidth lanes.
  template <int kWidth>
  __device__ __forceinline__ static float scan(float value, int lane) {
#pragma unroll
    for (int step = 1; step < kWidth; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffU, value, step, kWidth);
      if (lane % kWidth >= step) value = __fadd_rn(value, other);
    }
    return value;
  }
  // For each token the sum of those before it (exclusive), or of itself and those after it.
  template <int kWidth>
  __device__ __forceinline__ static float2 sums_before(const float2& value, int lane) {
    const float sum = scan<kWidth>(__fadd_rn(value.x, value.y), lane);
    const float previous = __shfl_up_sync(0xffffffffU, sum, 1, kWidth);
    const float first = lane % kWidth > 0 ? previous : 0.0F;
    return make_float2(first, __fadd_rn(first, value.x));
  }
  template <int kWidth>
  __device__ __forceinline__ static float2 sums_from(const float2& value, int lane) {
    float sum = __fadd_rn(value.x, value.y);
#pragma unroll
    for (int step = 1; step < kWidth; step *= 2) {
      const float other = __shfl_down_sync(0xffffffffU, sum, step, kWidth);
      if (lane % kWidth + step < kWidth) sum = __fadd_rn(sum, other);
    }
    const float next = __shfl_down_sync(0xffffffffU, sum, 1, kWidth);
    const float second = __fadd_rn(lane % kWidth + 1 < kWidth ? next : 0.0F, value.y);
    return make_float2(__fadd_rn(second, value.x), second);
  }
  // Computes both for a whole warp: `from` becomes sums_from() and `before` sums_before(). The compiler keeps shuffles
  // in order, so one scan after the other would wait for twice as many shuffles.
  __device__ __forceinline__ static void scan_both(float2& from, float2& before, int lane) {
    float after = __fadd_rn(from.x, from.y);
    float until = __fadd_rn(before.x, before.y);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float next = __shfl_down_sync(0xffffffffU, after, step);
      const float previous = __shfl_up_sync(0xffffffffU, until, step);
      if (lane + step < 32) after = __fadd_rn(after, next);
      if (lane >= step) until = __fadd_rn(until, previous);
    }
    const float next = __shfl_down_sync(0xffffffffU, after, 1);
    const float previous = __shfl_up_sync(0xffffffffU, until, 1);
    const float second = __fadd_rn(lane + 1 < 32 ? next : 0.0F, from.y);
    from = make_float2(__fadd_rn(second, from.x), second);
    const float first = lane > 0 ? previous : 0.0F;
    before = make_float2(first, __fadd_rn(first, before.x));
  }
  __device__ __forceinline__ static float2 add(const float2& a, const float2& b) {
    return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y));
  }

  __device__ __forceinline__ void finish(int index, int lane, const Inputs& inputs) const {
    const float* const sums = cta.sums(index);
    const float* const da_cumsum = cta.da_cumsum(index);
    const auto pair = [&](int first) { return *reinterpret_cast<const float2*>(sums + first); };
    // The sum of each token, added up from its parts, which different warps have stored.
    const auto sum_parts = [&](int first, int parts) {
      float2 sum = pair(first + 2 * lane);
      for (int i = 1; i < parts; ++i) sum = add(sum, pair(first + i * kChunk + 2 * lane));
      return sum;
    };
    float2 from_states = sum_parts(Shape::kFromStates, Shape::kStateParts);
    float2 from_gradients = sum_parts(Shape::kFromGradients, Shape::kTokenParts);
    const float2 of_dt = sum_parts(Shape::kOfDt, Shape::kDtParts);
    float inner = sums[Shape::kInner];
#pragma unroll
    for (int i = 1; i < Shape::kInnerParts; ++i) inner = __fadd_rn(inner, sums[Shape::kInner + i]);
    inner = __fmul_rn(inner, exp2_approx(da_cumsum[kChunk - 1]));
    float2 q = pair(Shape::kWithin + 2 * lane);
    if constexpr (Shape::kBlockSums) q = add_block_sums(q, sums, lane);
    scan_both(from_states, from_gradients, lane);
    q = add(q, from_states);
    q = add(q, from_gradients);
    q = add(q, make_float2(inner, inner));

    const SsmParams& s = cta.p.scan;
    const int head = cta.heads.first + index;
    const float rate = __fmul_rn(inputs.a, kSsmLog2E);
    const float2 dt = *reinterpret_cast<const float2*>(da_cumsum + kChunk + 2 * lane);
    const float2 skip = pair(Shape::kSkip + 2 * lane);
    float terms[3] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * lane + i >= cta.tokens()) continue;
      const float step = i == 0 ? dt.x : dt.y;
      const float of_log = __fmul_rn(step, rate) < kMinLog ? 0.0F : i == 0 ? q.x : q.y;
      const float value = __fadd_rn(to_float(inputs.dt[i]), inputs.bias);
      float gradient = __fmaf_rn(inputs.a, of_log, i == 0 ? of_dt.x : of_dt.y);
      if (s.softplus) {
        const float power = exp2_approx(__fmul_rn(value, -kSsmLog2E));
        gradient = __fmul_rn(gradient, reciprocal_approx(__fadd_rn(power, 1.0F)));
      }
      // Only a dt at a limit can have been clamped. dt before that is not kept.
      if (!(step > s.dt_min && step < s.dt_max)) {
        const float unclamped = s.softplus ? softplus(value) : value;
        if (unclamped < s.dt_min || unclamped > s.dt_max) gradient = 0.0F;
      }
      terms[0] = __fmaf_rn(step, of_log, terms[0]);
      terms[1] = __fadd_rn(terms[1], i == 0 ? skip.x : skip.y);
      terms[2] = __fadd_rn(terms[2], gradient);
      store(index, 2 * lane + i, gradient);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
      for (float& term : terms) term = __fadd_rn(term, __shfl_xor_sync(0xffffffffU, term, step));
    }
    if (lane == 0) {
      cta.p.chunk_terms[(cta.segment.index * s.heads + head) * kChunksOfSegment + cta.chunk] =
          make_float4(terms[0], terms[1], terms[2], 0.0F);
    }
  }

 private:
  // Adds the terms w of the blocks below the diagonal.
  __device__ __forceinline__ static float2 add_block_sums(float2 q, const float* sums, int lane) {
    const int block = lane / 8;
    const auto of_block = [&](int from, int nth) {
      return *reinterpret_cast<const float2*>(sums + from + nth * 16 + lane % 8 * 2);
    };
    float2 columns = make_float2(0.0F, 0.0F);  // of the blocks below this one
    float2 rows = columns;                     // of the blocks before this one
    float2 around = columns;                   // of the blocks below and before this one
    for (int i = block + 1; i < 4; ++i) columns = add(columns, of_block(Shape::kColumns, block_below(i, block)));
    for (int j = 0; j < block; ++j) rows = add(rows, of_block(Shape::kRows, block_below(block, j)));
    for (int i = block + 1; i < 4; ++i) {
      for (int j = 0; j < block; ++j) around = add(around, of_block(Shape::kRows, block_below(i, j)));
    }
    float inside = __fadd_rn(around.x, around.y);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) inside = __fadd_rn(inside, __shfl_xor_sync(0xffffffffU, inside, step));
    q = add(q, sums_before<8>(columns, lane));
    q = add(q, sums_from<8>(rows, lane));
    return add(q, make_float2(inside, inside));
  }

  __device__ __forceinline__ void store(int index, int token, float gradient) const {
    const SsdGradientRows& ddt = cta.p.ddt;
    const std::int64_t at = (cta.row() + token) * ddt.token_stride + (cta.heads.first + index) * ddt.head_stride;
    if (ddt.wide) {
      static_cast<float*>(ddt.data)[at] = gradient;
    } else {
      static_cast<typename Cta::InputElement*>(ddt.data)[at] = from_float<typename Cta::InputElement>(gradient);
    }
  }
};

// A pair of adjacent elements for each of two tiles of eight columns, stored to a row of gradients. Lanes exchange
// pairs, so that each stores four adjacent elements. `column`: of the lane's pair in the first tile. By whole warps.
template <class Element>
__device__ __forceinline__ void store_gradient_pairs(const SsdGradientRows& rows, std::int64_t row, int head,
                                                     int column, int columns, bool present, const float2& first,
                                                     const float2& second, int lane) {
  const std::int64_t offset = row * rows.token_stride + head * rows.head_stride;
  if (rows.wide) {
    auto* const target = static_cast<float*>(rows.data) + offset + column;
    const auto store = [&](int at, const float2& pair) {
      if (!present || column + at >= columns) return;
      if (rows.aligned) {
        *reinterpret_cast<float2*>(target + at) = pair;
      } else {
        target[at] = pair.x;
        target[at + 1] = pair.y;
      }
    };
    store(0, first);
    store(8, second);
    return;
  }
  const bool odd = lane % 2 != 0;
  const std::uint32_t low = MmaTraits<Element>::pack(first.x, first.y);
  const std::uint32_t high = MmaTraits<Element>::pack(second.x, second.y);
  const std::uint32_t other = __shfl_xor_sync(0xffffffffU, odd ? low : high, 1);
  const uint2 words = odd ? make_uint2(other, high) : make_uint2(low, other);
  const int written = odd ? column + 8 - 2 : column;
  if (!present || written >= columns) return;
  auto* const target = static_cast<std::uint16_t*>(rows.data) + offset + written;
  if (rows.aligned) {
    *reinterpret_cast<uint2*>(target) = words;
    return;
  }
  target[0] = static_cast<std::uint16_t>(words.x);
  target[1] = static_cast<std::uint16_t>(words.x >> 16);
  target[2] = static_cast<std::uint16_t>(words.y);
  target[3] = static_cast<std::uint16_t>(words.y >> 16);
}

}  // namespace ringattn::cuda
