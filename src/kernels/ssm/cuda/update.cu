// SPDX-License-Identifier: Apache-2.0
// Decode step of an SSM layer: each state is read and written once. A lane group has two adjacent rows of a state that
// share B and C: dims of one head, or channels of one group. Selective scans use a persistent kernel where they can
// (update_loop_kernel).
#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/common/cuda/load_kernel.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"
#include "kernels/common/cuda/ptx.cuh"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::cuda {

// A lane's adjacent elements of a row of states, A, B or C, loaded and stored as one vector where they are aligned.

struct Vec4 {
  float v[kUpdateWidth];
};

template <bool kAligned>
__device__ __forceinline__ Vec4 load_state(const float* at) {
  if constexpr (kAligned) {
    const float4 four = *reinterpret_cast<const float4*>(at);
    return {{four.x, four.y, four.z, four.w}};
  }
  return {{at[0], at[1], at[2], at[3]}};
}
template <bool kAligned>
__device__ __forceinline__ void store_state(float* at, const Vec4& four) {
  if constexpr (kAligned) {
    *reinterpret_cast<float4*>(at) = make_float4(four.v[0], four.v[1], four.v[2], four.v[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kUpdateWidth; ++i) at[i] = four.v[i];
  }
}

template <class Element>
struct alignas(kUpdateWidth * sizeof(Element)) Elements {
  Element v[kUpdateWidth];
};
template <bool kAligned, class Element>
__device__ __forceinline__ Elements<Element> load_elements(const Element* at) {
  if constexpr (kAligned) return *reinterpret_cast<const Elements<Element>*>(at);
  return {{at[0], at[1], at[2], at[3]}};
}

// Persistent kernel for the decode step of selective scans (one A per state). A CTA processes blocks, each some
// channels of one sequence: all sequences of its channels, then those of the next channels. So A, biases and D are
// loaded only when the channels change. States are loaded by cp.async to shared memory, kUpdateStages blocks ahead. A
// thread reads only what it has copied itself, so no synchronization is needed. Other inputs are loaded into registers
// one block ahead.

inline constexpr int kUpdateThreads = 128;
inline constexpr int kUpdateRows = 4;    // rows per lane group
inline constexpr int kUpdateStages = 3;  // pipeline stages of states in shared memory
// Number of channels that always share B and C. Lane groups take their rows alternately, so that each access of a warp
// covers whole cache lines.
inline constexpr int kUpdateChannelTile = 8;
inline constexpr int kUpdateGroups = kUpdateChannelTile / kUpdateRows;  // lane groups per channel tile

template <class Element>
inline constexpr int kUpdateCtas = sizeof(Element) == 2 ? 8 : 6;  // CTAs per SM

template <int kLanes>
inline constexpr int kUpdateChannels = kUpdateRows*(kUpdateThreads / kLanes);  // channels per block

struct UpdateLoop {
  UpdateParams params;
  Divider by_sequences;
  std::int32_t blocks_per_cta;
  std::int32_t longer_ctas;  // the first CTAs, which have one block more
};

// Sums each row over the lanes of a group. A lane gets the sum of row lane / (kLanes / kRows).
template <int kLanes, int kRows>
__device__ __forceinline__ float sum_of_own_row(float (&y)[kRows], int lane) {
#pragma unroll
  for (int other = kLanes / 2, rows = kRows; other > 0; other /= 2, rows = rows > 1 ? rows / 2 : 1) {
    if (rows == 1) {
      y[0] = __fadd_rn(y[0], __shfl_xor_sync(0xffffffffU, y[0], other));
      continue;
    }
    const bool upper = (lane & other) != 0;
#pragma unroll
    for (int i = 0; i < rows / 2; ++i) {
      const float sent = upper ? y[i] : y[i + rows / 2];
      const float kept = upper ? y[i + rows / 2] : y[i];
      y[i] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffU, sent, other));
    }
  }
  return y[0];
}

// A block: its first channel, and its sequence.
struct UpdateIndex {
  int first;
  int sequence;
};

// Address of an element. Heads of a sequence are within 2^31 elements of each other.
template <class Element>
__device__ __forceinline__ const Element* update_element(const SsmTensor& tensor, int sequence, int head) {
  return static_cast<const Element*>(tensor.data) + sequence * tensor.token_stride +
         head * static_cast<std::int32_t>(tensor.head_stride);
}

// Inputs of a block except states: x, dt and z of the lane's own row, and the lane's elements of B and C.
template <class Element>
struct UpdateInputs {
  using Words = std::conditional_t<sizeof(Element) == 2, uint2, uint4>;  // packed elements, unpacked only when used

