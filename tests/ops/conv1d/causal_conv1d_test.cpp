// SPDX-License-Identifier: Apache-2.0
// A CausalConv1d on 1 to 8 ranks gives the bits of the kernel on all tokens, by memcmp of y and of the last tokens.
#include "ops/conv1d/causal_conv1d.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "kernels/ssm/ssm.hpp"
#include "tests/ops/conv1d/dealt_runs.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kSuper = kSuperSegmentTokens;

CausalConv1dOptions on_cpu() {
  CausalConv1dOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

struct Case {
  CausalConv1dJob job;
  std::vector<std::byte> x;        // [rows, channels]
  std::vector<std::byte> initial;  // [sequences, width − 1, channels]
  std::vector<float> weight, bias;
  std::vector<std::byte> y, finals;  // what the kernel makes of it

  std::int64_t row_bytes() const {
    return std::int64_t{job.spec.channels} * static_cast<std::int64_t>(size_of(job.spec.dtype));
  }
};

Case make_case(int width, const std::vector<std::int64_t>& lengths) {
  Case made;
  made.job = {{Dtype::kBf16, 16, width, true, true}, lengths, true, true};
  const CausalConv1dSpec& spec = made.job.spec;
  std::mt19937_64 random(static_cast<std::uint64_t>(width));
  const Normal normal;
  std::int64_t rows = 0;
  for (const std::int64_t length : lengths) rows += length;
  const auto sequences = static_cast<std::int64_t>(lengths.size());
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  made.x = random_elements(rows * spec.channels, spec.dtype, random);
  made.initial = random_elements(sequences * spec.halo_bytes() / element, spec.dtype, random);
  for (int i = 0; i < spec.channels * width; ++i) made.weight.push_back(normal(random));
  for (int i = 0; i < spec.channels; ++i) made.bias.push_back(normal(random));

  made.y.assign(made.x.size(), std::byte{0xff});
  made.finals.assign(made.initial.size(), std::byte{0xff});
  std::vector<CausalConv1dRun> runs;
  std::int64_t row = 0;
  for (std::int64_t s = 0; s < sequences; ++s) {
    const std::int64_t at = s * spec.halo_bytes();
    if (lengths[static_cast<std::size_t>(s)] == 0) {  // no kernel sees it: its halo passes through
      std::copy_n(made.initial.begin() + at, spec.halo_bytes(), made.finals.begin() + at);
      continue;
    }
    runs.push_back({row, lengths[static_cast<std::size_t>(s)], made.initial.data() + at, made.finals.data() + at});
    row += lengths[static_cast<std::size_t>(s)];
  }
  const CausalConv1dChoice choice = choose_kernel(spec, {"cpu", "auto"});
  const auto backend = choice.row->make_backend({2, 0});
  choice.row->make_kernel(spec, *backend)
      ->convolve(
          {dense_view(static_cast<const void*>(made.x.data()), spec.dtype, rows, 1, spec.channels), made.weight.data(),
           made.bias.data(), runs, dense_view(static_cast<void*>(made.y.data()), spec.dtype, rows, 1, spec.channels)},
          {}, {});
  return made;
}

// Runs a rank's part, and returns how many of its results differ from those expected. The rows lie apart, as in a fused
// projection.
std::int64_t differences(Transport& world, const Case& given, const CausalConv1dOptions& options) {
  const CausalConv1dSpec& spec = given.job.spec;
  CausalConv1d convolution(given.job, world, options);
  const Layout& layout = convolution.layout();
  const int rank = world.rank();
  const std::int64_t tokens = layout.tokens(rank);
  const auto shard = [&](const std::vector<std::byte>& packed) {
    std::vector<std::byte> rows(static_cast<std::size_t>(tokens * given.row_bytes()));
    layout.shard(rank, packed.data(), rows.data(), given.row_bytes());
    return rows;
  };
  const std::vector<std::byte> own = shard(given.x);
  std::vector<std::byte> apart(own.size() * 2, std::byte{0xff});
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::copy_n(own.begin() + t * given.row_bytes(), given.row_bytes(), apart.begin() + 2 * t * given.row_bytes());
  }
  TensorView x = dense_view(static_cast<const void*>(apart.data()), spec.dtype, tokens, 1, spec.channels);
  x.token_stride *= 2;

  std::vector<std::byte> initial, expected_finals;
  const auto append = [&](std::vector<std::byte>& target, const std::vector<std::byte>& all, std::int32_t sequence) {
    const auto begin = all.begin() + sequence * spec.halo_bytes();
    target.insert(target.end(), begin, begin + spec.halo_bytes());
  };
  for (const std::int32_t s : convolution.beginning()) append(initial, given.initial, s);
  for (const std::int32_t s : convolution.ending()) append(expected_finals, given.finals, s);
  std::int64_t differ = 0;
  for (int round = 0; round < 2; ++round) {
    std::vector<std::byte> y(own.size(), std::byte{0xff});
    std::vector<std::byte> finals(expected_finals.size(), std::byte{0xff});
    const CausalConv1dInputs inputs{x, given.weight.data(), given.bias.data(),
                                    initial.empty() ? nullptr : initial.data()};
    const CausalConv1dOutputs outputs{dense_view(static_cast<void*>(y.data()), spec.dtype, tokens, 1, spec.channels),
                                      finals.empty() ? nullptr : finals.data()};
    if (round == 0) {
      convolution.run(inputs, outputs);
    } else {
      convolution.enqueue(inputs, outputs);
      convolution.wait();
    }
    differ += y != shard(given.y);
    differ += finals != expected_finals;
  }
  return differ;
}

