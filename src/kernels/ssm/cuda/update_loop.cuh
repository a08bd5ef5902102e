// SPDX-License-Identifier: Apache-2.0
// Persistent kernel for the decode step of selective scans (one A per state). A CTA processes blocks, each some
// channels of one sequence: all sequences of its channels, then those of the next channels. So A, biases and D are
// loaded only when the channels change. States are loaded by cp.async to shared memory, kUpdateStages blocks ahead. A
// thread reads only what it has copied itself, so no synchronization is needed. Other inputs are loaded into registers
// one block ahead. Launched by update.cu.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/common/cuda/ptx.cuh"
#include "kernels/ssm/cuda/ssm_device.cuh"
#include "kernels/ssm/cuda/state_pieces.cuh"

namespace ringattn::cuda {

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
  // The group's first channel, or a channel of the first tile if the group has none.
  const auto channel_of = [&](const UpdateIndex& update_index) {
    return (present_in(update_index) ? update_index.first + tile_channel : 0) + group % kUpdateGroups;
  };
  // The shuffle hides from the compiler that all lanes read one address: it would wait for such a load at once.
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

}  // namespace ringattn::cuda