  Element x, dt, gate;
  Words b, c;
  std::int32_t slot;
};

template <class Element, class Words>
__device__ __forceinline__ void unpack_elements(const Words& words, float (&elements)[kUpdateWidth]) {
  static_assert(sizeof(Words) == kUpdateWidth * sizeof(Element));
  Elements<Element> parts;
  memcpy(&parts, &words, sizeof parts);
#pragma unroll
  for (int i = 0; i < kUpdateWidth; ++i) elements[i] = to_float(parts.v[i]);
}

// kLanes: lanes per group. A row of states has kUpdateWidth elements per lane.
template <class Element, int kLanes>
__global__ void __launch_bounds__(kUpdateThreads, kUpdateCtas<Element>)
    update_loop_kernel(const __grid_constant__ UpdateLoop update_loop) {
  static_assert(kUpdateRows <= kLanes && kLanes <= 32, "a lane has one row of its own, at most");
  constexpr int kStateDim = kLanes * kUpdateWidth;
  constexpr int kLanesOfRow = kLanes / kUpdateRows;      // lanes with the same own row
  constexpr int kRowFloats = kUpdateGroups * kStateDim;  // stride of a group's rows
  const UpdateParams& p = update_loop.params;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes;
  const int group = thread / kLanes;
  const int tile_channel = group / kUpdateGroups * kUpdateChannelTile;
  const int own_offset = lane / kLanesOfRow * kUpdateGroups;
  const int n = lane * kUpdateWidth;

  __shared__ float4 stages[kUpdateStages][kUpdateRows][kUpdateThreads];
  __shared__ float2 own_terms[kUpdateThreads];  // bias and D of a lane's own row, to save registers

  const auto index_of = [&](int block) -> UpdateIndex {
    const int channels = update_loop.by_sequences.quotient(block);
    return {channels * kUpdateChannels<kLanes>, block - channels * static_cast<std::int32_t>(p.sequences)};
  };
  const auto present_in = [&](const UpdateIndex& update_index) { return update_index.first + tile_channel < p.heads; };
  // The first channel of the group. If the group has no channels, a channel of the first tile.
  const auto channel_of = [&](const UpdateIndex& update_index) {
    return (present_in(update_index) ? update_index.first + tile_channel : 0) + group % kUpdateGroups;
  };
  // The shuffle hides from the compiler that all lanes read one address, since it would wait for such a load at once.
  const auto slot_of = [&](const UpdateIndex& update_index) {
    const int sequence = __shfl_sync(0xffffffffU, update_index.sequence, 0);
    return p.slots != nullptr ? p.slots[sequence] : sequence;
  };
  const auto states_at = [&](int channel, int slot) {
    return p.states + channel * kStateDim + n + std::int64_t{slot} * (p.heads * kStateDim);
  };
  const auto issue_state_loads = [&](const UpdateIndex& update_index, int stage, int slot) {
    const bool present = present_in(update_index) && slot >= 0;
    const float* const from = states_at(channel_of(update_index), present ? slot : 0);
#pragma unroll
    for (int row = 0; row < kUpdateRows; ++row) {
      copy_16(shared_address(&stages[stage][row][thread]), from + row * kRowFloats, present);
    }
  };
  const auto inputs_of = [&](const UpdateIndex& update_index) {
    const int channel = channel_of(update_index);
    const int own = channel + own_offset;
    const int shared_row = p.by_group_heads.quotient(channel);
    using Words = typename UpdateInputs<Element>::Words;
    const auto words_at = [&](const SsmTensor& tensor) {
      return *reinterpret_cast<const Words*>(update_element<Element>(tensor, update_index.sequence, shared_row) + n);
    };
    UpdateInputs<Element> inputs;
    inputs.x = *update_element<Element>(p.x, update_index.sequence, own);
    inputs.dt = *update_element<Element>(p.dt, update_index.sequence, own);
    inputs.gate = p.z.data != nullptr ? *update_element<Element>(p.z, update_index.sequence, own) : Element{};
    inputs.b = words_at(p.b);
    inputs.c = words_at(p.c);
    inputs.slot = slot_of(update_index);
    return inputs;
  };

  const int cta = static_cast<int>(blockIdx.x);
  const int first = cta * update_loop.blocks_per_cta + (cta < update_loop.longer_ctas ? cta : update_loop.longer_ctas);
  const int end = first + update_loop.blocks_per_cta + (cta < update_loop.longer_ctas ? 1 : 0);
  int slots[kUpdateStages];
#pragma unroll
  for (int stage = 0; stage < kUpdateStages; ++stage) {
    slots[stage] = first + stage < end ? slot_of(index_of(first + stage)) : -1;
  }
#pragma unroll
  for (int stage = 0; stage < kUpdateStages; ++stage) {
    if (first + stage < end) issue_state_loads(index_of(first + stage), stage, slots[stage]);
    copy_commit();
  }
  UpdateIndex update_index = index_of(first);
  UpdateInputs<Element> next = inputs_of(update_index);
  int next_slot = first + kUpdateStages < end ? slot_of(index_of(first + kUpdateStages)) : -1;

  int rates_of = -1;
  Vec4 rates[kUpdateRows];
  int stage = 0;
  for (int block = first; block < end; ++block) {
    const int channel = channel_of(update_index);
    if (update_index.first != rates_of) {
      rates_of = update_index.first;
#pragma unroll
      for (int row = 0; row < kUpdateRows; ++row) {
        rates[row] = load_state<true>(p.a + channel * kStateDim + n + row * kRowFloats);
      }
      const float bias = dt_bias_of(p.dt_bias, channel + own_offset);
      own_terms[thread] = make_float2(bias, p.d != nullptr ? p.d[channel + own_offset] : 0.0F);
#pragma unroll
      for (int row = 0; row < kUpdateRows; ++row) {
#pragma unroll
        for (int i = 0; i < kUpdateWidth; ++i) rates[row].v[i] = __fmul_rn(rates[row].v[i], kSsmLog2E);
      }
    }
    const UpdateInputs<Element> inputs = next;
    const UpdateIndex next_index = index_of(block + 1);
    if (block + 1 < end) next = inputs_of(next_index);
    const float own_x = to_float(inputs.x);
    const float own_dt = make_dt(to_float(inputs.dt), own_terms[thread].x, p.softplus, p.dt_min, p.dt_max);
    const float own_input = __fmul_rn(own_dt, own_x);
    const bool present = present_in(update_index) && inputs.slot >= 0;
    float* const states = states_at(channel, inputs.slot);
    float b[kUpdateWidth];
    float c[kUpdateWidth];
    unpack_elements<Element>(inputs.b, b);
    unpack_elements<Element>(inputs.c, c);
    copy_wait<kUpdateStages - 1>();
    float y[kUpdateRows];
#pragma unroll
    for (int row = 0; row < kUpdateRows; ++row) {
      const float dt = __shfl_sync(0xffffffffU, own_dt, row * kLanesOfRow, kLanes);
      const float input = __shfl_sync(0xffffffffU, own_input, row * kLanesOfRow, kLanes);
      Vec4 state = load_state<true>(&stages[stage][row][thread].x);
      y[row] = 0.0F;
#pragma unroll
      for (int i = 0; i < kUpdateWidth; ++i) {
        const float decay = exp2_approx(__fmul_rn(dt, rates[row].v[i]));
        state.v[i] = __fmaf_rn(decay, state.v[i], __fmul_rn(input, b[i]));
        y[row] = __fmaf_rn(c[i], state.v[i], y[row]);
      }
      if (present) store_state<true>(states + row * kRowFloats, state);
    }
    if (block + kUpdateStages < end) issue_state_loads(index_of(block + kUpdateStages), stage, next_slot);
    copy_commit();
    if (block + kUpdateStages + 1 < end) next_slot = slot_of(index_of(block + kUpdateStages + 1));
    stage = stage + 1 < kUpdateStages ? stage + 1 : 0;

    float value = sum_of_own_row<kLanes>(y, lane);
    if (p.d != nullptr) value = __fmaf_rn(own_terms[thread].y, own_x, value);
    if (p.z.data != nullptr) value = __fmul_rn(value, silu(to_float(inputs.gate)));
    if (inputs.slot < 0) value = 0.0F;  // padding
    if (present_in(update_index) && lane % kLanesOfRow == 0) {
      const std::int32_t own_at = (channel + own_offset) * static_cast<std::int32_t>(p.y_head_stride);
      static_cast<Element*>(p.y)[update_index.sequence * p.y_token_stride + own_at] = from_float<Element>(value);
    }
    update_index = next_index;
  }
}

