// SPDX-License-Identifier: Apache-2.0
// A rank's side of a Scan: its rows of a job, and what they are compared with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "attention/scan.hpp"
#include "tests/support/scan_data.hpp"

namespace ringattn::testing {

// Few dims and all flags.
inline ScanSpec small_scan(int heads, bool selective) {
  ScanSpec spec;
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

// Inputs and what the kernel makes of all of them.
struct ScanCase {
  ScanData inputs;
  ScanResult expected;
};

inline ScanCase make_scan_case(const ScanSpec& spec, const std::vector<std::int64_t>& lengths, bool initial,
                               std::uint64_t seed) {
  ScanCase made{with_slow_decays(random_scan(spec, lengths, seed)), {}};
  if (initial) {
    std::mt19937_64 random(seed + 1);
    std::normal_distribution<float> normal;
    made.inputs.initial.assign(lengths.size(), std::vector<float>(made.inputs.state_floats()));
    for (auto& state : made.inputs.initial) std::ranges::generate(state, [&] { return normal(random); });
  }
  const ScanChoice choice = choose_kernel(spec, {"cpu", "auto"});
  made.expected = scan_with(*choice.row, made.inputs, {.threads = 2});
  return made;
}

inline ScanJob job_of(const ScanCase& given) {
  return {given.inputs.spec, given.inputs.lengths, !given.inputs.initial.empty(), true};
}

// One rank's rows and states, in host memory.
class ScanRank {
 public:
  ScanRank(const Scan& scan, int rank, const ScanCase& given) : scan_(scan), rank_(rank), given_(given) {
    const ScanSpec& spec = given.inputs.spec;
    x_ = shard(given.inputs.x, spec.heads * spec.head_dim);
    dt_ = shard(given.inputs.dt, spec.heads);
    b_ = shard(given.inputs.b, spec.groups * spec.state_dim);
    c_ = shard(given.inputs.c, spec.groups * spec.state_dim);
    z_ = shard(given.inputs.z, spec.heads * spec.head_dim);
    for (const std::int32_t s : scan.beginning()) {
      if (given.inputs.initial.empty()) break;
      const auto& state = given.inputs.initial[static_cast<std::size_t>(s)];
      initial_.insert(initial_.end(), state.begin(), state.end());
    }
    clear();
  }

  void clear() {
    y_.assign(x_.size(), std::byte{0xff});
    finals_.assign(scan_.ending().size() * given_.inputs.state_floats(), -1.0F);
  }

  ScanInputs inputs() const {
    const ScanSpec& spec = given_.inputs.spec;
    const auto view = [&](const std::vector<std::byte>& rows, int heads, int dims) {
      return dense_view(rows.data(), spec.dtype, tokens(), heads, dims);
    };
    ScanInputs inputs;
    inputs.x = view(x_, spec.heads, spec.head_dim);
    inputs.dt = view(dt_, spec.heads, 1);
    inputs.b = view(b_, spec.groups, spec.state_dim);
    inputs.c = view(c_, spec.groups, spec.state_dim);
    inputs.z = view(z_, spec.heads, spec.head_dim);
    inputs.a = given_.inputs.a.data();
    inputs.d = given_.inputs.d.data();
    inputs.dt_bias = given_.inputs.dt_bias.data();
    inputs.initial_states = initial_.empty() ? nullptr : initial_.data();
    return inputs;
  }
  ScanOutputs outputs() {
    const ScanSpec& spec = given_.inputs.spec;
    return {dense_view(static_cast<void*>(y_.data()), spec.dtype, tokens(), spec.heads, spec.head_dim),
            finals_.empty() ? nullptr : finals_.data()};
  }

  // How many of the rank's rows and states differ from those expected.
  std::int64_t differences() const {
    std::int64_t differ = y_ != shard(given_.expected.y, given_.inputs.spec.heads * given_.inputs.spec.head_dim);
    const std::size_t state = given_.inputs.state_floats();
    for (std::size_t i = 0; i < scan_.ending().size(); ++i) {
      const float* const expected = given_.expected.finals.data() + static_cast<std::size_t>(scan_.ending()[i]) * state;
      differ += std::memcmp(finals_.data() + i * state, expected, state * sizeof(float)) != 0;
    }
    return differ;
  }

 private:
  std::int64_t tokens() const { return scan_.layout().tokens(rank_); }
  std::vector<std::byte> shard(const std::vector<std::byte>& packed, int per_row) const {
    const auto bytes = static_cast<std::int64_t>(size_of(given_.inputs.spec.dtype)) * per_row;
    std::vector<std::byte> rows(static_cast<std::size_t>(tokens() * bytes));
    scan_.layout().shard(rank_, packed.data(), rows.data(), bytes);
    return rows;
  }

  const Scan& scan_;
  int rank_;
  const ScanCase& given_;
  std::vector<std::byte> x_, dt_, b_, c_, z_, y_;
  std::vector<float> initial_, finals_;
};

}  // namespace ringattn::testing
