// SPDX-License-Identifier: Apache-2.0
// Decode step of an SSM layer: each state is read and written once. A lane group has two adjacent rows of a state that
// share B and C: dims of one head, or channels of one group. Selective scans use a persistent kernel where they can
// (update_loop.cuh).
#include <algorithm>
#include <iterator>

#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/cuda/state_pieces.cuh"
#include "kernels/ssm/cuda/update.hpp"
#include "kernels/ssm/cuda/update_loop.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kRows = 2;  // per lane group; with more rows, fewer warps have loads in flight
constexpr int kMaxLanes = 32;
// Min. blocks per CTA of the persistent kernel. With one, there is nothing to prefetch, and it is slower than the other
// kernel.
constexpr int kMinBlocksPerCta = 4;

// A lane's elements of its group's states, and the A, B and C for them. All loads are issued before any is used.
template <class Element, bool kStateDecays, bool kAligned>
struct LaneElements {
  Vec4 states[kRows];
  Vec4 rates[kStateDecays ? kRows : 1];
  Elements<Element> b;
  Elements<Element> c;

  // Loads from state n on. The group's first row is of `head`.
  __device__ __forceinline__ LaneElements(const UpdateParams& p, const float* group_states, std::int64_t sequence,
                                          int head, int n) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      states[row] = load_state<kAligned>(group_states + std::int64_t{row} * p.state_dim + n);
    }
    if constexpr (kStateDecays) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        rates[row] = load_state<kAligned>(p.a + std::int64_t{head + row} * p.state_dim + n);
      }
    }
    const int shared_row = p.by_group_heads.quotient(head);
    b = load_elements<kAligned>(element_at<Element>(p.b, sequence, shared_row) + n);
    c = load_elements<kAligned>(element_at<Element>(p.c, sequence, shared_row) + n);
  }
};

template <int kLanes>
__host__ __device__ constexpr int blocks_of_sequence(int rows) {
  return (rows / kRows * kLanes + kThreads - 1) / kThreads;
}

// kLanes: lanes per group, at most a warp. kAligned: states, A, B and C can be accessed as vectors of four.
template <class Element, bool kStateDecays, int kLanes, bool kAligned>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ UpdateParams p) {
  static_assert(kRows <= kLanes, "a lane makes dt of one row, and writes one");
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int rows_of_sequence = p.heads * p.head_dim;
  const int batch_index = p.by_blocks.quotient(static_cast<std::int32_t>(blockIdx.x));
  const int block = static_cast<int>(blockIdx.x) - batch_index * blocks_of_sequence<kLanes>(rows_of_sequence);
  const int row_of_sequence = (block * kThreads + static_cast<int>(threadIdx.x)) / kLanes * kRows;
  const std::int64_t slot = p.slots != nullptr ? p.slots[batch_index] : batch_index;
  const bool in_range = row_of_sequence < rows_of_sequence;  // else it loads the first rows and stores nothing
  const bool present = in_range && slot >= 0;  // an absent slot in range is padding: only zeros are stored to y
  const std::int64_t sequence = in_range ? batch_index : 0;
  const int first_row = in_range ? row_of_sequence : 0;
  const int first_head = kStateDecays ? first_row : p.by_head_dim.quotient(first_row);
  const int first_dim = kStateDecays ? 0 : first_row - first_head * p.head_dim;
  float* const states = p.states + ((present ? slot : 0) * rows_of_sequence + first_row) * p.state_dim;

  int n = lane * kUpdateWidth;
  const bool has_states = n < p.state_dim;
  LaneElements<Element, kStateDecays, kAligned> elements(p, states, sequence, first_head, has_states ? n : 0);
  float x[kRows];
  float dt[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    x[row] = to_float(element_at<Element>(p.x, sequence,
                                          first_head + (kStateDecays ? row : 0))[first_dim + (kStateDecays ? 0 : row)]);
  }
  const auto dt_of = [&](int head) {
    const float given = to_float(*element_at<Element>(p.dt, sequence, head));
    return make_dt(given, dt_bias_of(p.dt_bias, head), p.softplus, p.dt_min, p.dt_max);
  };
  if constexpr (kStateDecays) {  // lanes share the computation of dt
    const float own = dt_of(first_head + lane % kRows);
#pragma unroll
    for (int row = 0; row < kRows; ++row) dt[row] = __shfl_sync(0xffffffffU, own, row, kLanes);
  } else {
    dt[0] = dt_of(first_head);
#pragma unroll
    for (int row = 1; row < kRows; ++row) dt[row] = dt[0];
  }
  float decay = 0.0F;
  if (!kStateDecays) decay = exp2_approx(__fmul_rn(dt[0], __fmul_rn(p.a[first_head], kSsmLog2E)));

  Element gate{};
  float skip = 0.0F;
  const int own = lane % kRows;
  const int own_head = kStateDecays ? first_head + own : first_head;
  const int own_dim = kStateDecays ? 0 : first_dim + own;
  if (p.z.data != nullptr) gate = element_at<Element>(p.z, sequence, own_head)[own_dim];
  if (p.d != nullptr) skip = p.d[own_head];
  float y[kRows] = {};
  // No branch around this loop: ptxas of CUDA 13.0 would move the loads into it, after the wait for dt.
  while (true) {
    const bool mine = present && n < p.state_dim;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float input = __fmul_rn(dt[row], x[row]);
      Vec4& state = elements.states[row];
      float sum = y[row];
#pragma unroll
      for (int i = 0; i < kUpdateWidth; ++i) {
        if constexpr (kStateDecays) {
          decay = exp2_approx(__fmul_rn(dt[row], __fmul_rn(elements.rates[row].v[i], kSsmLog2E)));
        }
        state.v[i] = __fmaf_rn(decay, state.v[i], __fmul_rn(input, to_float(elements.b.v[i])));
        sum = __fmaf_rn(to_float(elements.c.v[i]), state.v[i], sum);
      }
      if (mine) y[row] = sum;
      if (mine) store_state<kAligned>(states + std::int64_t{row} * p.state_dim + n, state);
    }
    n += kLanes * kUpdateWidth;
    if (kLanes < kMaxLanes || n >= p.state_dim) break;  // with fewer lanes, each has one vector
    elements = LaneElements<Element, kStateDecays, kAligned>(p, states, sequence, first_head, n);
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int other = kLanes / 2; other > 0; other /= 2) {
      y[row] = __fadd_rn(y[row], __shfl_xor_sync(0xffffffffU, y[row], other));
    }
  }
  if (!in_range || lane >= kRows) return;
  float value = y[0];
  float own_x = x[0];
