// SPDX-License-Identifier: Apache-2.0
// Every row of the SSD backward table: right by the fp64 oracle, and with bits that no arrangement moves.
#include "kernels/ssd_backward/ssd_backward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <ostream>
#include <vector>

#include "tests/kernels/ssm/ssm_row_test.hpp"
#include "tests/support/special_values.hpp"
#include "tests/support/ssd_backward_data.hpp"

namespace ringattn {
inline void PrintTo(const testing::SsdBackwardRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

class SsdBackward : public ::testing::TestWithParam<SsdBackwardRow> {
 protected:
  void SetUp() override {
    const std::string reason = row().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }

  const SsdBackwardRow& row() const { return GetParam(); }
  bool can(const SsdBackwardSpec& spec) const { return row().missing(spec).empty(); }
  bool rounds_factors() const { return row().backend != "cpu"; }

  // Specs of all dims, dtypes and flags that the row supports, with gradients in the dtype and in fp32.
  std::vector<SsdBackwardSpec> specs() const {
    std::vector<SsdBackwardSpec> able;
    const auto add = [&](SsmSpec spec, int flags, Dtype gradients) {
      spec.skip = (flags & 1) != 0;
      spec.gate = (flags & 2) != 0;
      spec.dt_bias = (flags & 4) != 0;
      spec.dt_softplus = (flags & 8) != 0;
      if (spec.dt_bias && !spec.dt_softplus) spec.dt_min = 0.0F;
      if (can({spec, gradients})) able.push_back({spec, gradients});
    };
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      add(ssm_spec(dtype, 2, 64, 128), 15, dtype);
      add(ssm_spec(dtype, 18, 8, 16, 2), 0, Dtype::kF32);  // a set of heads and a rest in each group
      add(ssm_spec(dtype, 5, 40, 24), 6, dtype);           // widths that are no whole vectors
      add(ssm_spec(dtype, 9, 64, 64), 9, Dtype::kF32);
      add(ssm_spec(dtype, 2, 128, 64, 2), 3, Dtype::kF32);
    }
    return able;
  }
  // The smallest that the row can do, for long sequences.
  SsdBackwardSpec small() const {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
      for (const SsmSpec& spec : {ssm_spec(dtype, 1, 8, 8), ssm_spec(dtype, 1, 64, 16), ssm_spec(dtype, 1, 64, 64)}) {
        if (can({spec, Dtype::kF32})) return {spec, Dtype::kF32};
      }
    }
    ADD_FAILURE() << "no small spec for " << row().name;
    return {};
  }

  // Against the oracle, and the same bits in other arrangements.
  void check(const SsdBackwardData& inputs, const std::vector<SsmArrangement>& others = {}) {
    SCOPED_TRACE(describe(inputs.spec()));
    const SsdBackwardResult result = run_ssd_backward(row(), inputs);
    ASSERT_EQ(check_ssd_gradients(inputs, result, rounds_factors()), "");
    for (const SsmArrangement& other : others) {
      ASSERT_TRUE(run_ssd_backward(row(), inputs, other).same_bits(result))
          << "threads " << other.threads << ", sets " << other.heads_at_once << ", strided " << other.strided
          << ", unaligned " << other.unaligned << ", cut " << other.cut;
    }
  }

 private:
  std::int64_t checks_before_ = 0;
};

TEST_P(SsdBackward, IsAccurateAndInvariant) {
  for (const SsdBackwardSpec& spec : specs()) {
    check(random_ssd_backward(spec, {1, 63, 0, 65}, true, 11),
          {{.threads = 3, .strided = true}, {.threads = 2, .heads_at_once = 1, .unaligned = true}});
    check(random_ssd_backward(spec, {100}, false, 12));
  }
}

TEST_P(SsdBackward, EdgesOfSegments) {
  SsdBackwardSpec spec = small();
  check(random_ssd_backward(spec, {2047, 2049, 1}, true, 21), {{.threads = 2, .strided = true}});
  spec.forward.skip = spec.forward.gate = spec.forward.dt_bias = spec.forward.dt_softplus = true;
  spec.forward.heads = 3;
  check(random_ssd_backward(spec, {2050}, true, 22), {{.heads_at_once = 1}});
}

TEST_P(SsdBackward, EdgesOfSuperSegments) {
  SsdBackwardData inputs = random_ssd_backward(small(), {65'537, 3, 70'000}, true, 31);
  inputs.ssm = with_slow_decays(inputs.ssm);
  check(inputs, {{.threads = 2, .cut = true}, {.threads = 3, .cut = true, .strided = true}});
}