class Conv1dWorld : public ::testing::TestWithParam<int> {
 protected:
  static void expect_same(const Case& given, const CausalConv1dOptions& options = on_cpu()) {
    std::atomic<std::int64_t> differ = 0;
    if (GetParam() > 1) {
      run_threads_world(GetParam(), {}, [&](Transport& world) { differ += differences(world, given, options); });
    } else {
      differ = differences(*make_self_transport(), given, options);
    }
    EXPECT_EQ(differ, 0) << describe(given.job.spec);
  }
};

TEST_P(Conv1dWorld, HasTheBitsOfOneRank) {
  static const std::vector<Case> cases{make_case(2, {2 * kSuper + 100, 1, 3}), make_case(3, {3 * kSuper, 2}),
                                       make_case(4, {2, kSuper + 1, 1, 2 * kSuper + 2, 3}),
                                       make_case(3, {0, kSuper + 1, 0, 0, 2, 0}), make_case(4, {0, 0, 0})};
  for (const Case& given : cases) expect_same(given);
}

TEST_P(Conv1dWorld, TakesRunsOfTheCallers) {
  static const Case given = make_case(4, {3 * kSegmentTokens + 1, kSegmentTokens, 0, 5 * kSegmentTokens + 2});
  CausalConv1dOptions options = on_cpu();
  options.runs = deal_segments(given.job.lengths, GetParam());
  expect_same(given, options);
}

