// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kPassingThreads = 256;
constexpr int kLoadsInFlight = 4;  // local states loaded before the first is used: no store is between their loads

// Four adjacent elements of one head's state.
struct StateElements {
  int head;
  std::int64_t in_states;  // offset of the first one in [heads, head_dim, state_dim]
  bool present;
  bool first_of_head;
  float rates[4];  // with state_decays: A · log2 e

  __device__ StateElements(const SsmParams& p, bool state_decays) : rates{} {
    const int state_floats = p.head_dim * p.state_dim;
    const std::int64_t in_range = (std::int64_t{blockIdx.x} * kPassingThreads + threadIdx.x) * 4;
    present = in_range < std::int64_t{p.head_count} * state_floats;
    head = p.first_head + static_cast<int>(in_range / state_floats);
    in_states = std::int64_t{p.first_head} * state_floats + in_range;
    first_of_head = in_range % state_floats == 0;
    if (!state_decays || !present) return;
    for (int i = 0; i < 4; ++i) rates[i] = __fmul_rn(p.a[in_states + i], kSsmLog2E);
  }

  // fma(decay, before, local) for the four elements.
  __device__ float4 join(bool state_decays, float log, const float4& before, const float4& local) const {
    if (!state_decays) {
      const float decay = exp2_approx(log);
      return make_float4(__fmaf_rn(decay, before.x, local.x), __fmaf_rn(decay, before.y, local.y),
                         __fmaf_rn(decay, before.z, local.z), __fmaf_rn(decay, before.w, local.w));
    }
    const auto decay = [&](int i) { return exp2_approx(__fmul_rn(rates[i], log)); };
    return make_float4(__fmaf_rn(decay(0), before.x, local.x), __fmaf_rn(decay(1), before.y, local.y),
                       __fmaf_rn(decay(2), before.z, local.z), __fmaf_rn(decay(3), before.w, local.w));
  }
};

// Unaligned accesses: a caller's array need not be aligned to 16 bytes.
__device__ float4 load_four(const float* at) { return make_float4(at[0], at[1], at[2], at[3]); }
__device__ void store_four(float* at, const float4& value) {
  at[0] = value.x;
  at[1] = value.y;
  at[2] = value.z;
  at[3] = value.w;
}

template <bool kStateDecays, bool kReversed>
__global__ void __launch_bounds__(kPassingThreads) segments_kernel(const __grid_constant__ SsmParams p) {
  const StateElements own(p, kStateDecays);
  if (!own.present) return;
  const std::int64_t super_segment = p.runs[0].super_segment + blockIdx.y;
  const SsmRunEntry& run = p.runs[run_of<&SsmRunEntry::super_segment>(p, super_segment)];
  const std::int64_t begin = run.segment + (super_segment - run.super_segment) * kSegmentsOfSuper;
  const std::int64_t run_end = run.segment + (run.tokens + kSegmentTokens - 1) / kSegmentTokens;
  const std::int64_t end = begin + kSegmentsOfSuper < run_end ? begin + kSegmentsOfSuper : run_end;
  if (end - begin == 1) return;  // its local state is that of the only segment
  const std::int64_t all = std::int64_t{p.heads} * p.head_dim * p.state_dim;
  const auto at = [&](std::int64_t i) { return kReversed ? end - 1 - (i - begin) : i; };
  float4 before = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
  float log_before = 0.0F;
#pragma unroll 1
  for (std::int64_t first = begin; first < end; first += kLoadsInFlight) {
    float4 local[kLoadsInFlight];
    float log[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (first + i >= end) break;
      local[i] = *reinterpret_cast<const float4*>(p.states + at(first + i) * all + own.in_states);
      log[i] = p.logs[at(first + i) * p.heads + own.head];
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (first + i >= end) break;
      if (first + i > begin) {  // the first state is zero and not stored
        // A plain assignment compiles to four stores here (nvcc 13.0).
        __stcg(reinterpret_cast<float4*>(p.states + at(first + i) * all + own.in_states), before);
        if (own.first_of_head) p.logs_before[at(first + i) * p.heads + own.head] = log_before;
      }
      before = own.join(kStateDecays, log[i], before, local[i]);
      log_before = __fadd_rn(log_before, log[i]);
    }
  }
  __stcg(reinterpret_cast<float4*>(p.super_states + super_segment * all + own.in_states), before);
  if (own.first_of_head && !kReversed) p.super_logs[super_segment * p.heads + own.head] = log_before;
}

