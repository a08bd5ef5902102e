// SPDX-License-Identifier: Apache-2.0
// The update of states with a rate each, by as many CTAs as the device holds at a time. A CTA walks over blocks, some
// channels of one sequence each: all sequences of its channels, then those of the next ones. So rates, biases and D are
// read when the channels change, and log2 e is in the rates. States come by asynchronous copies to shared memory,
// kWalkStages blocks ahead; a thread reads what it has copied itself, so nothing is synchronized. What else belongs to
// a block is asked for one block ahead, into registers.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/scan/scan_device.cuh"
#include "kernels/cuda/scan/state_pieces.cuh"

namespace ringattn::cuda {

inline constexpr int kWalkThreads = 128;
inline constexpr int kWalkRows = 4;    // of a group of lanes
inline constexpr int kWalkStages = 3;  // of states in shared memory
// Channels that share B and C for certain. Groups of lanes have their rows in turn, so that each access of a warp is to
// whole lines.
inline constexpr int kWalkUnit = 8;
inline constexpr int kWalkGroups = kWalkUnit / kWalkRows;  // of a unit

template <class Element>
inline constexpr int kWalkCtas = sizeof(Element) == 2 ? 8 : 6;  // of a multiprocessor

template <int kLanes>
inline constexpr int kWalkChannels = kWalkRows*(kWalkThreads / kLanes);  // of a block

struct UpdateWalk {
  UpdateParams params;
  Divider by_sequences;
  std::int32_t blocks_each;   // of a CTA
  std::int32_t longer_walks;  // CTAs, the first ones, with one more
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
struct WalkPlace {
  int first;
  int sequence;
};

// Where a sequence's heads lie within 2^31 elements of each other.
template <class Element>
__device__ __forceinline__ const Element* walk_element(const ScanTensor& tensor, int sequence, int head) {
  return static_cast<const Element*>(tensor.data) + sequence * tensor.token_stride +
         head * static_cast<std::int32_t>(tensor.head_stride);
}

// What belongs to a block besides its states: of the lane's own row x, dt and z; B and C of the lane's piece.
template <class Element>
struct WalkInputs {
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
__global__ void __launch_bounds__(kWalkThreads, kWalkCtas<Element>)
    walk_kernel(const __grid_constant__ UpdateWalk walk) {
  static_assert(kWalkRows <= kLanes && kLanes <= 32, "a lane has one row of its own, at most");
  constexpr int kStateDim = kLanes * kUpdateWidth;
  constexpr int kLanesOfRow = kLanes / kWalkRows;      // whose own row is the same
  constexpr int kRowFloats = kWalkGroups * kStateDim;  // from one of a group's rows to the next one
  const UpdateParams& p = walk.params;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kLanes;
  const int group = thread / kLanes;
  const int unit_channel = group / kWalkGroups * kWalkUnit;
  const int own_offset = lane / kLanesOfRow * kWalkGroups;
  const int n = lane * kUpdateWidth;

  __shared__ float4 stages[kWalkStages][kWalkRows][kWalkThreads];
  __shared__ float2 own_terms[kWalkThreads];  // the bias and D of a lane's own row: registers are for rates

  const auto place_of = [&](int block) -> WalkPlace {
    const int channels = walk.by_sequences.quotient(block);
    return {channels * kWalkChannels<kLanes>, block - channels * static_cast<std::int32_t>(p.sequences)};
  };
  const auto present_in = [&](const WalkPlace& place) { return place.first + unit_channel < p.heads; };
  // The group's first channel: of the first unit where there are no more.
  const auto channel_of = [&](const WalkPlace& place) {
    return (present_in(place) ? place.first + unit_channel : 0) + group % kWalkGroups;
  };
  // By a shuffle, so that the compiler does not see that all lanes read one address: such a load is waited for at once.
  const auto slot_of = [&](const WalkPlace& place) {
    const int sequence = __shfl_sync(0xffffffffU, place.sequence, 0);
    return p.slots != nullptr ? p.slots[sequence] : sequence;
  };
  const auto states_at = [&](int channel, int slot) {
    return p.states + channel * kStateDim + n + std::int64_t{slot} * (p.heads * kStateDim);
  };
  const auto ask = [&](const WalkPlace& place, int stage, int slot) {
    const bool present = present_in(place) && slot >= 0;
    const float* const from = states_at(channel_of(place), present ? slot : 0);
#pragma unroll
    for (int row = 0; row < kWalkRows; ++row) {
      copy_16(shared_address(&stages[stage][row][thread]), from + row * kRowFloats, present);
    }
  };
  const auto inputs_of = [&](const WalkPlace& place) {
    const int channel = channel_of(place);
    const int own = channel + own_offset;
    const int shared_row = p.by_group_heads.quotient(channel);
    using Words = typename WalkInputs<Element>::Words;
    const auto words_at = [&](const ScanTensor& tensor) {
      return *reinterpret_cast<const Words*>(walk_element<Element>(tensor, place.sequence, shared_row) + n);
    };
    WalkInputs<Element> inputs;
    inputs.x = *walk_element<Element>(p.x, place.sequence, own);
    inputs.dt = *walk_element<Element>(p.dt, place.sequence, own);
    inputs.gate = p.z.data != nullptr ? *walk_element<Element>(p.z, place.sequence, own) : Element{};
    inputs.b = words_at(p.b);
    inputs.c = words_at(p.c);
    inputs.slot = slot_of(place);
    return inputs;
  };

  const int cta = static_cast<int>(blockIdx.x);
  const int first = cta * walk.blocks_each + (cta < walk.longer_walks ? cta : walk.longer_walks);
  const int end = first + walk.blocks_each + (cta < walk.longer_walks ? 1 : 0);
  int slots[kWalkStages];
#pragma unroll
  for (int stage = 0; stage < kWalkStages; ++stage) {
    slots[stage] = first + stage < end ? slot_of(place_of(first + stage)) : -1;
  }
#pragma unroll
  for (int stage = 0; stage < kWalkStages; ++stage) {
    if (first + stage < end) ask(place_of(first + stage), stage, slots[stage]);
    copy_commit();
  }
  WalkPlace place = place_of(first);
  WalkInputs<Element> next = inputs_of(place);
  int asked_slot = first + kWalkStages < end ? slot_of(place_of(first + kWalkStages)) : -1;

  int rates_of = -1;
  Four rates[kWalkRows];
  int stage = 0;
  for (int block = first; block < end; ++block) {
    const int channel = channel_of(place);
    if (place.first != rates_of) {
      rates_of = place.first;
#pragma unroll
      for (int row = 0; row < kWalkRows; ++row) {
        rates[row] = load_state<true>(p.a + channel * kStateDim + n + row * kRowFloats);
      }
      const float bias = dt_bias_of(p.dt_bias, channel + own_offset);
      own_terms[thread] = make_float2(bias, p.d != nullptr ? p.d[channel + own_offset] : 0.0F);
#pragma unroll
      for (int row = 0; row < kWalkRows; ++row) {
#pragma unroll
        for (int i = 0; i < kUpdateWidth; ++i) rates[row].v[i] = __fmul_rn(rates[row].v[i], kScanLog2E);
      }
    }
    const WalkInputs<Element> inputs = next;
    const WalkPlace next_place = place_of(block + 1);
    if (block + 1 < end) next = inputs_of(next_place);
    const float own_x = to_float(inputs.x);
    const float own_dt = make_dt(to_float(inputs.dt), own_terms[thread].x, p.softplus, p.dt_least, p.dt_most);
    const float own_input = __fmul_rn(own_dt, own_x);
    const bool present = present_in(place) && inputs.slot >= 0;
    float* const states = states_at(channel, inputs.slot);
    float b[kUpdateWidth];
    float c[kUpdateWidth];
    take_apart<Element>(inputs.b, b);
    take_apart<Element>(inputs.c, c);
    copy_wait<kWalkStages - 1>();
    float y[kWalkRows];
#pragma unroll
    for (int row = 0; row < kWalkRows; ++row) {
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
    if (block + kWalkStages < end) ask(place_of(block + kWalkStages), stage, asked_slot);
    copy_commit();
    if (block + kWalkStages + 1 < end) asked_slot = slot_of(place_of(block + kWalkStages + 1));
    stage = stage + 1 < kWalkStages ? stage + 1 : 0;

    float value = sum_of_own_row<kLanes>(y, lane);
    if (p.d != nullptr) value = __fmaf_rn(own_terms[thread].y, own_x, value);
    if (p.z.data != nullptr) value = __fmul_rn(value, silu(to_float(inputs.gate)));
    if (inputs.slot < 0) value = 0.0F;  // padding
    if (present_in(place) && lane % kLanesOfRow == 0) {
      const std::int32_t own_at = (channel + own_offset) * static_cast<std::int32_t>(p.y_head_stride);
      static_cast<Element*>(p.y)[place.sequence * p.y_token_stride + own_at] = from_float<Element>(value);
    }
    place = next_place;
  }
}

}  // namespace ringattn::cuda
