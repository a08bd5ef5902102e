// SPDX-License-Identifier: Apache-2.0
// Every kernel of the gated delta rule: right by the fp64 recurrence, and with bits that no arrangement moves.
#include "kernels/gated_delta/gated_delta.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/gated_delta_data.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn {
inline void PrintTo(const testing::GatedDeltaRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

GatedDeltaSpec delta_spec(Dtype dtype, int key_heads, int value_heads, int key_dim, int value_dim, bool key_decays) {
  GatedDeltaSpec spec;
  spec.dtype = dtype;
  spec.key_heads = key_heads;
  spec.value_heads = value_heads;
  spec.key_dim = key_dim;
  spec.value_dim = value_dim;
  spec.key_decays = key_decays;
  return spec;
}

class GatedDeltaKernels : public ::testing::TestWithParam<GatedDeltaRow> {
 protected:
  void SetUp() override {
    const std::string reason = row().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }

  const GatedDeltaRow& row() const { return GetParam(); }
  bool can(const GatedDeltaSpec& spec) const { return row().missing(spec).empty(); }

  // The dims, dtypes and flags that the row supports, GDN and KDA.
  std::vector<GatedDeltaSpec> specs() const {
    std::vector<GatedDeltaSpec> able;
    for (const bool key_decays : {false, true}) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
        GatedDeltaSpec narrow = delta_spec(dtype, 1, 3, 24, 40, key_decays);
        if (!can(narrow)) narrow = delta_spec(dtype, 1, 3, 64, 32, key_decays);  // AMX: whole tiles
        narrow.qk_l2norm = true;
        narrow.scale = 0.5F;
        for (const GatedDeltaSpec& spec :
             {narrow, delta_spec(dtype, 1, 2, 128, 128, key_decays), delta_spec(dtype, 2, 2, 8, 16, key_decays)}) {
          if (dtype == Dtype::kF16 && spec.key_dim == 128) continue;  // as slow as fp32, and with the same code
          if (can(spec)) able.push_back(spec);
        }
      }
    }
    return able;
  }
  // The smallest of each rule, for long sequences.
  std::vector<GatedDeltaSpec> small() const {
    std::vector<GatedDeltaSpec> able;
    for (const bool key_decays : {false, true}) {
      for (const GatedDeltaSpec& spec :
           {delta_spec(Dtype::kF32, 1, 2, 16, 8, key_decays), delta_spec(Dtype::kBf16, 1, 2, 32, 32, key_decays),
            delta_spec(Dtype::kBf16, 1, 2, 128, 128, key_decays)}) {
        if (!can(spec)) continue;
        able.push_back(spec);
        break;
      }
    }
    return able;
  }
  void expect_accurate(const GatedDeltaData& data, const GatedDeltaArrangement& arrangement = {}) {
    EXPECT_EQ(check_gated_delta_accuracy(data, run_gated_delta(row(), data, arrangement), rounds_delta_factors(row())),
              "")
        << describe(data.spec);
  }

 private:
  std::int64_t checks_before_ = 0;
};

TEST_P(GatedDeltaKernels, AreAccurate) {
  for (const GatedDeltaSpec& spec : specs()) {
    expect_accurate(random_gated_delta(spec, {1, 63, 64, 65, 0, 200}, 11));
    expect_accurate(with_initial_states(random_gated_delta(spec, {130, 5}, 12), 13));
  }
}

TEST_P(GatedDeltaKernels, AreAccurateAtTheEdgesOfSegments) {
  for (const GatedDeltaSpec& spec : small()) {
    expect_accurate(random_gated_delta(spec, {2047, 2048, 2049, 1, 4500}, 21));
    // Without decays, so that the first segment is not forgotten.
    GatedDeltaData kept = with_initial_states(random_gated_delta(spec, {2049, 6200}, 22), 23);
    for (float& log_decay : kept.log_decay) log_decay *= 0.001F;
    for (float& beta : kept.beta) beta *= 0.05F;
    expect_accurate(kept, {.threads = 2, .finals = false});
    expect_accurate(kept);
  }
}