// Token by token, in place and from halos to others, each rank with sequences of its own.
TEST_P(Conv1dWorld, UpdatesHaveTheBitsOfRuns) {
  constexpr std::int64_t kTokens = 6;
  static const Case given = make_case(4, std::vector<std::int64_t>(11, kTokens));
  CausalConv1dJob job = given.job;
  job.lengths.assign(11, 1);
  job.update = true;
  const auto play = [&](Transport& world) {
    CausalConv1d convolution(job, world, on_cpu());
    const std::span<const TokenRun> runs = convolution.layout().runs(world.rank());
    const auto rows = static_cast<std::int64_t>(runs.size());
    const CausalConv1dSpec& spec = job.spec;
    std::vector<std::byte> x(static_cast<std::size_t>(rows * given.row_bytes())), y(x.size()), halos, others;
    const auto copy = [&](std::vector<std::byte>& target, const std::vector<std::byte>& all, std::int64_t token) {
      for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t at = runs[static_cast<std::size_t>(row)].sequence * kTokens + token;
        std::copy_n(all.begin() + at * given.row_bytes(), given.row_bytes(), target.begin() + row * given.row_bytes());
      }
    };
    for (const TokenRun& run : runs) {
      const auto begin = given.initial.begin() + run.sequence * spec.halo_bytes();
      halos.insert(halos.end(), begin, begin + spec.halo_bytes());
    }
    others.resize(halos.size());
    std::int64_t differ = 0;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      copy(x, given.x, t);
      const CausalConv1dInputs inputs{
          dense_view(static_cast<const void*>(x.data()), spec.dtype, rows, 1, spec.channels), given.weight.data(),
          given.bias.data(), rows == 0 ? nullptr : halos.data()};
      std::vector<std::byte>& behind = t % 2 == 0 ? halos : others;
      convolution.run(inputs, {dense_view(static_cast<void*>(y.data()), spec.dtype, rows, 1, spec.channels),
                               rows == 0 ? nullptr : behind.data()});
      if (t % 2 != 0) std::swap(halos, others);
      std::vector<std::byte> expected(y.size());
      copy(expected, given.y, t);
      differ += y != expected;
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto sequence = runs[static_cast<std::size_t>(row)].sequence;
      differ += !std::equal(halos.begin() + row * spec.halo_bytes(), halos.begin() + (row + 1) * spec.halo_bytes(),
                            given.finals.begin() + sequence * spec.halo_bytes());
    }
    return differ;
  };
  std::atomic<std::int64_t> differ = 0;
  if (GetParam() > 1) {
    run_threads_world(GetParam(), {}, [&](Transport& world) { differ += play(world); });
  } else {
    differ = play(*make_self_transport());
  }
  EXPECT_EQ(differ, 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Conv1dWorld, ::testing::Values(1, 2, 3, 4, 5, 7, 8),
                         [](const auto& test) { return fmt::format("{}", test.param); });

TEST(Conv1dRefusals, NameWhatIsWrong) {
  const auto self = make_self_transport();
  const Case given = make_case(4, {10});
  const auto refused = [&](const std::function<void(CausalConv1dJob&)>& spoil, ErrorCode code) {
    CausalConv1dJob job = given.job;
    spoil(job);
    EXPECT_EQ(error_of([&] { CausalConv1d(job, *self, on_cpu()); }).code(), code);
  };
  refused([](CausalConv1dJob& job) { job.spec.width = 5; }, ErrorCode::kUsage);
  refused([](CausalConv1dJob& job) { job.spec.channels = 12; }, ErrorCode::kUnsupported);
  refused([](CausalConv1dJob& job) { job.lengths = {4, -1}; }, ErrorCode::kUsage);
  refused([](CausalConv1dJob& job) { job.update = true; }, ErrorCode::kUsage);
  refused(
      [](CausalConv1dJob& job) {
        job.update = true;
        job.lengths = {1};
        job.final_halos = false;
      },
      ErrorCode::kUsage);
  std::atomic<int> both = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    CausalConv1d convolution(given.job, world, on_cpu());
    const Error error = error_of([&] { convolution.run({}, {}); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("x is fp32 [0, 0, 0]"), std::string::npos) << error.what();
    // Without tokens, so that any rows fit.
    const CausalConv1dSpec& spec = given.job.spec;
    CausalConv1d none({spec, {0}}, world, on_cpu());
    CausalConv1d two({spec, {0, 0}}, world, on_cpu());
    const MutableTensorView rows = dense_view(static_cast<void*>(nullptr), spec.dtype, 0, 1, spec.channels);
    const Error other = error_of([&] {
      (world.rank() == 0 ? none : two).run({rows, given.weight.data(), given.bias.data(), nullptr}, {rows, nullptr});
    });
    EXPECT_NE(std::string(other.what()).find("rank 1 and rank 0 run different jobs"), std::string::npos)
        << other.what();
    ++both;
  });
  EXPECT_EQ(both, 2);
}

}  // namespace
}  // namespace ringattn::testing
