// SPDX-License-Identifier: Apache-2.0
// A step of decoding moves every state once from memory and back. A group of lanes has two neighbouring rows of a
// state, which share B and C: dims of one head, or channels of one group. States with a rate each go another way where
// they can (update_loop.cuh).
#include <algorithm>
#include <iterator>

#include "base/cuda.hpp"
#include "kernels/cuda/load_kernel.hpp"
#include "kernels/cuda/multiprocessors.hpp"
#include "kernels/cuda/scan/ssm_device.cuh"
#include "kernels/cuda/scan/state_pieces.cuh"
#include "kernels/cuda/scan/update.hpp"
#include "kernels/cuda/scan/update_loop.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kRows = 2;  // of a group of lanes: with more of them, fewer warps have loads on their way
constexpr int kMaxLanes = 32;
// Blocks of each CTA that loops, at least: with one, which it can't ask for ahead, it is slower than without a
// update_loop.
constexpr int kMinWalk = 4;

// A lane's piece of a group's states, and what belongs to it. All of it is asked for before any of it is used.
template <class Element, bool kStateDecays, bool kAligned>
struct Piece {
  Four states[kRows];
  Four rates[kStateDecays ? kRows : 1];
  Elements<Element> b;
  Elements<Element> c;

  // From state n on; the group's first row is of `head`.
  __device__ __forceinline__ Piece(const UpdateParams& p, const float* group_states, std::int64_t sequence, int head,
                                   int n) {
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

// kLanes: of a group, which is a part of a warp. kAligned: states, A, B and C can be read by four elements.
template <class Element, bool kStateDecays, int kLanes, bool kAligned>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ UpdateParams p) {
  static_assert(kRows <= kLanes, "a lane makes dt of one row, and writes one");
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int rows_of_sequence = p.heads * p.head_dim;
  const int asked = p.by_blocks.quotient(static_cast<std::int32_t>(blockIdx.x));
  const int block = static_cast<int>(blockIdx.x) - asked * blocks_of_sequence<kLanes>(rows_of_sequence);
  const int row_of_sequence = (block * kThreads + static_cast<int>(threadIdx.x)) / kLanes * kRows;
  const std::int64_t slot = p.slots != nullptr ? p.slots[asked] : asked;
  const bool in_range = row_of_sequence < rows_of_sequence;  // else it loads as the first rows do, and writes nothing
  const bool present = in_range && slot >= 0;  // else, in range, it is padding: it writes zeros to y alone
  const std::int64_t sequence = in_range ? asked : 0;
  const int first_row = in_range ? row_of_sequence : 0;
  const int first_head = kStateDecays ? first_row : p.by_head_dim.quotient(first_row);
  const int first_dim = kStateDecays ? 0 : first_row - first_head * p.head_dim;
  float* const states = p.states + ((present ? slot : 0) * rows_of_sequence + first_row) * p.state_dim;

  int n = lane * kUpdateWidth;
  const bool has_piece = n < p.state_dim;
  Piece<Element, kStateDecays, kAligned> piece(p, states, sequence, first_head, has_piece ? n : 0);
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
  if constexpr (kStateDecays) {  // lanes share the rows
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
  // No branch around this loop: ptxas of CUDA 13.0 would move the loads into it, behind what dt waits for.
  while (true) {
    const bool mine = present && n < p.state_dim;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float input = __fmul_rn(dt[row], x[row]);
      Four& state = piece.states[row];
      float sum = y[row];
#pragma unroll
      for (int i = 0; i < kUpdateWidth; ++i) {
        if constexpr (kStateDecays) {
          decay = exp2_approx(__fmul_rn(dt[row], __fmul_rn(piece.rates[row].v[i], kSsmLog2E)));
        }
        state.v[i] = __fmaf_rn(decay, state.v[i], __fmul_rn(input, to_float(piece.b.v[i])));
        sum = __fmaf_rn(to_float(piece.c.v[i]), state.v[i], sum);
      }
      if (mine) y[row] = sum;
      if (mine) store_state<kAligned>(states + std::int64_t{row} * p.state_dim + n, state);
    }
    n += kLanes * kUpdateWidth;
    if (kLanes < kMaxLanes || n >= p.state_dim) break;  // fewer lanes have one piece each
    piece = Piece<Element, kStateDecays, kAligned>(p, states, sequence, first_head, n);
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

struct UpdateForm {
  void (*kernel)(UpdateParams);
  int (*blocks)(int rows);  // of a sequence
};
struct UpdateLoopForm {
  void (*kernel)(UpdateLoop);
  int channels;  // of a block
};

template <class Element, bool kStateDecays, int kLanes, bool kAligned>
constexpr UpdateForm update_form() {
  return {update_kernel<Element, kStateDecays, kLanes, kAligned>, blocks_of_sequence<kLanes>};
}

template <class Element, bool kStateDecays, bool kAligned>
UpdateForm form_of(int state_dim) {
  const int pieces = state_dim / kUpdateWidth;
  if (pieces <= 4) return update_form<Element, kStateDecays, 4, kAligned>();
  if (pieces <= 16) return update_form<Element, kStateDecays, 16, kAligned>();
  return update_form<Element, kStateDecays, kMaxLanes, kAligned>();
}

template <bool kAligned>
UpdateForm form_of(Dtype dtype, bool state_decays, int state_dim) {
  if (dtype == Dtype::kF32) return form_of<float, true, kAligned>(state_dim);  // of selective scans alone
  if (dtype == Dtype::kBf16) {
    return state_decays ? form_of<__nv_bfloat16, true, kAligned>(state_dim)
                        : form_of<__nv_bfloat16, false, kAligned>(state_dim);
  }
  return state_decays ? form_of<__half, true, kAligned>(state_dim) : form_of<__half, false, kAligned>(state_dim);
}

// Of selective scans, where a row of states is one piece of each lane.
bool loops(bool state_decays, int state_dim) {
  return state_decays && (state_dim == 4 * kUpdateWidth || state_dim == 16 * kUpdateWidth);
}

// Whether a update_loop can count with 32 bits: its blocks, and within what belongs to a sequence.
bool is_narrow(const UpdateParams& p) {
  const std::int64_t most = ((std::int64_t{1} << 31) - 1) / p.heads;
  const std::int64_t strides[] = {p.x.head_stride, p.dt.head_stride, p.z.head_stride, p.b.head_stride,
                                  p.c.head_stride, p.y_head_stride,  p.state_dim,     p.sequences};
  return std::all_of(std::begin(strides), std::end(strides),
                     [most](std::int64_t stride) { return -most <= stride && stride <= most; });
}

template <class Element>
UpdateLoopForm update_loop_form_of(int state_dim) {
  if (state_dim == 4 * kUpdateWidth) return {update_loop_kernel<Element, 4>, kUpdateChannels<4>};
  return {update_loop_kernel<Element, 16>, kUpdateChannels<16>};
}
UpdateLoopForm update_loop_form_of(Dtype dtype, int state_dim) {
  if (dtype == Dtype::kF32) return update_loop_form_of<float>(state_dim);
  return dtype == Dtype::kBf16 ? update_loop_form_of<__nv_bfloat16>(state_dim) : update_loop_form_of<__half>(state_dim);
}

// That the current device holds at a time.
int cluster_ctas(void (*kernel)(UpdateLoop)) {
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

int blocks_of_loop(const UpdateParams& p, const UpdateLoopForm& form) {
  return static_cast<int>(p.sequences) * ((p.heads + form.channels - 1) / form.channels);
}

void loop_over_states(const UpdateParams& params, const UpdateLoopForm& form, int ctas, cudaStream_t stream) {
  UpdateLoop update_loop{};
  update_loop.params = params;
  update_loop.by_sequences = Divider(params.sequences);
  const int blocks = blocks_of_loop(params, form);
  update_loop.blocks_each = blocks / ctas;
  update_loop.longer_loops = blocks % ctas;
  form.kernel<<<static_cast<unsigned>(ctas), kUpdateThreads, 0, stream>>>(update_loop);
  check_cuda(cudaGetLastError(), "the update of states");
}

}  // namespace

int load_update(Dtype dtype, bool state_decays, int state_dim) {
  load_kernel(form_of<true>(dtype, state_decays, state_dim).kernel);
  load_kernel(form_of<false>(dtype, state_decays, state_dim).kernel);
  if (!loops(state_decays, state_dim)) return 0;
  const UpdateLoopForm form = update_loop_form_of(dtype, state_dim);
  load_kernel(form.kernel);
  return cluster_ctas(form.kernel);
}

void update_states(const UpdateParams& given, Dtype dtype, bool state_decays, int max_walk_ctas, cudaStream_t stream) {
  UpdateParams params = given;
  const bool aligned =
      params.states_aligned && (params.rates_aligned || !state_decays) && params.b.aligned && params.c.aligned;
  if (aligned && loops(state_decays, params.state_dim) && is_narrow(params)) {
    const UpdateLoopForm form = update_loop_form_of(dtype, params.state_dim);
    if (blocks_of_loop(params, form) >= kMinWalk * max_walk_ctas) {
      return loop_over_states(params, form, max_walk_ctas, stream);
    }
  }
  const UpdateForm form = aligned ? form_of<true>(dtype, state_decays, params.state_dim)
                                  : form_of<false>(dtype, state_decays, params.state_dim);
  const int blocks = form.blocks(params.heads * params.head_dim);
  params.by_blocks = Divider(blocks);
  form.kernel<<<static_cast<unsigned>(params.sequences * blocks), kThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "the update of states");
}

}  // namespace ringattn::cuda
