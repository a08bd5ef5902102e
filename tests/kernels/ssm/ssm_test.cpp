// SPDX-License-Identifier: Apache-2.0
// Every row of the SSM table: right by the fp64 oracle and by exact results, and with bits that no arrangement
// moves.
#include "kernels/ssm/ssm.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/error.hpp"
#include "kernels/common/cpu/amx.hpp"
#include "kernels/rope/rope_frequencies.hpp"
#include "tests/kernels/ssm/ssm_row_test.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

class SsmKernels : public SsmRowTest {
 protected:
  bool rounded() const { return rounds_factors(row()); }
  SsmTolerance tolerance() const { return {rounded() ? kRoundedSsmTerm : kSsmTerm, kSsmTerm}; }
  void expect_accurate(const SsmData& inputs, const SsmArrangement& arrangement = {}) {
    EXPECT_EQ(check_ssm_accuracy(inputs, run_ssm(row(), inputs, arrangement), tolerance()), "")
        << describe(inputs.spec);
  }
};

SsmData with_initial(SsmData inputs, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  inputs.initial.assign(inputs.lengths.size(), std::vector<float>(inputs.state_floats()));
  for (auto& state : inputs.initial) std::ranges::generate(state, [&] { return normal(random); });
  return inputs;
}

// x, B and C of ones, dt 1 and A 0: y is state_dim times the number of tokens so far, exactly.
SsmData counting(const SsmSpec& spec, const std::vector<std::int64_t>& lengths) {
  SsmData inputs = random_ssm(spec, {}, 1);
  inputs.lengths = lengths;
  const auto ones = [&](std::vector<std::byte>& array, std::int64_t per_row) {
    array.resize(static_cast<std::size_t>(inputs.rows() * per_row) * size_of(spec.dtype));
    for (std::size_t at = 0; at < array.size(); at += size_of(spec.dtype)) {
      store_element(array.data() + at, spec.dtype, 1.0F);
    }
  };
  ones(inputs.x, std::int64_t{spec.heads} * spec.head_dim);
  if (spec.decay == SsmDecay::kDt) {
    ones(inputs.dt, spec.heads);
  } else {
    inputs.dt.assign(static_cast<std::size_t>(inputs.rows()) * inputs.dt_row_bytes(), std::byte{0});
  }
  ones(inputs.b, std::int64_t{spec.groups} * spec.state_dim);
  ones(inputs.c, std::int64_t{spec.groups} * spec.state_dim);
  std::ranges::fill(inputs.a, 0.0F);
  return inputs;
}

bool is_zero(std::byte value) { return value == std::byte{0}; }

float y_at(const SsmResult& result, Dtype dtype, std::int64_t index) {
  return load_element(result.y.data() + static_cast<std::size_t>(index) * size_of(dtype), dtype);
}

// Whether y is this count: exactly, or as a 16-bit type has it, whose kernels may round a state to 16 bits or more.
bool is_count(float y, Dtype dtype, float count, bool state_rounded) {
  const float lost = state_rounded ? 0x1p-8F : 0x1p-15F;
  return dtype == Dtype::kF32 ? y == count : std::fabs(y - count) <= count * (0x1p-8F + lost);
}

TEST_P(SsmKernels, AreAccurate) {
  for (const SsmSpec& spec : specs()) {
    expect_accurate(random_ssm(spec, {1, 63, 64, 65, 0, 200}, 11));
    expect_accurate(with_initial(random_ssm(spec, {130, 5}, 12), 13));
  }
}

TEST_P(SsmKernels, AreAccurateAtTheEdgesOfSegments) {
  const SsmSpec spec = small();
  expect_accurate(random_ssm(spec, {2047, 2048, 2049, 1, 4500}, 21));
  expect_accurate(with_initial(random_ssm(small(Dtype::kBf16), {2049, 6200}, 22), 23), {.threads = 2});
}