TEST_P(SsdBackward, OtherSequencesDontMatter) {
  for (const SsdBackwardSpec& spec : specs()) {
    const SsdBackwardData inputs = random_ssd_backward(spec, {100, 70, 33}, true, 41);
    const SsdBackwardResult together = run_ssd_backward(row(), inputs);
    for (std::size_t s = 0; s < 3; ++s) {
      EXPECT_TRUE(run_ssd_backward(row(), sequence_of(inputs, s)).same_bits(sequence_of(inputs, together, s)))
          << describe(spec);
    }
  }
}

// More runs than a launch takes of them.
TEST_P(SsdBackward, ManySequences) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < 150; ++i) lengths.push_back(1 + i * 37 % 130);
  check(random_ssd_backward(small(), lengths, true, 45), {{.threads = 2, .strided = true}});
}

TEST_P(SsdBackward, NoGradientWhereDtIsAtItsLimits) {
  for (SsdBackwardSpec spec : specs()) {
    spec.forward.dt_min = 0.0625F;
    spec.forward.dt_max = 0.125F;
    SsdBackwardData inputs = random_ssd_backward(spec, {70}, true, 51);
    for (float& bias : inputs.ssm.dt_bias) bias *= 0.1F;
    const bool plain = !spec.forward.dt_bias && !spec.forward.dt_softplus;
    if (plain) inputs.ssm.set_dt(7, 0, spec.forward.dt_min);  // a limit itself is within the limits
    const SsdBackwardResult result = run_ssd_backward(row(), inputs);
    EXPECT_EQ(check_ssd_gradients(inputs, result, rounds_factors()), "") << describe(spec);
    std::int64_t zeros = 0;
    const auto count = static_cast<std::int64_t>(result.ddt.size() / size_of(spec.gradients));
    const auto ddt = [&](std::int64_t i) {
      return load_element(result.ddt.data() + static_cast<std::size_t>(i) * size_of(spec.gradients), spec.gradients);
    };
    for (std::int64_t i = 0; i < count; ++i) zeros += ddt(i) == 0.0F ? 1 : 0;
    EXPECT_GT(zeros, count / 4) << describe(spec);
    EXPECT_LT(zeros, count) << describe(spec);
    if (plain) {
      EXPECT_NE(ddt(std::int64_t{7} * spec.forward.heads), 0.0F);
    }
  }
}

// Tokens that clear the state, among others: no gradient crosses them, also of the log-decay.
TEST_P(SsdBackward, ForgottenStates) {
  for (SsdBackwardSpec spec : specs()) {
    if (spec.forward.dtype == Dtype::kF16) continue;  // it has no dt that clears a state
    spec.forward.dt_softplus = spec.forward.dt_bias = false;
    for (const float huge : {1e4F, 1e18F}) {
      SsdBackwardData inputs = random_ssd_backward(spec, {100}, true, 61);
      for (std::int64_t t = 0; t < 100; t += 5) {
        for (int head = 0; head < spec.forward.heads; ++head) {
          inputs.ssm.set_dt(t, head, huge);
          for (int p = 0; p < spec.forward.head_dim; ++p) {  // small, so that what follows is not drowned
            inputs.ssm.set(inputs.ssm.x, spec.forward.heads, spec.forward.head_dim, t, head, p, 1.0F / huge);
          }
        }
      }
      EXPECT_EQ(check_ssd_gradients(inputs, run_ssd_backward(row(), inputs), rounds_factors()), "")
          << describe(spec) << huge;
    }
  }
}