#pragma unroll
  for (int row = 1; row < kRows; ++row) {
    value = own == row ? y[row] : value;
    own_x = own == row ? x[row] : own_x;
  }
  if (p.d != nullptr) value = __fmaf_rn(skip, own_x, value);
  if (p.z.data != nullptr) value = __fmul_rn(value, silu(to_float(gate)));
  if (!present) value = 0.0F;
  static_cast<Element*>(p.y)[sequence * p.y_token_stride + own_head * p.y_head_stride + own_dim] =
      from_float<Element>(value);
}

struct UpdateKernel {
  void (*kernel)(UpdateParams);
  int (*blocks)(int rows);  // per sequence
};
struct PersistentKernel {
  void (*kernel)(UpdateLoop);
  int channels;  // per block
};

template <class Element, bool kStateDecays, int kLanes, bool kAligned>
constexpr UpdateKernel update_kernel_of() {
  return {update_kernel<Element, kStateDecays, kLanes, kAligned>, blocks_of_sequence<kLanes>};
}

template <class Element, bool kStateDecays, bool kAligned>
UpdateKernel choose_kernel(int state_dim) {
  const int vectors = state_dim / kUpdateWidth;
  if (vectors <= 4) return update_kernel_of<Element, kStateDecays, 4, kAligned>();
  if (vectors <= 16) return update_kernel_of<Element, kStateDecays, 16, kAligned>();
  return update_kernel_of<Element, kStateDecays, kMaxLanes, kAligned>();
}

template <bool kAligned>
UpdateKernel choose_kernel(Dtype dtype, bool state_decays, int state_dim) {
  if (dtype == Dtype::kF32) return choose_kernel<float, true, kAligned>(state_dim);  // only selective scans have fp32
  if (dtype == Dtype::kBf16) {
    return state_decays ? choose_kernel<__nv_bfloat16, true, kAligned>(state_dim)
                        : choose_kernel<__nv_bfloat16, false, kAligned>(state_dim);
  }
  return state_decays ? choose_kernel<__half, true, kAligned>(state_dim)
                      : choose_kernel<__half, false, kAligned>(state_dim);
}

