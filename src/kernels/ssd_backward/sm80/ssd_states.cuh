// SPDX-License-Identifier: Apache-2.0
// States of segments, and gradients of states. One kernel computes local states (kernels/ssm/ssm.hpp, 1) and, against
// the direction of time, local gradients (kernels/ssd_backward/ssd_backward.hpp, 1). With kExpand it starts from the
// state before the segment, or the gradient after it, and stores that of each chunk, rounded to bf16. A CTA processes a
// segment for a few heads of one group, chunk by chunk. A warp holds 16 dims of a head's state in registers, as the
// accumulator of the MMAs.
//
// Rounding: as in sm80_ssd, a scaled x or g is a bf16 hi/lo pair. With kExpand it is rounded to bf16 once.
#pragma once

#include "kernels/ssd_backward/cuda/ssd_backward_device.cuh"
#include "kernels/ssd_backward/sm80/ssd_backward_params.hpp"
#include "kernels/ssm/sm80/ssd.cuh"

namespace ringattn::sm80 {

// Copies `rows` rows of a chunk of a head to a tile with kColumns columns, and zero-fills the rest.
template <int kThreads, int kColumns>
__device__ __forceinline__ void copy_chunk_rows(std::uint32_t target, const SsmTensor& tensor, std::int64_t row,
                                                int head, int rows, int columns) {
  constexpr int kVectors = kColumns / kVectorElements;
  constexpr int kPitch = pitch_of(kColumns);
  const auto* const source = cuda::element_at<std::uint16_t>(tensor, row, head);
  if (!tensor.aligned) {
    return copy_tile(target, kPitch, kVectors, source, tensor.token_stride, rows, columns, false);
  }
#pragma unroll
  for (int i = 0; i < kChunk * kVectors / kThreads; ++i) {
    const int vector = i * kThreads + static_cast<int>(threadIdx.x);
    const int token = vector / kVectors;
    const int column = vector % kVectors * kVectorElements;
    const bool present = token < rows && column < columns;
    cuda::copy_16(target + static_cast<std::uint32_t>(token * kPitch + column * kElementBytes),
                  present ? source + token * tensor.token_stride + column : source, present);
  }
}

// d += factor · operand, with the fp32 factor as A, in kParts bf16 addends. lo · lo is omitted.
template <class Element, int kParts>
__device__ __forceinline__ void multiply_factor(float (&d)[4], const std::uint32_t (&factor)[kParts][4],
                                                const InputOperand<Element, 4>& operand, int tile) {
  using Operand = InputOperand<Element, 4>;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int addend = 0; addend < Operand::kAddends; ++addend) {
      if (part + addend > 1) continue;
      Bf16Mma::mma(d, factor[part], operand.addend[addend][2 * tile], operand.addend[addend][2 * tile + 1], d);
    }
  }
}

template <class Element, int kDims, int kStates, bool kReversed, bool kExpand>
class SegmentStates {
 public:
  using Shape = SsdStatesShape<kDims, kStates>;

  __device__ __forceinline__ SegmentStates(const SsdStatesParams& params, std::uint32_t memory, const float* floats)
      : p_(params),
        memory_(memory),
        floats_(floats),
        nth_(static_cast<int>(blockIdx.x) / params.blocks),
        heads_(cuda::head_block(params.scan, Shape::kHeads, static_cast<int>(blockIdx.x) % params.blocks)),
        segment_(kReversed ? cuda::gradient_coord(params.scan, params.first_segment + nth_)
                           : cuda::segment_coord(params.scan, params.first_segment + nth_)),
        chunks_((segment_.tokens + kChunk - 1) / kChunk),
        lane_(static_cast<int>(threadIdx.x) % 32),
        head_index_(static_cast<int>(threadIdx.x) / 32 / Shape::kHeadWarps),
        first_dim_(static_cast<int>(threadIdx.x) / 32 % Shape::kHeadWarps * kWarpDims) {}

