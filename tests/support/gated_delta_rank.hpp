// SPDX-License-Identifier: Apache-2.0
// A rank's side of a GatedDelta: its rows of a job, and their expected values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "ops/gated_delta/gated_delta.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/gated_delta_data.hpp"

namespace ringattn::testing {

// Inputs, and the kernel's result over all of them.
struct DeltaCase {
  GatedDeltaData data;
  GatedDeltaResult expected;
};

inline DeltaCase make_delta_case(const GatedDeltaSpec& spec, const std::vector<std::int64_t>& lengths, bool initial,
                                 std::uint64_t seed, const std::string& backend = "cpu") {
  DeltaCase made{random_gated_delta(spec, lengths, seed), {}};
  // Decays are so slow that states outlive segments; otherwise errors in the carried states would not be seen.
  for (float& log_decay : made.data.log_decay) log_decay *= 0.005F;
  for (float& beta : made.data.beta) beta *= 0.1F;
  if (initial) made.data = with_initial_states(made.data, seed + 1);
  made.expected = run_gated_delta(*choose_kernel(spec, {backend, "auto"}).row, made.data, {.threads = 2});
  return made;
}

inline GatedDeltaJob job_of(const DeltaCase& given) {
  return {given.data.spec, given.data.lengths, !given.data.initial.empty(), true, false};
}

// One rank's rows and states of a job, in the memory of the rule's backend.
class DeltaRank {
 public:
  DeltaRank(GatedDelta& rule, int rank, const DeltaCase& given)
      : given_(given),
        rule_(rule),
        rows_(rule.layout().packed_tokens(rank)),
        q_(placed(own(given.data.q))),
        k_(placed(own(given.data.k))),
        v_(placed(own(given.data.v))),
        log_decay_(placed(own(given.data.log_decay))),
        beta_(placed(own(given.data.beta))),
        initial_(placed(initial_states())),
        o_(rule.backend(), std::max<std::size_t>(1, own(given.data.v).size())),
        final_(rule.backend(), std::max<std::size_t>(1, rule.ending().size() * state()) * sizeof(float)) {}

  GatedDeltaInputs inputs() const {
    const GatedDeltaSpec& spec = given_.data.spec;
    const auto rows = [&](const DeviceArray& array, Dtype dtype, std::int64_t heads, std::int64_t dim) {
      return dense_view(static_cast<const void*>(array.data()), dtype, std::ssize(rows_), heads, dim);
    };
    GatedDeltaInputs inputs;
    inputs.q = rows(q_, spec.dtype, spec.key_heads, spec.key_dim);
    inputs.k = rows(k_, spec.dtype, spec.key_heads, spec.key_dim);
    inputs.v = rows(v_, spec.dtype, spec.value_heads, spec.value_dim);
    inputs.log_decay = rows(log_decay_, Dtype::kF32, spec.value_heads, spec.decay_dim());
    inputs.beta = rows(beta_, Dtype::kF32, spec.value_heads, 1);
    inputs.initial_states = initial_states().empty() ? nullptr : initial_.floats();
    return inputs;
  }
  GatedDeltaOutputs outputs() {
    const GatedDeltaSpec& spec = given_.data.spec;
    return {dense_view(static_cast<void*>(o_.data()), spec.dtype, std::ssize(rows_), spec.value_heads, spec.value_dim),
            rule_.ending().empty() ? nullptr : final_.floats()};
  }
  void clear() {
    o_.clear();
    final_.clear();
  }

  // Rows and states with other bits than the kernel's on all tokens.
  std::int64_t differences() const {
    std::vector<std::byte> o = o_.read();
    const std::vector<std::byte> expected = own(given_.expected.o);
    o.resize(expected.size());
    const std::size_t row_bytes = rows_.empty() ? 1 : expected.size() / rows_.size();
    std::int64_t differ = 0;
    for (std::size_t at = 0; at < expected.size(); at += row_bytes) {
      differ += std::memcmp(o.data() + at, expected.data() + at, row_bytes) != 0;
    }
    const std::vector<float> finals = final_.read_floats();
    for (std::size_t i = 0; i < rule_.ending().size(); ++i) {
      const float* const whole = given_.expected.finals.data() + static_cast<std::size_t>(rule_.ending()[i]) * state();
      differ += std::memcmp(finals.data() + i * state(), whole, state() * sizeof(float)) != 0;
    }
    return differ;
  }

 private:
  std::size_t state() const { return given_.data.state_size(); }
  template <typename Value>
  std::vector<Value> own(const std::vector<Value>& all) const {
    std::vector<Value> mine;
    const std::ptrdiff_t each = given_.data.rows() == 0 ? 0 : std::ssize(all) / given_.data.rows();
    for (const std::int64_t row : rows_) {
      mine.insert(mine.end(), all.begin() + row * each, all.begin() + (row + 1) * each);
    }
    return mine;
  }
  std::vector<float> initial_states() const {
    std::vector<float> states;
    for (const std::int32_t s : rule_.beginning()) {
      if (given_.data.initial.empty()) break;
      const std::vector<float>& initial = given_.data.initial[static_cast<std::size_t>(s)];
      states.insert(states.end(), initial.begin(), initial.end());
    }
    return states;
  }
  template <typename Value>
  DeviceArray placed(const std::vector<Value>& values) const {
    DeviceArray array(rule_.backend(), std::max<std::size_t>(1, values.size() * sizeof(Value)));
    const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
    if (!values.empty()) array.write({bytes, bytes + values.size() * sizeof(Value)});
    return array;
  }

  const DeltaCase& given_;
  GatedDelta& rule_;
  std::vector<std::int64_t> rows_;  // packed tokens
  DeviceArray q_, k_, v_, log_decay_, beta_, initial_, o_, final_;
};

}  // namespace ringattn::testing