// Decays of 1 and 0, beta 0, 1 and 2, keys of zeros and of ones.
TEST_P(GatedDeltaKernels, TakeExtremesOfGates) {
  for (const GatedDeltaSpec& spec : small()) {
    GatedDeltaData data = with_initial_states(random_gated_delta(spec, {150, 2200}, 31), 32);
    data.spec.qk_l2norm = true;
    const std::int64_t dim = spec.decay_dim() * spec.value_heads;
    for (std::size_t i = 0; i < data.log_decay.size(); ++i) {
      const std::int64_t token = static_cast<std::int64_t>(i) / dim;
      if (token % 5 == 0) data.log_decay[i] = 0.0F;
      if (token % 37 == 0 && (!spec.key_decays || i % 3 == 0)) data.log_decay[i] = -kInfinity;
      if (token % 41 == 1) data.log_decay[i] = -1e30F;
      if (token / 64 == 1) data.log_decay[i] = -90.0F;
    }
    for (std::size_t i = 0; i < data.beta.size(); ++i) data.beta[i] = static_cast<float>(i % 3);
    const std::int64_t keys = std::int64_t{spec.key_heads} * spec.key_dim;
    for (std::int64_t row = 0; row < data.rows(); ++row) {
      if (row % 11 > 1) continue;
      for (std::int64_t d = 0; d < keys; ++d) {
        store_element(data.k.data() + static_cast<std::size_t>(row * keys + d) * size_of(spec.dtype), spec.dtype,
                      row % 11 == 0 ? 0.0F : 1.0F);
      }
    }
    const GatedDeltaResult result = run_gated_delta(row(), data);
    EXPECT_EQ(check_gated_delta_accuracy(data, result, rounds_delta_factors(row())), "") << describe(data.spec);
    for (const float value : result.finals) ASSERT_TRUE(std::isfinite(value));
  }
}

// Repeated tokens: the roundings of their factors are equal, and do not cancel.
TEST_P(GatedDeltaKernels, TakeEqualTokens) {
  std::vector<float> betas{0.3F, 0.7F, 1.7F};
  if (row().backend == "cpu") betas.push_back(1.9F);  // sm90_gated_delta rounds T, which makes M expand with such beta
  for (const GatedDeltaSpec& spec : small()) {
    for (const float beta : betas) {
      const std::int64_t tokens = beta > 1.8F ? 1000 : 100;
      GatedDeltaData data = random_gated_delta(spec, {tokens}, 41);
      data.spec.qk_l2norm = true;
      data.q = data.k;
      for (std::vector<std::byte>* rows : {&data.q, &data.k, &data.v}) {
        const std::size_t row_bytes = rows->size() / static_cast<std::size_t>(tokens);
        for (std::size_t at = row_bytes; at < rows->size(); at += row_bytes) {
          std::copy_n(rows->data(), row_bytes, &(*rows)[at]);
        }
      }
      std::ranges::fill(data.log_decay, 0.0F);
      std::ranges::fill(data.beta, beta);
      expect_accurate(data);
    }
  }
}

TEST_P(GatedDeltaKernels, DontDependOnTheArrangement) {
  for (const GatedDeltaSpec& spec : specs()) {
    const GatedDeltaData data = with_initial_states(random_gated_delta(spec, {100, 1, 300, 64}, 41), 42);
    const GatedDeltaResult whole = run_gated_delta(row(), data);
    for (const GatedDeltaArrangement& other : {GatedDeltaArrangement{.threads = 5, .strided = true},
                                               {.threads = 1, .heads_at_once = 1},
                                               {.threads = 2, .unaligned = true}}) {
      EXPECT_EQ(first_difference(data, run_gated_delta(row(), data, other), whole), "") << describe(spec);
    }
  }
}