  __device__ __forceinline__ void run() {
    const bool present = head_index_ < heads_.count;
    for (int i = 0; i < Shape::kStages - 1; ++i) issue_copies(i);
    if (kExpand && present) load_state();
#pragma unroll 1
    for (int i = 0; i < chunks_; ++i) {
      cuda::copy_wait<Shape::kStages - 2>();
      __syncthreads();  // the chunk has landed, and all reads of the previous one are done
      issue_copies(i + Shape::kStages - 1);
      if (!present) continue;
      if constexpr (kExpand) {
        store_rounded(i);
        if (i + 1 == chunks_) continue;
      }
      accumulate(i);
    }
    if (kExpand || !present) return;
    visit([&](float& first, float& second, std::int64_t offset) {
      *reinterpret_cast<float2*>(p_.scan.states + of_segment() * head_floats() + offset) = make_float2(first, second);
    });
  }

 private:
  __device__ __forceinline__ int chunk_of(int i) const { return kReversed ? chunks_ - 1 - i : i; }
  __device__ __forceinline__ std::int64_t of_segment() const {
    return segment_.index * p_.scan.heads + heads_.first + head_index_;
  }
  __device__ __forceinline__ std::int64_t head_floats() const {
    return std::int64_t{p_.scan.head_dim} * p_.scan.state_dim;
  }
  __device__ __forceinline__ static int stage_at(int i) { return i % Shape::kStages * Shape::kStageBytes; }

  // Issues the copies of the i-th chunk, as one cp.async group per thread.
  __device__ __forceinline__ void issue_copies(int i) const {
    if (i < chunks_) {
      const SsmParams& s = p_.scan;
      const int chunk = chunk_of(i);
      const std::int64_t row = segment_.row + chunk * kChunk;
      const int rows = segment_.tokens - chunk * kChunk;
      const std::uint32_t stage = memory_ + static_cast<std::uint32_t>(stage_at(i));
      copy_chunk_rows<Shape::kThreads, kStates>(stage, s.b, row, heads_.group, rows, s.state_dim);
#pragma unroll
      for (int nth = 0; nth < Shape::kHeads; ++nth) {
        if (nth >= heads_.count) break;
        copy_chunk_rows<Shape::kThreads, kDims>(stage + Shape::kX + nth * Shape::kXBytes, s.x, row, heads_.first + nth,
                                                rows, s.head_dim);
      }
      constexpr int kVectors = kChunkDaCumsumFloats / 4;
      const int nth = static_cast<int>(threadIdx.x) / kVectors;
      if (nth < heads_.count) {
        const int at = static_cast<int>(threadIdx.x) % kVectors * 4;
        const std::int64_t first =
            ((segment_.index * s.heads + heads_.first + nth) * kChunksOfSegment + chunk) * kChunkDaCumsumFloats;
        cuda::copy_16(stage + Shape::kDaCumsum + nth * Shape::kDaCumsumBytes + at * 4, s.da_cumsum + first + at, true);
      }
    }
    cuda::copy_commit();
  }

