// SPDX-License-Identifier: Apache-2.0
// The update of states with a rate each, by as many CTAs as the device holds at a time. A CTA loops over blocks, some
// channels of one sequence each: all sequences of its channels, then those of the next ones. So rates, biases and D are
// read when the channels change, and log2 e is in the rates. States come by asynchronous copies to shared memory,
// kUpdateStages blocks ahead; a thread reads what it has copied itself, so nothing is synchronized. What else belongs
// to a block is asked for one block ahead, into registers.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/scan/ssm_device.cuh"
#include "kernels/cuda/scan/state_pieces.cuh"

namespace ringattn::cuda {

inline constexpr int kUpdateThreads = 128;
inline constexpr int kUpdateRows = 4;    // of a group of lanes
inline constexpr int kUpdateStages = 3;  // of states in shared memory
// Channels that share B and C for certain. Groups of lanes have their rows in turn, so that each access of a warp is to
// whole lines.
inline constexpr int kUpdateRowUnit = 8;
inline constexpr int kUpdateGroups = kUpdateRowUnit / kUpdateRows;  // of a unit

template <class Element>
inline constexpr int kUpdateCtas = sizeof(Element) == 2 ? 8 : 6;  // of a multiprocessor

template <int kLanes>
inline constexpr int kUpdateChannels = kUpdateRows*(kUpdateThreads / kLanes);  // of a block

struct UpdateLoop {
  UpdateParams params;
  Divider by_sequences;
  std::int32_t blocks_each;   // of a CTA
  std::int32_t longer_loops;  // CTAs, the first ones, with one more
};

// Sums over a group's lanes of a row each: a lane gets that of row lane / (kLanes / kRows).
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
      const float given = upper ? y[i] : y[i + rows / 2];
      const float kept = upper ? y[i + rows / 2] : y[i];
      y[i] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffU, given, other));
    }
  }
  return y[0];
}

// Of a block: its first channel, and its sequence.
struct UpdateIndex {
  int first;
  int sequence;
};

// Where a sequence's heads lie within 2^31 elements of each other.
template <class Element>
__device__ __forceinline__ const Element* update_element(const SsmTensor& tensor, int sequence, int head) {
  return static_cast<const Element*>(tensor.data) + sequence * tensor.token_stride +
         head * static_cast<std::int32_t>(tensor.head_stride);
}

// What belongs to a block besides its states: of the lane's own row x, dt and z; B and C of the lane's piece.
template <class Element>
struct UpdateInputs {
  using Words = std::conditional_t<sizeof(Element) == 2, uint2, uint4>;  // a piece, not taken apart before its use

  Element x, dt, gate;
  Words b, c;
  std::int32_t slot;
};

template <class Element, class Words>
__device__ __forceinline__ void take_apart(const Words& words, float (&elements)[kUpdateWidth]) {
  static_assert(sizeof(Words) == kUpdateWidth * sizeof(Element));
  Elements<Element> parts;
  memcpy(&parts, &words, sizeof parts);
#pragma unroll
  for (int i = 0; i < kUpdateWidth; ++i) elements[i] = to_float(parts.v[i]);
}

