// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kPassingThreads = 256;
constexpr int kLoadsInFlight = 4;  // local states loaded before the first is used: no store is between their loads

// The log2 of a decay, for four adjacent elements of a head's state.
template <SsmLogs kLogs>
using LogOf = std::conditional_t<kLogs == SsmLogs::kState, float4, float>;
__device__ float add_logs(float a, float b) { return __fadd_rn(a, b); }
__device__ float4 add_logs(const float4& a, const float4& b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// Four adjacent elements of one head's state.
template <SsmLogs kLogs>
struct StateElements {
  using Log = LogOf<kLogs>;

  std::int64_t in_states;  // offset of the first one in [heads, head_dim, state_dim]
  bool present;
  std::int64_t log_stride;  // logs of a segment
  std::int64_t in_logs;     // offset of these elements' log among them
  bool stores_log;
  float rates[kLogs == SsmLogs::kHeadTimesA ? 4 : 1];  // A · log2 e

  __device__ explicit StateElements(const SsmParams& p) : rates{} {
    const int state_floats = p.head_dim * p.state_dim;
    const std::int64_t in_range = (std::int64_t{blockIdx.x} * kPassingThreads + threadIdx.x) * 4;
    present = in_range < std::int64_t{p.head_count} * state_floats;
    const int head = p.first_head + static_cast<int>(in_range / state_floats);
    in_states = std::int64_t{p.first_head} * state_floats + in_range;
    const auto in_head = static_cast<int>(in_range % state_floats);
    if constexpr (kLogs == SsmLogs::kState) {
      log_stride = std::int64_t{p.heads} * p.state_dim;
      in_logs = std::int64_t{head} * p.state_dim + in_head % p.state_dim;
      stores_log = in_head < p.state_dim;
    } else {
      log_stride = p.heads;
      in_logs = head;
      stores_log = in_head == 0;
    }
    if constexpr (kLogs == SsmLogs::kHeadTimesA) {
      if (!present) return;
      for (int i = 0; i < 4; ++i) rates[i] = __fmul_rn(p.a[in_states + i], kSsmLog2E);
    }
  }

  // The log in an array of those of segments or super-segments.
  __device__ Log log_of(const float* logs, std::int64_t index) const {
    return *reinterpret_cast<const Log*>(logs + index * log_stride + in_logs);
  }
  __device__ void store_log(float* logs, std::int64_t index, const Log& log) const {
    if (stores_log) *reinterpret_cast<Log*>(logs + index * log_stride + in_logs) = log;
  }

  // fma(decay, before, local) for the four elements.
  __device__ float4 join(const Log& log, const float4& before, const float4& local) const {
    float4 decay;
    if constexpr (kLogs == SsmLogs::kHead) {
      decay.x = decay.y = decay.z = decay.w = exp2_approx(log);
    } else if constexpr (kLogs == SsmLogs::kHeadTimesA) {
      const auto decay_of = [&](int i) { return exp2_approx(__fmul_rn(rates[i], log)); };
      decay = make_float4(decay_of(0), decay_of(1), decay_of(2), decay_of(3));
    } else {
      decay = make_float4(exp2_approx(log.x), exp2_approx(log.y), exp2_approx(log.z), exp2_approx(log.w));
    }
    return make_float4(__fmaf_rn(decay.x, before.x, local.x), __fmaf_rn(decay.y, before.y, local.y),
                       __fmaf_rn(decay.z, before.z, local.z), __fmaf_rn(decay.w, before.w, local.w));
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

template <SsmLogs kLogs, bool kReversed>
__global__ void __launch_bounds__(kPassingThreads) segments_kernel(const __grid_constant__ SsmParams p) {
  const StateElements<kLogs> own(p);
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
  LogOf<kLogs> log_before{};
#pragma unroll 1
  for (std::int64_t first = begin; first < end; first += kLoadsInFlight) {
    float4 local[kLoadsInFlight];
    LogOf<kLogs> log[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (first + i >= end) break;
      local[i] = *reinterpret_cast<const float4*>(p.states + at(first + i) * all + own.in_states);
      log[i] = own.log_of(p.logs, at(first + i));
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      if (first + i >= end) break;
      if (first + i > begin) {  // the first state is zero and not stored
        // A plain assignment compiles to four stores here (nvcc 13.0).
        __stcg(reinterpret_cast<float4*>(p.states + at(first + i) * all + own.in_states), before);
        own.store_log(p.logs_before, at(first + i), log_before);
      }
      before = own.join(log[i], before, local[i]);
      log_before = add_logs(log_before, log[i]);
    }
  }
  __stcg(reinterpret_cast<float4*>(p.super_states + super_segment * all + own.in_states), before);
  if (!kReversed) own.store_log(p.super_logs, super_segment, log_before);
}

template <SsmLogs kLogs, bool kReversed>
__global__ void __launch_bounds__(kPassingThreads) super_segments_kernel(const __grid_constant__ SsmParams p) {
  const StateElements<kLogs> own(p);
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
    const LogOf<kLogs> log = is_single ? own.log_of(p.logs, segment) : own.log_of(p.super_logs, super_segment);
    if (nth > 0 || run.initial != nullptr) *state = before;
    before = own.join(log, before, local);
  }
  if (run.final != nullptr) store_four(run.final + own.in_states, before);
}

dim3 grid_of(const SsmParams& p, int rows) {
  const std::int64_t vectors = std::int64_t{p.head_count} * p.head_dim * p.state_dim / 4;
  return {static_cast<unsigned>((vectors + kPassingThreads - 1) / kPassingThreads), static_cast<unsigned>(rows)};
}

using Pass = void(SsmParams);
struct Passes {
  Pass *segments, *super_segments;
};
template <SsmLogs kLogs, bool kReversed>
constexpr Passes passes_of() {
  return {segments_kernel<kLogs, kReversed>, super_segments_kernel<kLogs, kReversed>};
}
Passes passes_of(SsmLogs logs, bool reversed) {
  if (reversed) return passes_of<SsmLogs::kHead, true>();
  switch (logs) {
    case SsmLogs::kHead:
      return passes_of<SsmLogs::kHead, false>();
    case SsmLogs::kHeadTimesA:
      return passes_of<SsmLogs::kHeadTimesA, false>();
    case SsmLogs::kState:
      break;
  }
  return passes_of<SsmLogs::kState, false>();
}

}  // namespace

void load_state_passing(SsmLogs logs, bool reversed) {
  load_kernel(passes_of(logs, reversed).segments);
  load_kernel(passes_of(logs, reversed).super_segments);
}

void pass_segments(const SsmParams& params, SsmLogs logs, cudaStream_t stream, bool reversed) {
  const auto passes = [](const SsmRunEntry& run) { return run.tokens > kSegmentTokens; };
  if (std::none_of(params.runs, params.runs + params.run_count, passes)) return;
  passes_of(logs, reversed).segments<<<grid_of(params, params.super_segments), kPassingThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "the pass over segments");
}

void pass_super_segments(const SsmParams& params, SsmLogs logs, cudaStream_t stream, bool reversed) {
  passes_of(logs, reversed).super_segments<<<grid_of(params, params.run_count), kPassingThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "the pass over super-segments");
}

}  // namespace ringattn::cuda