namespace {

constexpr int kStepThreads = 128;
constexpr int kRows = 2;  // per lane group; with more rows, fewer warps have loads in flight
constexpr int kMaxLanes = 32;
// Min. blocks per CTA of the persistent kernel. With one, there is nothing to prefetch, and it is slower than the other
// kernel.
constexpr int kMinBlocksPerCta = 4;

// How many decays there are, and what they are.
enum class Decays {
  kStates,  // one for each state of each channel: exp(dt · A)
  kDt,      // one per head: exp(dt · A)
  kHeads,   // one per head: a log-decay instead of dt · A, and y is scaled
  kDims,    // one for each state of a head: also log-decays
};

// A lane's elements of its group's states, and the A or log-decays, B and C for them. All loads are issued before any
// is used.
template <class Element, Decays kDecays, bool kAligned>
struct LaneElements {
  Vec4 states[kRows];
  Vec4 rates[kDecays == Decays::kStates ? kRows : 1];  // with kDims, log-decays
  Elements<Element> b;
  Elements<Element> c;

  // Loads from state n on. The group's first row is of `head`.
  __device__ __forceinline__ LaneElements(const UpdateParams& p, const float* group_states, std::int64_t sequence,
                                          int head, int n) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      states[row] = load_state<kAligned>(group_states + std::int64_t{row} * p.state_dim + n);
    }
    if constexpr (kDecays == Decays::kStates) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        rates[row] = load_state<kAligned>(p.a + std::int64_t{head + row} * p.state_dim + n);
      }
    }
    if constexpr (kDecays == Decays::kDims)
      rates[0] = load_state<kAligned>(element_at<float>(p.dt, sequence, head) + n);
    const int shared_row = p.by_group_heads.quotient(head);
    b = load_elements<kAligned>(element_at<Element>(p.b, sequence, shared_row) + n);
    c = load_elements<kAligned>(element_at<Element>(p.c, sequence, shared_row) + n);
  }
};