// kLanes: of a group; a row of states is one piece of each of them.
template <class Element, int kLanes>
__global__ void __launch_bounds__(kUpdateThreads, kUpdateCtas<Element>)
    update_loop_kernel(const __grid_constant__ UpdateLoop update_loop) {
  static_assert(kUpdateRows <= kLanes && kLanes <= 32, "a lane has one row of its own, at most");
  constexpr int kStateDim = kLanes * kUpdateWidth;
  constexpr int kLanesOfRow = kLanes / kUpdateRows;      // whose own row is the same
  constexpr int kRowFloats = kUpdateGroups * kStateDim;  // from one of a group's rows to the next one
  const UpdateParams& p = update_loop.params;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes;
  const int group = thread / kLanes;
  const int unit_channel = group / kUpdateGroups * kUpdateRowUnit;
  const int own_offset = lane / kLanesOfRow * kUpdateGroups;
  const int n = lane * kUpdateWidth;

  __shared__ float4 stages[kUpdateStages][kUpdateRows][kUpdateThreads];
  __shared__ float2 own_terms[kUpdateThreads];  // the bias and D of a lane's own row: registers are for rates

  const auto place_of = [&](int block) -> UpdateIndex {
    const int channels = update_loop.by_sequences.quotient(block);
    return {channels * kUpdateChannels<kLanes>, block - channels * static_cast<std::int32_t>(p.sequences)};
  };
  const auto present_in = [&](const UpdateIndex& update_index) { return update_index.first + unit_channel < p.heads; };
  // The group's first channel: of the first unit where there are no more.
  const auto channel_of = [&](const UpdateIndex& update_index) {
    return (present_in(update_index) ? update_index.first + unit_channel : 0) + group % kUpdateGroups;
  };
  // By a shuffle, so that the compiler does not see that all lanes read one address: such a load is waited for at once.
  const auto slot_of = [&](const UpdateIndex& update_index) {
    const int sequence = __shfl_sync(0xffffffffU, update_index.sequence, 0);
    return p.slots != nullptr ? p.slots[sequence] : sequence;
  };
  const auto states_at = [&](int channel, int slot) {
    return p.states + channel * kStateDim + n + std::int64_t{slot} * (p.heads * kStateDim);
  };
  const auto ask = [&](const UpdateIndex& update_index, int stage, int slot) {
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
  const int first = cta * update_loop.blocks_each + (cta < update_loop.longer_loops ? cta : update_loop.longer_loops);
  const int end = first + update_loop.blocks_each + (cta < update_loop.longer_loops ? 1 : 0);
  int slots[kUpdateStages];
#pragma unroll
  for (int stage = 0; stage < kUpdateStages; ++stage) {
    slots[stage] = first + stage < end ? slot_of(place_of(first + stage)) : -1;
  }
#pragma unroll
  for (int stage = 0; stage < kUpdateStages; ++stage) {
    if (first + stage < end) ask(place_of(first + stage), stage, slots[stage]);
    copy_commit();
  }
  UpdateIndex update_index = place_of(first);
  UpdateInputs<Element> next = inputs_of(update_index);
  int asked_slot = first + kUpdateStages < end ? slot_of(place_of(first + kUpdateStages)) : -1;

  int rates_of = -1;
  Four rates[kUpdateRows];
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
    const UpdateIndex next_index = place_of(block + 1);
    if (block + 1 < end) next = inputs_of(next_index);
    const float own_x = to_float(inputs.x);
    const float own_dt = make_dt(to_float(inputs.dt), own_terms[thread].x, p.softplus, p.dt_min, p.dt_max);
    const float own_input = __fmul_rn(own_dt, own_x);
    const bool present = present_in(update_index) && inputs.slot >= 0;
    float* const states = states_at(channel, inputs.slot);
    float b[kUpdateWidth];
    float c[kUpdateWidth];
    take_apart<Element>(inputs.b, b);
    take_apart<Element>(inputs.c, c);
    copy_wait<kUpdateStages - 1>();
    float y[kUpdateRows];
#pragma unroll
    for (int row = 0; row < kUpdateRows; ++row) {
      const float dt = __shfl_sync(0xffffffffU, own_dt, row * kLanesOfRow, kLanes);
      const float input = __shfl_sync(0xffffffffU, own_input, row * kLanesOfRow, kLanes);
      Four state = load_state<true>(&stages[stage][row][thread].x);
      y[row] = 0.0F;
#pragma unroll
      for (int i = 0; i < kUpdateWidth; ++i) {
        const float decay = exp2_approx(__fmul_rn(dt, rates[row].v[i]));
        state.v[i] = __fmaf_rn(decay, state.v[i], __fmul_rn(input, b[i]));
        y[row] = __fmaf_rn(c[i], state.v[i], y[row]);
      }
      if (present) store_state<true>(states + row * kRowFloats, state);
    }
    if (block + kUpdateStages < end) ask(place_of(block + kUpdateStages), stage, asked_slot);
    copy_commit();
    if (block + kUpdateStages + 1 < end) asked_slot = slot_of(place_of(block + kUpdateStages + 1));
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