TEST_P(GatedDeltaKernels, DontDependOnTheRunsOfLongSequences) {
  for (const GatedDeltaSpec& spec : small()) {
    const GatedDeltaData data = with_initial_states(random_gated_delta(spec, {5000, 2049, 2048, 4097}, 43), 44);
    const GatedDeltaResult whole = run_gated_delta(row(), data);
    for (const GatedDeltaArrangement& other : {GatedDeltaArrangement{.threads = 2, .cut = true},
                                               {.threads = 2, .cut = true, .heads_at_once = 1, .strided = true}}) {
      EXPECT_EQ(first_difference(data, run_gated_delta(row(), data, other), whole), "");
    }
    // M is not needed in the last segments then.
    EXPECT_EQ(run_gated_delta(row(), data, {.finals = false}).o, whole.o);
  }
}

// With fewer heads, kernels may divide the columns of a state among more threads or CTAs.
TEST_P(GatedDeltaKernels, DontDependOnTheNumberOfHeads) {
  GatedDeltaSpec spec = small().front();
  spec.key_heads = 4;
  spec.value_heads = 20;
  const GatedDeltaData data = with_initial_states(random_gated_delta(spec, {2 * 2048 + 9}, 45), 46);
  const GatedDeltaResult whole = run_gated_delta(row(), data);
  for (const int heads : {10, 5}) {
    EXPECT_EQ(first_difference(data, run_gated_delta(row(), data, {.threads = 2, .heads_at_once = heads}), whole), "")
        << heads;
  }
}

// A sequence's results are its own, and so are a head's: NaN stays in the sequence and in the heads that read it.
TEST_P(GatedDeltaKernels, KeepNanInItsSequenceAndHeads) {
  for (const GatedDeltaSpec& spec : small()) {
    const GatedDeltaData data = random_gated_delta(spec, {300, 2100, 77}, 51);
    const GatedDeltaResult whole = run_gated_delta(row(), data);
    GatedDeltaData spoiled = data;
    const std::int64_t token = data.row_of(1) + 100;
    spoiled.beta[static_cast<std::size_t>(token * spec.value_heads)] = std::numeric_limits<float>::quiet_NaN();
    const GatedDeltaResult result = run_gated_delta(row(), spoiled);
    const std::size_t row_bytes = static_cast<std::size_t>(spec.value_dim) * size_of(spec.dtype);
    for (std::int64_t at = 0; at < data.rows(); ++at) {
      for (int head = 0; head < spec.value_heads; ++head) {
        const std::int64_t in_sequence = at - data.row_of(1);
        const std::size_t offset = static_cast<std::size_t>(at * spec.value_heads + head) * row_bytes;
        const bool reached = head == 0 && in_sequence >= 100 && in_sequence < data.lengths[1];
        const bool beside = head == 0 && in_sequence >= 64 && in_sequence < 100;  // in its chunk
        if (reached) {
          ASSERT_TRUE(std::isnan(load_element(result.o.data() + offset, spec.dtype))) << at;
        } else if (!beside) {
          ASSERT_EQ(std::memcmp(result.o.data() + offset, whole.o.data() + offset, row_bytes), 0) << at << " " << head;
        }
      }
    }
    count_check();
  }
}

// Continued after a whole segment from its final state, a sequence has the bits of the whole one; elsewhere its values.
TEST_P(GatedDeltaKernels, GoOnFromAFinalState) {
  for (const GatedDeltaSpec& spec : small()) {
    const GatedDeltaData whole = random_gated_delta(spec, {5000}, 61);
    const GatedDeltaResult result = run_gated_delta(row(), whole);
    for (const std::int64_t cut : {std::int64_t{2048}, std::int64_t{4096}, std::int64_t{2148}}) {
      const GatedDeltaData first = whole.slice(0, 0, cut);
      GatedDeltaData rest = whole.slice(0, cut, 5000);
      GatedDeltaResult joined = run_gated_delta(row(), first);
      rest.initial = {joined.finals};
      const GatedDeltaResult end = run_gated_delta(row(), rest);
      joined.o.insert(joined.o.end(), end.o.begin(), end.o.end());
      joined.finals = end.finals;
      if (cut % kSegmentTokens == 0) {
        EXPECT_EQ(first_difference(whole, joined, result), "") << cut;
      } else {
        EXPECT_EQ(check_gated_delta_accuracy(whole, joined, rounds_delta_factors(row())), "") << cut;
      }
    }
  }
}