// What a kernel keeps of chunks comes round many times, for heads side by side, with all that a row can have.
TEST_P(SsmKernels, AreAccurateOverManyChunksOfManyHeads) {
  for (const SsmSpec& spec : specs()) {
    const bool all_flags = spec.skip && spec.gate;
    if (spec.dtype != Dtype::kBf16 || (!all_flags && spec.decay != SsmDecay::kDim)) continue;
    const SsmData inputs = random_ssm(spec, {2111, 449}, 25);
    expect_accurate(inputs);
    const SsmResult whole = run_ssm(row(), inputs);
    for (const SsmArrangement& other : {SsmArrangement{.heads_at_once = 1}, {.unaligned = true}}) {
      EXPECT_EQ(first_difference(inputs, run_ssm(row(), inputs, other), whole), "") << describe(spec);
    }
  }
}

TEST_P(SsmKernels, AreAccurateAtTheEdgesOfSuperSegments) {
  const SsmSpec spec = small();
  expect_accurate(with_initial(with_slow_decays(random_ssm(spec, {65'535, 65'537, 3}, 31)), 32), {.threads = 2});
  expect_accurate(random_ssm(spec, {65'537}, 33), {.threads = 2});
}

TEST_P(SsmKernels, CountExactly) {
  const SsmSpec spec = small();
  const std::vector<std::int64_t> lengths{1, 64, 2049, 65'536, 200'001};
  const SsmData inputs = counting(spec, lengths);
  const SsmResult result = run_ssm(row(), inputs, {.threads = 2});
  const std::int64_t width = std::int64_t{spec.heads} * spec.head_dim;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < lengths[s] * width; ++i) {
      const auto expected = static_cast<float>(spec.state_dim * (i / width + 1));
      const float y = y_at(result, spec.dtype, inputs.row_of(s) * width + i);
      if (is_count(y, spec.dtype, expected, rounded())) continue;
      if (wrong++ == 0) {
        ADD_FAILURE() << "sequence " << s << ", token " << i / width << ", dim " << i % width << " is " << y << ", not "
                      << expected;
      }
    }
    EXPECT_EQ(wrong, 0) << "sequence " << s;
    const float* const final = result.finals.data() + s * inputs.state_floats();
    EXPECT_TRUE(std::all_of(final, final + inputs.state_floats(),
                            [&](float value) { return value == static_cast<float>(lengths[s]); }));
    count_check();
  }
}

TEST_P(SsmKernels, DontDependOnTheArrangement) {
  std::vector<SsmSpec> all = specs();
  for (const SsmSpec& spec : all) {
    const SsmData inputs = with_initial(random_ssm(spec, {100, 1, 300, 64}, 41), 42);
    const SsmResult whole = run_ssm(row(), inputs);
    for (const SsmArrangement& other : {SsmArrangement{.threads = 2},
                                        {.threads = 5, .strided = true},
                                        {.threads = 1, .heads_at_once = 1},
                                        {.threads = 2, .heads_at_once = 2},
                                        {.unaligned = true}}) {
      EXPECT_EQ(first_difference(inputs, run_ssm(row(), inputs, other), whole), "") << describe(spec);
    }
  }
}

TEST_P(SsmKernels, DontDependOnTheArrangementOfLongSequences) {
  const SsmData inputs = with_initial(with_slow_decays(random_ssm(small(), {140'000, 2049, 65'536, 131'073}, 43)), 44);
  const SsmResult whole = run_ssm(row(), inputs);
  for (const SsmArrangement& other : {SsmArrangement{.threads = 2, .cut = true},
                                      {.threads = 5, .strided = true},
                                      {.threads = 2, .cut = true, .heads_at_once = 1, .strided = true}}) {
    EXPECT_EQ(first_difference(inputs, run_ssm(row(), inputs, other), whole), "");
  }
}

// More runs than a launch takes of them.
TEST_P(SsmKernels, TakeManySequences) {
  const SsmSpec spec = small(Dtype::kBf16);
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < 150; ++i) lengths.push_back(1 + i * 37 % 300);
  lengths[70] = 5000;
  const SsmData inputs = with_initial(random_ssm(spec, lengths, 45), 46);
  expect_accurate(inputs);
  const SsmResult whole = run_ssm(row(), inputs);
  EXPECT_EQ(first_difference(inputs, run_ssm(row(), inputs, {.threads = 2, .strided = true}), whole), "");
}

// A sequence's results are its own, whatever lies beside it.
TEST_P(SsmKernels, DontDependOnOtherSequences) {
  const SsmSpec spec = small(Dtype::kBf16);
  const SsmData together = random_ssm(spec, {300, 2100, 77}, 51);
  const SsmResult result = run_ssm(row(), together);
  for (std::size_t s = 0; s < together.lengths.size(); ++s) {
    const auto part = [&](const std::vector<std::byte>& array, int per_row) {
      const std::size_t bytes = static_cast<std::size_t>(per_row) * size_of(spec.dtype);
      const auto begin = array.begin() + together.row_of(s) * static_cast<std::int64_t>(bytes);
      return std::vector<std::byte>(begin, begin + together.lengths[s] * static_cast<std::int64_t>(bytes));
    };
    SsmData alone = together;
    alone.lengths = {together.lengths[s]};
    alone.x = part(together.x, spec.heads * spec.head_dim);
    const auto dt_begin = together.dt.begin() + together.row_of(s) * static_cast<std::int64_t>(together.dt_row_bytes());
    alone.dt.assign(dt_begin, dt_begin + together.lengths[s] * static_cast<std::int64_t>(together.dt_row_bytes()));
    alone.b = part(together.b, spec.groups * spec.state_dim);
    alone.c = part(together.c, spec.groups * spec.state_dim);
    const SsmResult own = run_ssm(row(), alone);
    EXPECT_EQ(own.y, part(result.y, spec.heads * spec.head_dim));
    EXPECT_EQ(std::memcmp(own.finals.data(), result.finals.data() + s * together.state_floats(),
                          together.state_floats() * sizeof(float)),
              0);
    count_check();
  }
}

// Resumed after a super-segment from its final state, a sequence has the bits of the whole one; elsewhere its values.
TEST_P(SsmKernels, GoOnFromAFinalState) {
  const SsmSpec spec = small();
  const std::int64_t length = 2 * kSuperSegmentTokens + 3000;
  const SsmData whole = with_slow_decays(random_ssm(spec, {length}, 61));
  const SsmResult result = run_ssm(row(), whole);
  for (const std::int64_t cut : {kSuperSegmentTokens, 2 * kSuperSegmentTokens, kSuperSegmentTokens + 100}) {
    const auto part = [&](std::int64_t begin, std::int64_t end) {
      SsmData inputs = whole;
      inputs.lengths = {end - begin};
      const auto slice = [&](const std::vector<std::byte>& array, int per_row) {
        const auto bytes = static_cast<std::int64_t>(size_of(spec.dtype)) * per_row;
        return std::vector<std::byte>(array.begin() + begin * bytes, array.begin() + end * bytes);
      };
      inputs.x = slice(whole.x, spec.heads * spec.head_dim);
      const auto dt_bytes = static_cast<std::int64_t>(whole.dt_row_bytes());
      inputs.dt.assign(whole.dt.begin() + begin * dt_bytes, whole.dt.begin() + end * dt_bytes);
      inputs.b = slice(whole.b, spec.groups * spec.state_dim);
      inputs.c = slice(whole.c, spec.groups * spec.state_dim);
      return inputs;
    };
    SsmResult first = run_ssm(row(), part(0, cut));
    SsmData rest = part(cut, length);
    rest.initial = {first.finals};
    const SsmResult second = run_ssm(row(), rest);
    if (cut % kSuperSegmentTokens == 0) {
      first.y.insert(first.y.end(), second.y.begin(), second.y.end());
      first.finals = second.finals;
      EXPECT_TRUE(first.same_bits(result)) << "cut at " << cut;
    } else {
      EXPECT_EQ(check_ssm_accuracy(rest, second, tolerance()), "");
    }
  }
}

// A cache of many sequences: each has the state of its slot, and what no row names stays as it is. A padding row is
// zeros, whatever its inputs hold.
TEST_P(SsmKernels, GoOnInTheirSlots) {
  for (const SsmSpec& spec : specs()) {
    SsmData inputs = with_initial(random_ssm(spec, {9, 9, 9}, 71), 72);
    for (std::int64_t t = 9; t < 18; ++t) {
      for (int head = 0; head < spec.heads; ++head) inputs.set_x(t, head, std::numeric_limits<float>::quiet_NaN());
    }
    const SsmResult plain = update_with(row(), inputs);
    const std::vector<std::int32_t> slots{4, -1, 1};
    const SsmResult slotted = update_with(row(), inputs, 2, slots);
    const std::size_t floats = inputs.state_floats();
    ASSERT_EQ(slotted.finals.size(), 5 * floats);
    const std::size_t row_bytes = plain.y.size() / 27;
    count_check();
    for (const std::size_t s : {0U, 2U}) {
      const auto slot = static_cast<std::size_t>(slots[s]);
      EXPECT_EQ(std::memcmp(&slotted.finals[slot * floats], &plain.finals[s * floats], floats * sizeof(float)), 0);
      EXPECT_EQ(std::memcmp(&slotted.y[s * 9 * row_bytes], &plain.y[s * 9 * row_bytes], 9 * row_bytes), 0);
    }
    const auto untouched = [](float value) { return std::isnan(value); };
    for (const std::size_t slot : {0U, 2U, 3U}) {
      const auto begin = slotted.finals.begin() + static_cast<std::ptrdiff_t>(slot * floats);
      EXPECT_TRUE(std::all_of(begin, begin + static_cast<std::ptrdiff_t>(floats), untouched)) << slot;
    }
    const auto padded = slotted.y.begin() + static_cast<std::ptrdiff_t>(9 * row_bytes);
    EXPECT_TRUE(std::all_of(padded, padded + static_cast<std::ptrdiff_t>(9 * row_bytes), is_zero)) << describe(spec);
  }
}

// Token by token, as in decode: the same values, and states that a scan continues from.
TEST_P(SsmKernels, GoOnTokenByToken) {
  for (const SsmSpec& spec : specs()) {
    const SsmData inputs = with_initial(random_ssm(spec, {70, 70, 70}, 63), 64);
    const SsmResult result = update_with(row(), inputs);
    EXPECT_EQ(check_ssm_accuracy(inputs, result, tolerance()), "") << describe(spec);
    EXPECT_TRUE(update_with(row(), inputs, 5).same_bits(result)) << describe(spec);
    SsmData behind = random_ssm(spec, {130}, 65);
    behind.initial = {
        {result.finals.begin(), result.finals.begin() + static_cast<std::ptrdiff_t>(inputs.state_floats())}};
    EXPECT_EQ(check_ssm_accuracy(behind, run_ssm(row(), behind), tolerance()), "") << describe(spec);
  }
}

// More of them than a device holds CTAs for at a time, in groups that share B and C. Rows that aren't aligned, which
// may go another way, have the same bits.
TEST_P(SsmKernels, GoOnInManySequences) {
  const SsmSpec all[] = {ssm_spec(Dtype::kBf16, 2, 64, 128),
                         selective_spec(Dtype::kBf16, 136, 16, 17),
                         selective_spec(Dtype::kBf16, 136, 64),
                         selective_spec(Dtype::kF16, 136, 16),
                         selective_spec(Dtype::kF32, 136, 16),
                         linear_spec(Dtype::kBf16, 2, 64, 128, SsmDecay::kToken),
                         linear_spec(Dtype::kBf16, 2, 16, 32, SsmDecay::kDim),
                         linear_spec(Dtype::kBf16, 2, 64, 128, SsmDecay::kDim)};
  for (SsmSpec spec : all) {
    spec.skip = spec.gate = spec.dt_bias = spec.dt_softplus = spec.decay == SsmDecay::kDt;
    if (!can(spec)) continue;
    const std::size_t more = row().backend == "cpu" ? 1 : 10;  // than a GPU holds CTAs for
    const std::size_t sequences = more * (spec.state_dim == 16 ? 300 : spec.state_decays ? 150 : 30);
    const SsmData inputs = with_initial(random_ssm(spec, std::vector<std::int64_t>(sequences, 1), 67), 68);
    const SsmResult plain = update_with(row(), inputs);
    EXPECT_EQ(check_ssm_accuracy(inputs, plain, tolerance()), "") << describe(spec);
    EXPECT_TRUE(update_with(row(), inputs, 1, {}, true).same_bits(plain)) << describe(spec);
    std::vector<std::int32_t> slots(sequences);
    for (std::size_t s = 0; s < sequences; ++s) slots[s] = s % 7 == 3 ? -1 : static_cast<std::int32_t>(sequences - s);
    const SsmResult slotted = update_with(row(), inputs, 1, slots);
    const std::size_t floats = inputs.state_floats();
    const std::size_t row_bytes = plain.y.size() / sequences;
    std::size_t different = 0;
    for (std::size_t s = 0; s < sequences; ++s) {
      const auto own = slotted.y.begin() + static_cast<std::ptrdiff_t>(s * row_bytes);
      if (slots[s] < 0) {
        if (!std::all_of(own, own + static_cast<std::ptrdiff_t>(row_bytes), is_zero)) ++different;
        continue;
      }
      const float* const state = &slotted.finals[static_cast<std::size_t>(slots[s]) * floats];
      if (std::memcmp(state, &plain.finals[s * floats], floats * sizeof(float)) != 0 ||
          std::memcmp(&slotted.y[s * row_bytes], &plain.y[s * row_bytes], row_bytes) != 0) {
        ++different;
      }
    }
    EXPECT_EQ(different, 0U) << describe(spec);
  }
}

// Small enough for compute-sanitizer: as many updates of few states that CTAs of a GPU process several of them.
TEST_P(SsmKernels, GoOnInManySequencesOfFewStates) {
  SsmSpec spec = selective_spec(Dtype::kBf16, 8, 16);
  if (!can(spec)) spec = small(Dtype::kBf16);
  const std::size_t sequences = spec.state_decays ? 5000 : 10;
  const SsmData inputs = with_initial(random_ssm(spec, std::vector<std::int64_t>(sequences, 1), 69), 70);
  EXPECT_EQ(check_ssm_accuracy(inputs, update_with(row(), inputs), tolerance()), "") << describe(spec);
}

// Likewise: one token after a segment's edge, whose state is carried over it.
TEST_P(SsmKernels, GoOnBehindASegment) {
  expect_accurate(with_initial(random_ssm(small(Dtype::kBf16), {kSegmentTokens + 1}, 24), 25));
}

// Rows that are rotated as they are loaded give the bits of rows that were rotated before, also in decode steps.
TEST_P(SsmKernels, RotateRowsAsTheyLoadThem) {
  const auto backend = row().make_backend({1, 0});
  if (small().state_decays || !row().make_kernel(small(), *backend)->rotates_rows()) {
    GTEST_SKIP() << row().name << " takes rotated rows";
  }
  CaseChoice cases = choose_cases(5);  // of 18 of each dtype
  std::uint64_t seed = 200;
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const SsmSpec& spec :
         {linear_spec(dtype, 2, 64, 128, SsmDecay::kHead), linear_spec(dtype, 3, 40, 24, SsmDecay::kToken),
          linear_spec(dtype, 3, 32, 32, SsmDecay::kDim)}) {
      if (!can(spec)) continue;
      for (const RopePairs pairs : {RopePairs::kHalfSplit, RopePairs::kInterleaved}) {
        // All dims, half of them, and 9 pairs, which are no multiple of a vector's; these in two segments.
        for (const int rotary_dim : {spec.state_dim, spec.state_dim / 2, 18}) {
          const std::vector<std::int64_t> packed{70, 0, 200, 64, 1}, segments{kSegmentTokens + 70};
          if (!cases.take()) continue;
          SsmData inputs = random_ssm(spec, rotary_dim == 18 ? segments : packed, ++seed);
          inputs.rope = make_rope_spec(RopeParameters(), dtype, spec.state_dim, pairs, /*exact=*/false);
          inputs.rope->rotary_dim = rotary_dim;
          inputs.rope->frequencies.resize(static_cast<std::size_t>(rotary_dim / 2));
          inputs.rope->attention_factor = 1.25F;
          for (std::int64_t at = 0; at < inputs.rows(); ++at) inputs.positions.push_back(1'000'000 - 7 * at);
          SCOPED_TRACE(fmt::format("{}; {}", describe(spec), describe(*inputs.rope)));
          const SsmResult expected = run_ssm(row(), rotated(inputs));
          const SsmArrangement other{.threads = 2, .cut = true, .heads_at_once = 1, .strided = true, .unaligned = true};
          for (const SsmArrangement& arrangement : {SsmArrangement{}, other}) {
            EXPECT_EQ(first_difference(inputs, run_ssm(row(), inputs, arrangement), expected), "");
          }
          SsmData steps = random_ssm(spec, {3, 3, 3}, ++seed);
          steps.rope = inputs.rope;
          steps.positions = {5, 6, 7, 1'000'000, 1'000'001, 1'000'002, 0, 1, 2};
          const std::vector<std::int32_t> slots{4, -1, 0};
          const SsmResult stepped = update_with(row(), steps, 2, slots, rotary_dim == 18);
          EXPECT_EQ(first_difference(steps, stepped, update_with(row(), rotated(steps), 1, slots)), "");
        }
      }
    }
  }
}

TEST_P(SsmKernels, KeepTheStateWhereDtIsZero) {
  for (SsmSpec spec : specs()) {
    if (spec.dt_softplus || spec.dt_bias) continue;
    SsmData inputs = with_initial(random_ssm(spec, {200}, 71), 72);
    std::ranges::fill(inputs.dt, std::byte{0});
    if (spec.decay != SsmDecay::kDt) {  // keys of zero and no decay
      std::ranges::fill(inputs.b, std::byte{0});
      std::ranges::fill(inputs.a, 0.0F);
    }
    const SsmResult result = run_ssm(row(), inputs);
    EXPECT_EQ(std::memcmp(result.finals.data(), inputs.initial[0].data(), result.finals.size() * sizeof(float)), 0);
    EXPECT_EQ(check_ssm_accuracy(inputs, result, tolerance()), "") << describe(spec);
  }
}

// Tokens that clear the state, among others. A chunk's sum may reach 64 · 150, where fp32 has steps of 2^−10.
TEST_P(SsmKernels, SurviveVeryLargeDecays) {
  for (const SsmSpec& spec : specs()) {
    if (spec.dtype == Dtype::kF16 || spec.dt_softplus || spec.dt_bias) continue;
    if (spec.decay == SsmDecay::kHead) continue;
    const bool linear = spec.decay != SsmDecay::kDt;
    for (const float huge : {100.0F, 1e4F, linear ? std::numeric_limits<float>::infinity() : 1e18F}) {
      SsmData inputs = with_initial(random_ssm(spec, {300}, 81), 82);
      for (std::int64_t t = 0; t < 300; t += 3) {
        // Its own input is small, so that what follows is not drowned.
        for (int head = 0; head < spec.heads; ++head) inputs.set_dt(t, head, linear ? -huge : huge);
        for (int head = 0; head < spec.heads; ++head) inputs.set_x(t, head, 1.0F / huge);
      }
      const SsmResult result = run_ssm(row(), inputs);
      EXPECT_EQ(check_ssm_accuracy(inputs, result, {2e-3, 2e-3}), "") << describe(spec) << ", dt " << huge;
    }
  }
}

// A positive A lets states grow as far as fp32 goes.
TEST_P(SsmKernels, GrowWhereAIsPositive) {
  SsmData inputs = random_ssm(small(), {200}, 91);
  for (float& a : inputs.a) a = -a / 8.0F;
  EXPECT_EQ(check_ssm_accuracy(inputs, run_ssm(row(), inputs), tolerance()), "");
}

TEST_P(SsmKernels, KeepNanInItsSequence) {
  for (const SsmSpec& spec : {small(), small(Dtype::kBf16)}) {
    const SsmData clean = random_ssm(spec, {150, 2200, 150}, 101);
    const SsmResult expected = run_ssm(row(), clean);
    const std::int64_t place = 150 + 2100;
    for (const bool in_dt : {false, true}) {
      SsmData inputs = clean;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      if (in_dt) {
        inputs.set_dt(place, 0, nan);
      } else {
        inputs.set_x(place, 0, nan);
      }
      const SsmResult result = run_ssm(row(), inputs, {.threads = 2});
      const std::size_t row_bytes = static_cast<std::size_t>(spec.heads * spec.head_dim) * size_of(spec.dtype);
      const auto same_rows = [&](std::int64_t begin, std::int64_t end) {
        count_check();
        return std::equal(result.y.begin() + begin * static_cast<std::int64_t>(row_bytes),
                          result.y.begin() + end * static_cast<std::int64_t>(row_bytes),
                          expected.y.begin() + begin * static_cast<std::int64_t>(row_bytes));
      };
      EXPECT_TRUE(same_rows(0, 150 + 2100 / kChunkTokens * kChunkTokens));  // all earlier chunks
      EXPECT_TRUE(same_rows(150 + 2200, inputs.rows()));
      for (std::int64_t t = place; t < 150 + 2200; ++t) {
        const float y = load_element(result.y.data() + static_cast<std::size_t>(t) * row_bytes, spec.dtype);
        ASSERT_TRUE(std::isnan(y)) << t;
      }
    }
  }
}

// 2M tokens and one more, of which every 2,048th counts: the sums stay exact in fp32.
TEST_P(SsmKernels, ReachTwoMillionTokens) {
  const SsmSpec spec = small();
  const std::int64_t length = (std::int64_t{1} << 21) + 1;
  SsmData inputs = counting(spec, {length});
  std::ranges::fill(inputs.x, std::byte{0});
  for (std::int64_t t = 0; t < length; t += 2048) inputs.set_x(t, 0, 1.0F);
  const SsmResult result = run_ssm(row(), inputs, {.threads = 2});
  const std::int64_t width = std::int64_t{spec.heads} * spec.head_dim;
  std::int64_t wrong = 0;
  for (std::int64_t t = 0; t < length; ++t) {
    const auto expected = static_cast<float>(spec.state_dim * (t / 2048 + 1));
    wrong += !is_count(y_at(result, spec.dtype, t * width), spec.dtype, expected, rounded());
  }
  EXPECT_EQ(wrong, 0);
  count_check();
}

RINGATTN_FOR_EVERY_SSM(SsmKernels);

TEST(SsmSpecs, AreDescribedAndChecked) {
  SsmSpec spec = ssm_spec(Dtype::kBf16, 80, 64, 128);
  spec.skip = spec.gate = spec.dt_bias = spec.dt_softplus = true;
  EXPECT_EQ(describe(spec), "SSD, bf16, 80 heads of 64, state 128, 1 group, D, z, dt bias, dt softplus");
  EXPECT_EQ(describe(selective_spec(Dtype::kF32, 16, 8, 2)), "selective scan, fp32, 16 channels, state 8, 2 groups");
  SsmSpec linear = linear_spec(Dtype::kBf16, 64, 128, 128, SsmDecay::kHead, 0.5F);
  EXPECT_EQ(describe(linear), "linear attention, bf16, 64 heads of 128, a decay per head, scale 0.5");
  check_ssm(linear);
  linear.gate = true;
  EXPECT_EQ(error_of([&] { check_ssm(linear); }).code(), ErrorCode::kUsage);
  linear = linear_spec(Dtype::kBf16, 2, 8, 8, SsmDecay::kToken, std::numeric_limits<float>::infinity());
  EXPECT_EQ(error_of([&] { check_ssm(linear); }).code(), ErrorCode::kUsage);
  check_ssm(spec);
  spec.groups = 3;
  EXPECT_EQ(error_of([&] { check_ssm(spec); }).code(), ErrorCode::kUsage);
  spec = selective_spec(Dtype::kF32, 16, 8);
  spec.head_dim = 2;
  EXPECT_EQ(error_of([&] { check_ssm(spec); }).code(), ErrorCode::kUsage);
  spec = ssm_spec(Dtype::kF32, 1, 8, 8);
  spec.dt_min = 2.0F;
  spec.dt_max = 1.0F;
  EXPECT_EQ(error_of([&] { check_ssm(spec); }).code(), ErrorCode::kUsage);
}

TEST(SsmSpecs, ARotationFitsTheSpecAndTheKernel) {
  SsmData inputs = random_ssm(linear_spec(Dtype::kBf16, 2, 8, 8, SsmDecay::kHead), {3}, 1);
  const RopeSpec rope = make_rope_spec(RopeParameters(), Dtype::kBf16, 8, RopePairs::kHalfSplit, /*exact=*/false);
  const RopeSpec wider = make_rope_spec(RopeParameters(), Dtype::kBf16, 16, RopePairs::kHalfSplit, /*exact=*/false);
  const std::vector<float> angles(3 * 8);
  std::vector<std::byte> y(inputs.x.size());
  const auto is_refused = [&](const SsmSpec& spec, const SsmRotation& rotation, bool rotates_rows) {
    inputs.spec = spec;
    SsmTask task = inputs.task();
    task.y = dense_view(static_cast<void*>(y.data()), spec.dtype, 3, spec.heads, spec.head_dim);
    task.rotation = rotation;
    try {
      check_ssm_task(spec, {}, task, rotates_rows);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInternal);
      return true;
    }
    return false;
  };
  EXPECT_FALSE(is_refused(inputs.spec, {&rope, angles.data()}, true));
  EXPECT_TRUE(is_refused(inputs.spec, {&rope, angles.data()}, false));
  EXPECT_TRUE(is_refused(inputs.spec, {&rope, nullptr}, true));
  EXPECT_TRUE(is_refused(inputs.spec, {&wider, angles.data()}, true));
}

TEST(SsmSpecs, AreChosenByTheirDecays) {
  const char* const of_bf16 = cpu::has_amx_bf16() ? "cpu_ssd_amx" : "cpu_ssd";
  EXPECT_EQ(choose_kernel(ssm_spec(Dtype::kBf16, 8, 64, 128), {"cpu", "auto"}).row->name, of_bf16);
  EXPECT_EQ(choose_kernel(selective_spec(Dtype::kBf16, 64, 16), {"cpu", "auto"}).row->name, "cpu_selective_scan");
  const SsmSpec lightning = linear_spec(Dtype::kBf16, 64, 128, 128, SsmDecay::kHead);
  const SsmSpec gla = linear_spec(Dtype::kBf16, 4, 128, 64, SsmDecay::kDim);
  EXPECT_EQ(choose_kernel(lightning, {"cpu", "auto"}).row->name, of_bf16);
  EXPECT_EQ(choose_kernel(gla, {"cpu", "auto"}).row->name, cpu::has_amx_bf16() ? "cpu_gla_amx" : "cpu_gla");
  if (kernel_table<SsmSpec>().front().backend == "cuda") {
    const auto on_gpu = [](const SsmSpec& spec) {
      return choose_kernel(spec, {"cuda", "auto"}, KernelScope::kAnyMachine).row->name;
    };
    const bool hopper = kernel_table<SsmSpec>().front().name == "sm90_ssd";
    EXPECT_EQ(on_gpu(ssm_spec(Dtype::kBf16, 80, 64, 128)), hopper ? "sm90_ssd" : "sm80_ssd");
    EXPECT_EQ(on_gpu(ssm_spec(Dtype::kF16, 80, 64, 128)), "sm80_ssd");
    EXPECT_EQ(on_gpu(ssm_spec(Dtype::kBf16, 80, 64, 16)), "sm80_ssd");
    EXPECT_EQ(on_gpu(lightning), hopper ? "sm90_ssd" : "sm80_ssd");
    EXPECT_EQ(on_gpu(gla), "sm80_gla");
    const SsmSpec half_gla = linear_spec(Dtype::kF16, 4, 128, 64, SsmDecay::kDim);
    const SsmSpec narrow_gla = linear_spec(Dtype::kBf16, 4, 32, 64, SsmDecay::kDim);
    EXPECT_EQ(error_of([&] { on_gpu(half_gla); }).code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error_of([&] { on_gpu(narrow_gla); }).what()).find("head_dim 32"), std::string::npos);
    EXPECT_EQ(on_gpu(selective_spec(Dtype::kF32, 5120, 16)), "sm80_selective_scan");
    EXPECT_EQ(error_of([&] { on_gpu(ssm_spec(Dtype::kF32, 80, 64, 128)); }).code(), ErrorCode::kUnsupported);
  }
  const Error error = error_of([] { choose_kernel(ssm_spec(Dtype::kBf16, 8, 60, 128), {"cpu", "auto"}); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(error.what()).find("missing: head_dim 60"), std::string::npos) << error.what();
}

}  // namespace
}  // namespace ringattn::testing
