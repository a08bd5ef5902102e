// SPDX-License-Identifier: Apache-2.0
// A step of decoding moves every state once from memory and back. A group of lanes has eight neighbouring rows of a
// state, which share B and C: dims of one head, or channels of one group.
#include "base/cuda.hpp"
#include "kernels/cuda/scan/load_kernel.hpp"
#include "kernels/cuda/scan/scan_device.cuh"
#include "kernels/cuda/scan/update.hpp"

namespace ringattn::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kRows = 8;   // of a group of lanes
constexpr int kWidth = 4;  // elements of a row that a lane has side by side

struct Four {
  float v[kWidth];
};

__device__ __forceinline__ Four load_state(const float* at, bool aligned) {
  if (aligned) {
    const float4 four = *reinterpret_cast<const float4*>(at);
    return {{four.x, four.y, four.z, four.w}};
  }
  return {{at[0], at[1], at[2], at[3]}};
}
__device__ __forceinline__ void store_state(float* at, bool aligned, const Four& four) {
  if (aligned) {
    *reinterpret_cast<float4*>(at) = make_float4(four.v[0], four.v[1], four.v[2], four.v[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) at[i] = four.v[i];
}

template <class Element>
__device__ __forceinline__ Four load_elements(const Element* at) {
  Four four;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) four.v[i] = to_float(at[i]);
  return four;
}

// kLanes: of a group, which is a part of a warp.
template <class Element, bool kStateDecays, int kLanes>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ UpdateParams p) {
  const std::int64_t group = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int rows_of_sequence = p.heads * p.head_dim;
  const int groups_of_sequence = rows_of_sequence / kRows;
  const std::int64_t sequence = group / groups_of_sequence;
  std::int64_t slot = sequence;
  if (p.slots != nullptr && sequence < p.sequences) slot = p.slots[sequence];
  const bool present = sequence < p.sequences && slot >= 0;
  const int first_row = static_cast<int>(group % groups_of_sequence) * kRows;

  float y[kRows] = {};
  float x[kRows];
  if (present) {
    const auto head_of = [&](int row) { return kStateDecays ? first_row + row : first_row / p.head_dim; };
    float dt[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int head = head_of(row);
      x[row] = to_float(element_at<Element>(p.x, sequence, head)[kStateDecays ? 0 : first_row % p.head_dim + row]);
      if (row == 0 || kStateDecays) {
        dt[row] = make_dt(to_float(*element_at<Element>(p.dt, sequence, head)), p.dt_bias, head, p.softplus, p.dt_least,
                          p.dt_most);
      } else {
        dt[row] = dt[0];
      }
    }
    const int shared_row = head_of(0) / p.group_heads;
    const Element* const b = element_at<Element>(p.b, sequence, shared_row);
    const Element* const c = element_at<Element>(p.c, sequence, shared_row);
    float* const states = p.states + (slot * rows_of_sequence + first_row) * p.state_dim;
    float decay = 0.0F;
    if (!kStateDecays) decay = exp2_approx(__fmul_rn(dt[0], __fmul_rn(p.a[head_of(0)], kScanLog2E)));
    for (int n = lane * kWidth; n < p.state_dim; n += kLanes * kWidth) {
      Four state[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        state[row] = load_state(states + std::int64_t{row} * p.state_dim + n, p.states_aligned);
      }
      const Four b_here = load_elements(b + n);
      const Four c_here = load_elements(c + n);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float input = __fmul_rn(dt[row], x[row]);
        const float* const rates = p.a + std::int64_t{head_of(row)} * p.state_dim + n;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (kStateDecays) decay = exp2_approx(__fmul_rn(dt[row], __fmul_rn(rates[i], kScanLog2E)));
          state[row].v[i] = __fmaf_rn(decay, state[row].v[i], __fmul_rn(input, b_here.v[i]));
          y[row] = __fmaf_rn(c_here.v[i], state[row].v[i], y[row]);
        }
        store_state(states + std::int64_t{row} * p.state_dim + n, p.states_aligned, state[row]);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int other = kLanes / 2; other > 0; other /= 2) {
      y[row] = __fadd_rn(y[row], __shfl_xor_sync(0xffffffffU, y[row], other));
    }
  }
  if (!present) return;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row % kLanes != lane) continue;
    const int head = kStateDecays ? first_row + row : first_row / p.head_dim;
    const int dim = kStateDecays ? 0 : first_row % p.head_dim + row;
    float value = y[row];
    if (p.d != nullptr) value = __fmaf_rn(p.d[head], x[row], value);
    if (p.z.data != nullptr) value = __fmul_rn(value, silu(to_float(element_at<Element>(p.z, sequence, head)[dim])));
    static_cast<Element*>(p.y)[sequence * p.y_token_stride + head * p.y_head_stride + dim] = from_float<Element>(value);
  }
}

struct UpdateForm {
  void (*kernel)(UpdateParams);
  int lanes;
};

template <class Element, bool kStateDecays>
UpdateForm form_of(int state_dim) {
  const int pieces = state_dim / kWidth;
  if (pieces <= 4) return {update_kernel<Element, kStateDecays, 4>, 4};
  if (pieces <= 16) return {update_kernel<Element, kStateDecays, 16>, 16};
  return {update_kernel<Element, kStateDecays, 32>, 32};
}

UpdateForm form_of(Dtype dtype, bool state_decays, int state_dim) {
  if (dtype == Dtype::kF32) return form_of<float, true>(state_dim);  // of selective scans alone
  if (dtype == Dtype::kBf16) {
    return state_decays ? form_of<__nv_bfloat16, true>(state_dim) : form_of<__nv_bfloat16, false>(state_dim);
  }
  return state_decays ? form_of<__half, true>(state_dim) : form_of<__half, false>(state_dim);
}

}  // namespace

void load_update(Dtype dtype, bool state_decays, int state_dim) {
  load_kernel(form_of(dtype, state_decays, state_dim).kernel);
}

void update_states(const UpdateParams& params, Dtype dtype, bool state_decays, cudaStream_t stream) {
  const UpdateForm form = form_of(dtype, state_decays, params.state_dim);
  const std::int64_t threads = params.sequences * (std::int64_t{params.heads} * params.head_dim / kRows) * form.lanes;
  form.kernel<<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "the update of states");
}

}  // namespace ringattn::cuda