TEST_P(GatedDeltaKernels, UpdateTokenByToken) {
  for (const GatedDeltaSpec& spec : specs()) {
    const GatedDeltaData data = with_initial_states(random_gated_delta(spec, {70, 70, 70}, 71), 72);
    const GatedDeltaResult result = update_gated_delta(row(), data);
    EXPECT_EQ(check_gated_delta_accuracy(data, result, rounds_delta_factors(row())), "") << describe(spec);
    EXPECT_EQ(first_difference(data, update_gated_delta(row(), data, 3), result), "");
  }
}

TEST_P(GatedDeltaKernels, UpdateSlotsOfAPool) {
  for (const GatedDeltaSpec& spec : small()) {
    const GatedDeltaData data = with_initial_states(random_gated_delta(spec, {3, 3, 3}, 73), 74);
    const GatedDeltaResult plain = update_gated_delta(row(), data);
    const GatedDeltaResult pooled = update_gated_delta(row(), data, 2, {4, -1, 0});
    const std::size_t state = data.state_size() * sizeof(float);
    EXPECT_EQ(std::memcmp(pooled.finals.data() + 4 * data.state_size(), plain.finals.data(), state), 0);
    EXPECT_EQ(std::memcmp(pooled.finals.data(), plain.finals.data() + 2 * data.state_size(), state), 0);
    EXPECT_TRUE(std::isnan(pooled.finals[data.state_size()]));
    const std::size_t rows = plain.o.size() / 3;
    EXPECT_EQ(std::memcmp(pooled.o.data(), plain.o.data(), rows), 0);
    EXPECT_EQ(std::vector<std::byte>(rows),
              std::vector<std::byte>(pooled.o.begin() + static_cast<std::ptrdiff_t>(rows),
                                     pooled.o.begin() + static_cast<std::ptrdiff_t>(2 * rows)));
    count_check();
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, GatedDeltaKernels,
                         ::testing::ValuesIn(kernel_table<GatedDeltaSpec>().begin(),
                                             kernel_table<GatedDeltaSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(GatedDelta, RefusesWhatContradictsItself) {
  GatedDeltaSpec spec = delta_spec(Dtype::kBf16, 3, 4, 128, 128, false);
  EXPECT_EQ(error_of([&] { check_gated_delta(spec); }).code(), ErrorCode::kUsage);
  spec.key_heads = 0;
  EXPECT_EQ(error_of([&] { check_gated_delta(spec); }).code(), ErrorCode::kUsage);
}

TEST(GatedDelta, SaysWhatASpecNeeds) {
  GatedDeltaSpec spec = delta_spec(Dtype::kBf16, 16, 64, 128, 128, false);
  EXPECT_EQ(describe(spec), "GDN, bf16, 64 value heads of 128, 16 key heads of 128");
  spec.key_decays = spec.qk_l2norm = true;
  spec.scale = 0.5F;
  EXPECT_EQ(describe(spec), "KDA, bf16, 64 value heads of 128, 16 key heads of 128, qk norm, scale 0.5");
}

// What nobody reads is not computed: M of a first segment without an initial state, and U where nothing follows.
TEST(GatedDelta, KnowsWhatASegmentNeeds) {
  const float state = 0.0F;
  float target = 0.0F;
  GatedDeltaRun run{0, 4097, 0, nullptr, nullptr, 0};
  EXPECT_EQ(run.segments(), 3);
  EXPECT_TRUE(run.needs_state(1) && run.needs_transition(1));
  EXPECT_TRUE(run.needs_state(0) && !run.needs_transition(0));
  EXPECT_FALSE(run.needs_state(2) || run.needs_transition(2));
  run.initial = &state;
  run.final = &target;
  EXPECT_TRUE(run.needs_transition(0) && run.needs_transition(2));
}

}  // namespace
}  // namespace ringattn::testing