TEST_P(SsdBackward, NanStaysInItsSequence) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const SsdBackwardSpec& spec : specs()) {
    SsdBackwardData clean = random_ssd_backward(spec, {100, 150, 100}, true, 71);
    clean.ssm.set_dt(170, 0, 1.0F);  // within its limits
    const SsdBackwardResult expected = run_ssd_backward(row(), clean);
    for (const int planted : {0, 1, 2, 3}) {
      SsdBackwardData inputs = clean;
      if (planted == 0) inputs.ssm.set_x(170, 0, nan);
      if (planted == 1) inputs.ssm.set_dt(170, 0, nan);
      if (planted == 2) inputs.ssm.set(inputs.dy, spec.forward.heads, spec.forward.head_dim, 170, 0, 0, nan);
      if (planted == 3) inputs.final_gradients[1][0] = nan;
      const SsdBackwardResult result = run_ssd_backward(row(), inputs, {.threads = 2});
      for (const std::size_t s : {0U, 2U}) {
        EXPECT_TRUE(sequence_of(inputs, result, s).same_bits(sequence_of(inputs, expected, s))) << planted;
      }
      // It is not lost: the planted element's own head forgets nothing in so few tokens.
      const SsdBackwardResult own = sequence_of(inputs, result, 1);
      const auto element = [&](const std::vector<std::byte>& rows, std::int64_t index) {
        return load_element(rows.data() + static_cast<std::size_t>(index) * size_of(spec.gradients), spec.gradients);
      };
      const std::int64_t token = 70;
      const float reached = planted < 2    ? element(own.ddt, token * spec.forward.heads)
                            : planted == 2 ? element(own.dc, token * spec.forward.groups * spec.forward.state_dim)
                                           : own.initial_gradients[0];
      EXPECT_TRUE(std::isnan(reached)) << planted;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, SsdBackward,
                         ::testing::ValuesIn(kernel_table<SsdBackwardSpec>().begin(),
                                             kernel_table<SsdBackwardSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

// silu is z above and 0 below: dz at ±∞ is that of a z far away, and not ∞ · 0. Its oracle's, too.
TEST(CpuSsdBackward, SlopeOfInfiniteGates) {
  SsdBackwardSpec spec{ssm_spec(Dtype::kF32, 2, 8, 8), Dtype::kF32};
  spec.forward.gate = true;
  constexpr std::size_t kAbove = (30 * 2 + 1) * 8 + 3;  // of token 30, head 1
  constexpr std::size_t kBelow = kAbove + 1;
  const auto inputs_of = [&](float above, float below) {
    SsdBackwardData inputs = random_ssd_backward(spec, {40}, false, 81);
    inputs.ssm.set(inputs.ssm.z, 2, 8, 30, 1, 3, above);
    inputs.ssm.set(inputs.ssm.z, 2, 8, 30, 1, 4, below);
    return inputs;
  };
  const SsdBackwardData infinite = inputs_of(kInfinity, -kInfinity);
  const SsdBackwardData large = inputs_of(100.0F, -1000.0F);
  const SsdBackwardRow& cpu = *choose_kernel(spec, {"cpu", "auto"}).row;
  const SsdBackwardResult made = run_ssd_backward(cpu, infinite);
  const SsdBackwardResult expected = run_ssd_backward(cpu, large);
  EXPECT_EQ(check_ssd_gradients(large, expected, kSsmTerm), "");
  const auto dz = [](const SsdBackwardResult& result, std::size_t at) {
    return load_element(result.dz.data() + at * sizeof(float), Dtype::kF32);
  };
  EXPECT_EQ(dz(made, kAbove), dz(expected, kAbove));
  EXPECT_NE(dz(made, kAbove), 0.0F);
  EXPECT_EQ(dz(made, kBelow), 0.0F);
  const auto oracle = [&](const SsdBackwardData& inputs) {
    return oracle_ssd_backward(spec.forward, inputs.task(), 0, 40, {}, {}, OracleTerms::kSigned).dz;
  };
  EXPECT_EQ(oracle(infinite)[kAbove], oracle(large)[kAbove]);
  EXPECT_EQ(oracle(infinite)[kBelow], 0.0);
}

TEST(SsdBackwardSpecs, AreDescribedAndRefused) {
  SsdBackwardSpec spec{ssm_spec(Dtype::kBf16, 80, 64, 128), Dtype::kF32};
  EXPECT_EQ(describe(spec), "backward of SSD, bf16, 80 heads of 64, state 128, 1 group, gradients in fp32");
  EXPECT_TRUE(missing_in_ssd_backward(spec).empty());
  spec.gradients = Dtype::kF16;
  EXPECT_EQ(missing_in_ssd_backward(spec).size(), 1U);
  EXPECT_EQ(missing_in_ssd_backward({selective_spec(Dtype::kF32, 16, 8), Dtype::kF32}),
            std::vector<std::string>{"a decay for each state (supported: a decay per head)"});
}

TEST(SsdBackwardSpecs, SetsOfHeadsStayInTheirGroup) {
  const std::vector<HeadRange> sets = head_sets(ssm_spec(Dtype::kF32, 18, 8, 8, 2), 8);
  ASSERT_EQ(sets.size(), 4U);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(sets[i].first, (std::vector<int>{0, 8, 9, 17})[i]);
    EXPECT_EQ(sets[i].count, (std::vector<int>{8, 1, 8, 1})[i]);
  }
}

}  // namespace
}  // namespace ringattn::testing