// True if there is a persistent kernel: selective scans whose rows of states are one vector per lane.
bool has_persistent_kernel(bool state_decays, int state_dim) {
  return state_decays && (state_dim == 4 * kUpdateWidth || state_dim == 16 * kUpdateWidth);
}

// True if the persistent kernel can use 32-bit indices for blocks and within a sequence.
bool fits_32_bits(const UpdateParams& p) {
  const std::int64_t max_stride = ((std::int64_t{1} << 31) - 1) / p.heads;
  const std::int64_t strides[] = {p.x.head_stride, p.dt.head_stride, p.z.head_stride, p.b.head_stride,
                                  p.c.head_stride, p.y_head_stride,  p.state_dim,     p.sequences};
  return std::all_of(std::begin(strides), std::end(strides),
                     [max_stride](std::int64_t stride) { return -max_stride <= stride && stride <= max_stride; });
}

template <class Element>
PersistentKernel persistent_kernel_of(int state_dim) {
  if (state_dim == 4 * kUpdateWidth) return {update_loop_kernel<Element, 4>, kUpdateChannels<4>};
  return {update_loop_kernel<Element, 16>, kUpdateChannels<16>};
}
PersistentKernel persistent_kernel_of(Dtype dtype, int state_dim) {
  if (dtype == Dtype::kF32) return persistent_kernel_of<float>(state_dim);
  return dtype == Dtype::kBf16 ? persistent_kernel_of<__nv_bfloat16>(state_dim)
                               : persistent_kernel_of<__half>(state_dim);
}

// Max. resident CTAs of the kernel on the current device.
int resident_ctas_of(void (*kernel)(UpdateLoop)) {
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
      "cudaFuncSetAttribute");
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  int ctas = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, kUpdateThreads, 0),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return ctas * multiprocessors_of(device);
}

int block_count(const UpdateParams& p, const PersistentKernel& chosen) {
  return static_cast<int>(p.sequences) * ((p.heads + chosen.channels - 1) / chosen.channels);
}

void launch_persistent(const UpdateParams& params, const PersistentKernel& chosen, int ctas, cudaStream_t stream) {
  UpdateLoop update_loop{};
  update_loop.params = params;
  update_loop.by_sequences = Divider(params.sequences);
  const int blocks = block_count(params, chosen);
  update_loop.blocks_per_cta = blocks / ctas;
  update_loop.longer_ctas = blocks % ctas;
  chosen.kernel<<<static_cast<unsigned>(ctas), kUpdateThreads, 0, stream>>>(update_loop);
  check_cuda(cudaGetLastError(), "the update of states");
}

}  // namespace

int load_update(Dtype dtype, bool state_decays, int state_dim) {
  load_kernel(choose_kernel<true>(dtype, state_decays, state_dim).kernel);
  load_kernel(choose_kernel<false>(dtype, state_decays, state_dim).kernel);
  if (!has_persistent_kernel(state_decays, state_dim)) return 0;
  const PersistentKernel chosen = persistent_kernel_of(dtype, state_dim);
  load_kernel(chosen.kernel);
  return resident_ctas_of(chosen.kernel);
}

void update_states(const UpdateParams& given, Dtype dtype, bool state_decays, int resident_ctas, cudaStream_t stream) {
  UpdateParams params = given;
  const bool aligned =
      params.states_aligned && (params.rates_aligned || !state_decays) && params.b.aligned && params.c.aligned;
  if (aligned && has_persistent_kernel(state_decays, params.state_dim) && fits_32_bits(params)) {
    const PersistentKernel chosen = persistent_kernel_of(dtype, params.state_dim);
    if (block_count(params, chosen) >= kMinBlocksPerCta * resident_ctas) {
      return launch_persistent(params, chosen, resident_ctas, stream);
    }
  }
  const UpdateKernel chosen = aligned ? choose_kernel<true>(dtype, state_decays, params.state_dim)
                                      : choose_kernel<false>(dtype, state_decays, params.state_dim);
  const int blocks = chosen.blocks(params.heads * params.head_dim);
  params.by_blocks = Divider(blocks);
  chosen.kernel<<<static_cast<unsigned>(params.sequences * blocks), kThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "the update of states");
}

}  // namespace ringattn::cuda
