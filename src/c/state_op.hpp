// SPDX-License-Identifier: Apache-2.0
// What the calls of ops with states share: ssm, linear_attention and gated_delta. Their objects have job(), layout(),
// beginning(), ending(), memory() and kernel().
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

namespace ringattn::c {

inline constexpr std::size_t kFirstSsmFacts = 48;  // size of the struct in its first interface version

template <typename Op>
void write_ssm_facts(const Op& op, int rank, ringattn_ssm_facts* facts) {
  write_struct("ringattn_ssm_facts",
               {0, op.layout().tokens(rank), std::ssize(op.beginning()), std::ssize(op.ending()), op.memory().total(),
                op.kernel().row->name.data()},
               facts, kFirstSsmFacts);
}

// Writes to arrays that are not null.
template <typename Op>
void write_sequences(const Op& op, std::int32_t* beginning, std::int32_t* ending) {
  if (beginning != nullptr) std::ranges::copy(op.beginning(), beginning);
  if (ending != nullptr) std::ranges::copy(op.ending(), ending);
}

using StateShape = std::array<std::int64_t, 3>;  // [heads, …] of a sequence's state

inline std::array<std::int64_t, 4> states_of(std::int64_t sequences, const StateShape& shape) {
  return {sequences, shape[0], shape[1], shape[2]};
}

// The initial states, fp32 [beginning sequences, …]; null for NULL.
template <typename Op>
const float* read_initial_states(const TensorReader& reader, const char* name, const DLTensor* tensor, const Op& op,
                                 const StateShape& shape) {
  return reader.numbers(name, tensor, states_of(std::ssize(op.beginning()), shape));
}

struct FinalStates {
  float* data = nullptr;
  const std::int32_t* slots = nullptr;
};

// The final states, fp32 [ending sequences, …]; with slots a pool of any number of states, which `rows` rows update.
template <typename Op>
FinalStates read_final_states(const TensorReader& reader, const DLTensor* tensor, const DLTensor* slots, const Op& op,
                              std::int64_t rows, const StateShape& shape) {
  if (slots == nullptr) {
    return {reader.numbers("final_states", tensor, states_of(std::ssize(op.ending()), shape)), nullptr};
  }
  constexpr DLDataType kFp32States[] = {{kDLFloat, 32, 1}};
  const Part pool = reader.part("final_states", tensor, kFp32States, states_of(-1, shape), true);
  const std::int32_t* const indices = reader.slots("slots", slots, rows, pool.lengths[0]);
  return {rows > 0 ? reinterpret_cast<float*>(pool.data) : nullptr, indices};
}

}  // namespace ringattn::c