template <int kLanes>
__host__ __device__ constexpr int blocks_of_sequence(int rows) {
  return (rows / kRows * kLanes + kStepThreads - 1) / kStepThreads;
}

// kLanes: lanes per group, at most a warp. kAligned: states, A or log-decays, B and C can be accessed as vectors of
// four. kDecays is a parameter of the template, because SSMs take 3 % longer with the branches.
template <class Element, Decays kDecays, int kLanes, bool kAligned>
__global__ void __launch_bounds__(kStepThreads) update_kernel(const __grid_constant__ UpdateParams p) {
  static_assert(kRows <= kLanes, "a lane makes dt of one row, and writes one");
  constexpr bool kStateDecays = kDecays == Decays::kStates;
  constexpr bool kLogDecays = kDecays == Decays::kHeads || kDecays == Decays::kDims;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int rows_of_sequence = p.heads * p.head_dim;
  const int batch_index = p.by_blocks.quotient(static_cast<std::int32_t>(blockIdx.x));
  const int block = static_cast<int>(blockIdx.x) - batch_index * blocks_of_sequence<kLanes>(rows_of_sequence);
  const int row_of_sequence = (block * kStepThreads + static_cast<int>(threadIdx.x)) / kLanes * kRows;
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
  LaneElements<Element, kDecays, kAligned> elements(p, states, sequence, first_head, has_states ? n : 0);
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
    dt[0] = kLogDecays ? 1.0F : dt_of(first_head);
#pragma unroll
    for (int row = 1; row < kRows; ++row) dt[row] = dt[0];
  }
  float decay = 0.0F;
  if constexpr (kDecays == Decays::kHeads) {
    const float log = p.decay == SsmDecay::kToken ? *element_at<float>(p.dt, sequence, first_head) : p.a[first_head];
    decay = exp2_approx(__fmul_rn(log, kSsmLog2E));
  } else if constexpr (kDecays == Decays::kDt) {
    decay = exp2_approx(__fmul_rn(dt[0], __fmul_rn(p.a[first_head], kSsmLog2E)));
  }

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
    float decays[kUpdateWidth];  // with kDims
    if constexpr (kDecays == Decays::kDims) {
#pragma unroll
      for (int i = 0; i < kUpdateWidth; ++i) {
        decays[i] = exp2_approx(__fmul_rn(elements.rates[0].v[i], kSsmLog2E));
      }
    }
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
        if constexpr (kDecays == Decays::kDims) decay = decays[i];
        state.v[i] = __fmaf_rn(decay, state.v[i], __fmul_rn(input, to_float(elements.b.v[i])));
        sum = __fmaf_rn(to_float(elements.c.v[i]), state.v[i], sum);
      }
      if (mine) y[row] = sum;
      if (mine) store_state<kAligned>(states + std::int64_t{row} * p.state_dim + n, state);
    }
    n += kLanes * kUpdateWidth;
    if (kLanes < kMaxLanes || n >= p.state_dim) break;  // with fewer lanes, each has one vector
    elements = LaneElements<Element, kDecays, kAligned>(p, states, sequence, first_head, n);
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
  if constexpr (kLogDecays) value = __fmul_rn(value, p.scale);
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

