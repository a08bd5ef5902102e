// SPDX-License-Identifier: Apache-2.0
// A rank's side of an Ssm: its rows of a job, and their expected values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "ops/ssm/ssm.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/random_elements.hpp"
#include "tests/support/ssm_data.hpp"

namespace ringattn::testing {

// Few dims and all flags.
inline SsmSpec small_ssm(int heads, bool selective) {
  SsmSpec spec;
  spec.dtype = Dtype::kBf16;
  spec.heads = heads;
  spec.head_dim = selective ? 1 : 8;
  spec.state_dim = 8;
  spec.state_decays = selective;
  spec.skip = true;
  spec.gate = true;
  spec.dt_bias = true;
  spec.dt_softplus = true;
  return spec;
}

// Inputs, and the kernel's result over all of them; with RoPE, over rows that were rotated before.
struct SsmCase {
  SsmData inputs;
  SsmResult expected;
};

inline SsmCase make_ssm_case(const SsmSpec& spec, const std::vector<std::int64_t>& lengths, bool initial,
                             std::uint64_t seed, const std::string& backend = "cpu",
                             const std::optional<RopeSpec>& rope = {}) {
  SsmCase made{with_slow_decays(random_ssm(spec, lengths, seed)), {}};
  if (initial) {
    std::mt19937_64 random(seed + 1);
    const Normal normal;
    made.inputs.initial.assign(lengths.size(), std::vector<float>(made.inputs.state_floats()));
    for (auto& state : made.inputs.initial) std::ranges::generate(state, [&] { return normal(random); });
  }
  const SsmChoice choice = choose_kernel(spec, {backend, "auto"});
  made.inputs.rope = rope;
  for (const std::int64_t length : lengths) {
    for (std::int64_t position = 0; rope && position < length; ++position) made.inputs.positions.push_back(position);
  }
  made.expected = run_ssm(*choice.row, rope ? rotated(made.inputs) : made.inputs, {.threads = 2});
  return made;
}

inline SsmJob job_of(const SsmCase& given) {
  SsmJob job{given.inputs.spec, given.inputs.lengths, !given.inputs.initial.empty(), true};
  job.rope = given.inputs.rope;
  return job;
}

// One rank's rows and states, in the memory of the SSM kernel's backend.
class SsmRank {
 public:
  SsmRank(Ssm& scan, int rank, const SsmCase& given)
      : scan_(scan),
        rank_(rank),
        given_(given),
        x_(placed(shard(given.inputs.x))),
        dt_(placed(shard(given.inputs.dt))),
        b_(placed(shard(given.inputs.b))),
        c_(placed(shard(given.inputs.c))),
        z_(placed(shard(given.inputs.z))),
        a_(placed(bytes_of(given.inputs.a))),
        d_(placed(bytes_of(given.inputs.d))),
        bias_(placed(bytes_of(given.inputs.dt_bias))),
        initial_(placed(bytes_of(initial_states()))),
        y_(array(y_bytes())),
        finals_(array(finals_bytes())) {}

  void clear() {
    y_.clear();
    finals_.clear();
  }

  SsmInputs inputs() const {
    const SsmSpec& spec = given_.inputs.spec;
    const SsmDtRows dt = dt_rows(spec);
    const auto view = [&](const DeviceArray& rows, Dtype dtype, int heads, int dims) {
      return dense_view(static_cast<const void*>(rows.data()), dtype, tokens(), heads, dims);
    };
    SsmInputs inputs;
    inputs.x = view(x_, spec.dtype, spec.heads, spec.head_dim);
    if (dt.dim > 0) inputs.dt = view(dt_, dt.dtype, spec.heads, dt.dim);
    inputs.b = view(b_, spec.dtype, spec.groups, spec.state_dim);
    inputs.c = view(c_, spec.dtype, spec.groups, spec.state_dim);
    if (spec.gate) inputs.z = view(z_, spec.dtype, spec.heads, spec.head_dim);
    if (!given_.inputs.a.empty()) inputs.a = a_.floats();
    if (spec.skip) inputs.d = d_.floats();
    if (spec.dt_bias) inputs.dt_bias = bias_.floats();
    inputs.initial_states = initial_states().empty() ? nullptr : initial_.floats();
    return inputs;
  }
  SsmOutputs outputs() {
    const SsmSpec& spec = given_.inputs.spec;
    return {dense_view(static_cast<void*>(y_.data()), spec.dtype, tokens(), spec.heads, spec.head_dim),
            finals_bytes() == 0 ? nullptr : finals_.floats()};
  }

  // How many of the rank's rows and states differ from those expected.
  std::int64_t differences() const {
    std::vector<std::byte> y = y_.read();
    y.resize(y_bytes());
    std::int64_t differ = y != shard(given_.expected.y);
    const std::vector<float> finals = finals_.read_floats();
    const std::size_t state = given_.inputs.state_floats();
    for (std::size_t i = 0; i < scan_.ending().size(); ++i) {
      const float* const expected = given_.expected.finals.data() + static_cast<std::size_t>(scan_.ending()[i]) * state;
      differ += std::memcmp(finals.data() + i * state, expected, state * sizeof(float)) != 0;
    }
    return differ;
  }

 private:
  std::int64_t tokens() const { return scan_.layout().tokens(rank_); }
  int heads() const { return given_.inputs.spec.heads; }
  std::size_t y_bytes() const {
    return static_cast<std::size_t>(tokens() * heads() * given_.inputs.spec.head_dim) *
           size_of(given_.inputs.spec.dtype);
  }
  std::size_t finals_bytes() const { return scan_.ending().size() * given_.inputs.state_floats() * sizeof(float); }
  std::vector<float> initial_states() const {
    std::vector<float> states;
    for (const std::int32_t s : scan_.beginning()) {
      if (given_.inputs.initial.empty()) break;
      const auto& state = given_.inputs.initial[static_cast<std::size_t>(s)];
      states.insert(states.end(), state.begin(), state.end());
    }
    return states;
  }
  static std::vector<std::byte> bytes_of(const std::vector<float>& values) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
    return {bytes, bytes + values.size() * sizeof(float)};
  }
  // Memory of at least one float, filled with NaN.
  DeviceArray array(std::size_t bytes) const { return {scan_.backend(), std::max(sizeof(float), bytes)}; }
  DeviceArray placed(const std::vector<std::byte>& bytes) const {
    DeviceArray memory = array(bytes.size());
    if (!bytes.empty()) memory.write(bytes);
    return memory;
  }
  // This rank's rows of an array of all tokens; empty if the array is absent.
  std::vector<std::byte> shard(const std::vector<std::byte>& packed) const {
    if (packed.empty()) return {};
    const auto bytes = static_cast<std::int64_t>(packed.size()) / given_.inputs.rows();
    std::vector<std::byte> rows(static_cast<std::size_t>(tokens() * bytes));
    scan_.layout().shard(rank_, packed.data(), rows.data(), bytes);
    return rows;
  }

  Ssm& scan_;
  int rank_;
  const SsmCase& given_;
  DeviceArray x_, dt_, b_, c_, z_, a_, d_, bias_, initial_, y_, finals_;
};

}  // namespace ringattn::testing