template <bool kStateDecays, bool kReversed>
__global__ void __launch_bounds__(kPassingThreads) super_segments_kernel(const __grid_constant__ SsmParams p) {
  const StateElements own(p, kStateDecays);
  if (!own.present) return;
  const SsmRunEntry& run = p.runs[blockIdx.y];
  const std::int64_t end = run.super_segment + (run.tokens + kSuperSegmentTokens - 1) / kSuperSegmentTokens;
  const std::int64_t segments = (run.tokens + kSegmentTokens - 1) / kSegmentTokens;
  const std::int64_t all = std::int64_t{p.heads} * p.head_dim * p.state_dim;
  float4 before = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
  if (run.initial != nullptr) before = load_four(run.initial + own.in_states);
  for (std::int64_t nth = 0; nth < end - run.super_segment; ++nth) {
    const std::int64_t in_run = kReversed ? end - run.super_segment - 1 - nth : nth;
    const std::int64_t super_segment = run.super_segment + in_run;
    auto* const state = reinterpret_cast<float4*>(p.super_states + super_segment * all + own.in_states);
    // The super-segment has one segment, whose local state it uses.
    const bool is_single = segments - in_run * kSegmentsOfSuper == 1;
    const std::int64_t segment = run.segment + in_run * kSegmentsOfSuper;
    const float4 local =
        is_single ? *reinterpret_cast<const float4*>(p.states + segment * all + own.in_states) : *state;
    const float log =
        is_single ? p.logs[segment * p.heads + own.head] : p.super_logs[super_segment * p.heads + own.head];
    if (nth > 0 || run.initial != nullptr) *state = before;
    before = own.join(kStateDecays, log, before, local);
  }
  if (run.final != nullptr) store_four(run.final + own.in_states, before);
}

dim3 grid_of(const SsmParams& p, int rows) {
  const std::int64_t vectors = std::int64_t{p.head_count} * p.head_dim * p.state_dim / 4;
  return {static_cast<unsigned>((vectors + kPassingThreads - 1) / kPassingThreads), static_cast<unsigned>(rows)};
}

using Pass = void(SsmParams);
Pass* segments_pass(bool state_decays, bool reversed) {
  if (reversed) return segments_kernel<false, true>;
  return state_decays ? segments_kernel<true, false> : segments_kernel<false, false>;
}
Pass* super_segments_pass(bool state_decays, bool reversed) {
  if (reversed) return super_segments_kernel<false, true>;
  return state_decays ? super_segments_kernel<true, false> : super_segments_kernel<false, false>;
}

}  // namespace

void load_state_passing(bool state_decays, bool reversed) {
  load_kernel(segments_pass(state_decays, reversed));
  load_kernel(super_segments_pass(state_decays, reversed));
}

void pass_segments(const SsmParams& params, bool state_decays, cudaStream_t stream, bool reversed) {
  const auto passes = [](const SsmRunEntry& run) { return run.tokens > kSegmentTokens; };
  if (std::none_of(params.runs, params.runs + params.run_count, passes)) return;
  segments_pass(state_decays, reversed)<<<grid_of(params, params.super_segments), kPassingThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "the pass over segments");
}

void pass_super_segments(const SsmParams& params, bool state_decays, cudaStream_t stream, bool reversed) {
  super_segments_pass(state_decays,
                      reversed)<<<grid_of(params, params.run_count), kPassingThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "the pass over super-segments");
}

}  // namespace ringattn::cuda