Decays decays_of(bool state_decays, SsmDecay decay) {
  if (state_decays) return Decays::kStates;
  if (decay == SsmDecay::kDim) return Decays::kDims;
  return decay == SsmDecay::kDt ? Decays::kDt : Decays::kHeads;
}

template <class Element, Decays kDecays, int kLanes, bool kAligned>
constexpr UpdateKernel update_kernel_of() {
  return {update_kernel<Element, kDecays, kLanes, kAligned>, blocks_of_sequence<kLanes>};
}

template <class Element, Decays kDecays, bool kAligned>
UpdateKernel choose_kernel(int state_dim) {
  const int vectors = state_dim / kUpdateWidth;
  if (vectors <= 4) return update_kernel_of<Element, kDecays, 4, kAligned>();
  if (vectors <= 16) return update_kernel_of<Element, kDecays, 16, kAligned>();
  return update_kernel_of<Element, kDecays, kMaxLanes, kAligned>();
}

template <class Element, bool kAligned>
UpdateKernel choose_kernel(Decays decays, int state_dim) {
  switch (decays) {
    case Decays::kStates:
      return choose_kernel<Element, Decays::kStates, kAligned>(state_dim);
    case Decays::kDt:
      return choose_kernel<Element, Decays::kDt, kAligned>(state_dim);
    default:
      return choose_kernel<Element, Decays::kHeads, kAligned>(state_dim);
  }
}

template <bool kAligned>
UpdateKernel choose_kernel(Dtype dtype, Decays decays, int state_dim) {
  // only selective scans have fp32
  if (dtype == Dtype::kF32) return choose_kernel<float, Decays::kStates, kAligned>(state_dim);
  // only bf16, and states of 64 and 128, have a decay per key dim (gla_missing())
  if (decays == Decays::kDims) {
    return state_dim == 64 ? update_kernel_of<__nv_bfloat16, Decays::kDims, 16, kAligned>()
                           : update_kernel_of<__nv_bfloat16, Decays::kDims, kMaxLanes, kAligned>();
  }
  return dtype == Dtype::kBf16 ? choose_kernel<__nv_bfloat16, kAligned>(decays, state_dim)
                               : choose_kernel<__half, kAligned>(decays, state_dim);
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

int load_update(Dtype dtype, bool state_decays, SsmDecay decay, int state_dim) {
  const Decays decays = decays_of(state_decays, decay);
  load_kernel(choose_kernel<true>(dtype, decays, state_dim).kernel);
  load_kernel(choose_kernel<false>(dtype, decays, state_dim).kernel);
  if (!has_persistent_kernel(state_decays, state_dim)) return 0;
  const PersistentKernel chosen = persistent_kernel_of(dtype, state_dim);
  load_kernel(chosen.kernel);
  return resident_ctas_of(chosen.kernel);
}

void update_states(const UpdateParams& given, Dtype dtype, bool state_decays, int resident_ctas, cudaStream_t stream) {
  UpdateParams params = given;
  const bool rates_aligned = state_decays ? params.rates_aligned : params.decay != SsmDecay::kDim || params.dt.aligned;
  const bool aligned = params.states_aligned && rates_aligned && params.b.aligned && params.c.aligned;
  if (aligned && has_persistent_kernel(state_decays, params.state_dim) && fits_32_bits(params)) {
    const PersistentKernel chosen = persistent_kernel_of(dtype, params.state_dim);
    if (block_count(params, chosen) >= kMinBlocksPerCta * resident_ctas) {
      return launch_persistent(params, chosen, resident_ctas, stream);
    }
  }
  const Decays decays = decays_of(state_decays, params.decay);
  const UpdateKernel chosen = aligned ? choose_kernel<true>(dtype, decays, params.state_dim)
                                      : choose_kernel<false>(dtype, decays, params.state_dim);
  const int blocks = chosen.blocks(params.heads * params.head_dim);
  params.by_blocks = Divider(blocks);
  chosen.kernel<<<static_cast<unsigned>(params.sequences * blocks), kStepThreads, 0, stream>>>(params);
  check_cuda(cudaGetLastError(), "the update of states");
}

}  // namespace ringattn::cuda