  // Calls visit(pair of elements, offset in the head's state) for the elements within head_dim and state_dim.
  template <class Visit>
  __device__ __forceinline__ void visit(Visit visit_pair) {
#pragma unroll
    for (int t = 0; t < kStates / 8; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int dim = first_dim_ + lane_ / 4 + half * 8;
        const int column = t * 8 + lane_ % 4 * 2;
        if (dim < p_.scan.head_dim && column < p_.scan.state_dim) {
          visit_pair(state_[t][2 * half], state_[t][2 * half + 1], std::int64_t{dim} * p_.scan.state_dim + column);
        }
      }
    }
  }

  // Loads the state before the segment, or the gradient after it.
  __device__ __forceinline__ void load_state() {
    const SsmParams& s = p_.scan;
    const std::int64_t of_super = segment_.super_segment * s.heads + heads_.first + head_index_;
    const float* const local = segment_.first_of_super ? nullptr : s.states + of_segment() * head_floats();
    const float* const before = segment_.from_zero ? nullptr : s.super_states + of_super * head_floats();
    const float decay = cuda::exp2_approx(segment_.first_of_super ? 0.0F : s.logs_before[of_segment()]);
    visit([&](float& first, float& second, std::int64_t offset) {
      const float2 m = cuda::state_pair(local, offset);
      const float2 t = cuda::state_pair(before, offset);
      first = __fmaf_rn(decay, t.x, m.x);
      second = __fmaf_rn(decay, t.y, m.y);
    });
  }

  __device__ __forceinline__ void store_rounded(int i) const {
    const std::int64_t index = (std::int64_t{nth_} * kChunksOfSegment + chunk_of(i)) * p_.scan.head_count +
                               heads_.first - p_.scan.first_head + head_index_;
    cuda::store_chunk_state<kDims>(state_, p_.chunk_states + index * (kDims * kStates), first_dim_ + lane_ / 4, lane_);
  }

  // Scales of two adjacent tokens in the state after the chunk, or of their g in the gradient before it.
  __device__ __forceinline__ float2 scales(const float* da_cumsum, int token) const {
    const float2 sums = *reinterpret_cast<const float2*>(da_cumsum + token);
    if constexpr (kReversed) {
      return make_float2(cuda::exp2_approx(sums.x), cuda::exp2_approx(sums.y));
    } else {
      const float2 dt = *reinterpret_cast<const float2*>(da_cumsum + kChunk + token);
      const float last = da_cumsum[kChunk - 1];
      return make_float2(__fmul_rn(cuda::exp2_approx(__fsub_rn(last, sums.x)), dt.x),
                         __fmul_rn(cuda::exp2_approx(__fsub_rn(last, sums.y)), dt.y));
    }
  }

  // S ← a(chunk) · S + Σ_j scale_j · x_j ⊗ B_j, j ascending.
  __device__ __forceinline__ void accumulate(int i) {
    constexpr int kParts = kExpand ? 1 : 2;
    const std::uint32_t b = memory_ + static_cast<std::uint32_t>(stage_at(i));
    const std::uint32_t x = b + Shape::kX + head_index_ * Shape::kXBytes;
    const float* const da_cumsum = floats_ + (stage_at(i) + Shape::kDaCumsum + head_index_ * Shape::kDaCumsumBytes) / 4;
    const float decay = cuda::exp2_approx(da_cumsum[kChunk - 1]);
#pragma unroll
    for (int t = 0; t < kStates / 8; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state_[t][e] = __fmul_rn(decay, state_[t][e]);
    }
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      std::uint32_t raw[4];
      load_matrix_transposed(raw, tile_at(x, 16 * k, first_dim_, Shape::kXPitch) + right_first(lane_, Shape::kXPitch));
      const float2 first = scales(da_cumsum, 16 * k + lane_ % 4 * 2);
      const float2 second = scales(da_cumsum, 16 * k + 8 + lane_ % 4 * 2);
      std::uint32_t scaled[kParts][4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float2 pair = unpack(raw[r], Element());
        const float2 scale = r < 2 ? first : second;
        const float low = __fmul_rn(pair.x, scale.x);
        const float high = __fmul_rn(pair.y, scale.y);
        if constexpr (kParts == 1) {
          scaled[0][r] = Bf16Mma::pack(low, high);
        } else {
          split_hi_lo(low, high, scaled[0][r], scaled[1][r]);
        }
      }
#pragma unroll
      for (int n = 0; n < kStates / 16; ++n) {
        std::uint32_t right[4];
        load_matrix_transposed(right, tile_at(b, 16 * k, 16 * n, Shape::kBPitch) + down_first(lane_, Shape::kBPitch));
        const InputOperand<Element, 4> operand(right);
        multiply_factor(state_[2 * n], scaled, operand, 0);
        multiply_factor(state_[2 * n + 1], scaled, operand, 1);
      }
    }
  }

  const SsdStatesParams& p_;
  const std::uint32_t memory_;
  const float* const floats_;
  const int nth_;  // segment of the batch
  const HeadBlock heads_;
  const SegmentCoord segment_;
  const int chunks_;
  const int lane_;
  const int head_index_;
  const int first_dim_;
  // Element [t][e] is dim first_dim_ + lane / 4 + e / 2 · 8, column 8 t + lane % 4 · 2 + e % 2.
  float state_[kStates / 8][4] = {};
};

template <class Element, int kDims, int kStates, bool kReversed, bool kExpand>
__global__ void __launch_bounds__(SsdStatesShape<kDims, kStates>::kThreads, 2)
    ssd_states_kernel(const __grid_constant__ SsdStatesParams p) {
  extern __shared__ __align__(16) float ssd_memory[];
  SegmentStates<Element, kDims, kStates, kReversed, kExpand>(p, cuda::shared_address(ssd_memory), ssd_memory).run();
}

}  // namespace ringattn::sm80
