// SPDX-License-Identifier: Apache-2.0
// A CausalConv1dBackward on 1 to 5 ranks gives the bits of the kernel on all tokens, by memcmp of all gradients.
#include "ops/conv1d/causal_conv1d_backward.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "kernels/common/token_units.hpp"
#include "kernels/ssm/ssm.hpp"
#include "tests/ops/conv1d/dealt_runs.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kSuper = kSuperSegmentTokens;

struct GradientCase {
  CausalConv1dJob job;
  std::vector<std::byte> x, dy;            // [rows, channels]
  std::vector<std::byte> initial, dfinal;  // [sequences, width − 1, channels]
  std::vector<float> weight, bias;
  std::vector<std::byte> dx, dinitial;  // what the kernel makes of it
  std::vector<float> dweight, dbias;

  std::int64_t row_bytes() const {
    return std::int64_t{job.spec.channels} * static_cast<std::int64_t>(size_of(job.spec.dtype));
  }
};

CausalConv1dOptions gradients_on_cpu() {
  CausalConv1dOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

GradientCase make_gradient_case(int width, const std::vector<std::int64_t>& lengths, bool halos = true) {
  GradientCase made;
  made.job = {{Dtype::kBf16, 16, width, true, true}, lengths, halos, halos};
  const CausalConv1dSpec& spec = made.job.spec;
  std::mt19937_64 random(static_cast<std::uint64_t>(width));
  const Normal normal;
  const std::int64_t rows = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const auto sequences = static_cast<std::int64_t>(lengths.size());
  for (auto* tensor : {&made.x, &made.dy}) *tensor = random_elements(rows * spec.channels, spec.dtype, random);
  for (auto* tensor : {&made.initial, &made.dfinal}) {
    *tensor = random_elements(sequences * spec.halo_tokens() * spec.channels, spec.dtype, random);
  }
  for (int i = 0; i < spec.channels * width; ++i) made.weight.push_back(normal(random));
  for (int i = 0; i < spec.channels; ++i) made.bias.push_back(normal(random));

  made.dx.assign(made.x.size(), std::byte{0xff});
  made.dinitial.assign(made.initial.size(), std::byte{0xff});
  std::vector<CausalConv1dGradientRun> runs;
  std::int64_t row = 0;
  for (std::int64_t s = 0; s < sequences; ++s) {
    const std::int64_t length = lengths[static_cast<std::size_t>(s)];
    const std::int64_t at = s * spec.halo_bytes();
    if (length == 0) {  // no kernel sees it: its halo passes through
      std::copy_n(made.dfinal.begin() + at, spec.halo_bytes(), made.dinitial.begin() + at);
      continue;
    }
    CausalConv1dGradientRun run{row, length};
    if (halos) {
      run.initial_halo = made.initial.data() + at;
      run.dfinal_halo = made.dfinal.data() + at;
      run.dinitial_halo = made.dinitial.data() + at;
    }
    runs.push_back(run);
    row += length;
  }
  const CausalConv1dChoice choice = choose_kernel(spec, {"cpu", "auto"});
  const auto backend = choice.row->make_backend({2, 0});
  const auto kernel = choice.row->make_kernel(spec, *backend);
  const auto count = static_cast<std::int64_t>(token_units(lengths).size());
  std::vector<float> units(static_cast<std::size_t>(count * (width + 1) * spec.channels));
  const auto view = [&](std::vector<std::byte>& tensor) {
    return dense_view(static_cast<void*>(tensor.data()), spec.dtype, rows, 1, spec.channels);
  };
  kernel->differentiate(
      {view(made.x), view(made.dy), made.weight.data(), made.bias.data(), runs, view(made.dx), units.data()}, {}, {});
  made.dweight.resize(made.weight.size());
  made.dbias.resize(made.bias.size());
  kernel->sum_units({units.data(), count, spec.channels, made.dweight.data(), made.dbias.data()}, {});
  return made;
}

// Runs a rank's part, and returns how many of its results differ from those expected. The rows lie apart.
std::int64_t differences_of_gradients(Transport& world, const GradientCase& given, const CausalConv1dOptions& options) {
  const CausalConv1dSpec& spec = given.job.spec;
  CausalConv1dBackward backward(given.job, world, options);
  const Layout& layout = backward.layout();
  const int rank = world.rank();
  const std::int64_t tokens = layout.tokens(rank);
  const auto shard = [&](const std::vector<std::byte>& packed) {
    std::vector<std::byte> rows(static_cast<std::size_t>(tokens * given.row_bytes()));
    layout.shard(rank, packed.data(), rows.data(), given.row_bytes());
    return rows;
  };
  const auto spread = [&](const std::vector<std::byte>& rows) {
    std::vector<std::byte> apart(rows.size() * 2, std::byte{0xff});
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::copy_n(rows.begin() + t * given.row_bytes(), given.row_bytes(), apart.begin() + 2 * t * given.row_bytes());
    }
    return apart;
  };
  const std::vector<std::byte> x = spread(shard(given.x));
  const std::vector<std::byte> dy = spread(shard(given.dy));
  const auto view = [&](const std::vector<std::byte>& rows) {
    TensorView made = dense_view(static_cast<const void*>(rows.data()), spec.dtype, tokens, 1, spec.channels);
    made.token_stride *= 2;
    return made;
  };
  const auto of = [&](const std::vector<std::int32_t>& sequences, const std::vector<std::byte>& all) {
    std::vector<std::byte> some;
    for (const std::int32_t s : sequences) {
      const auto begin = all.begin() + s * spec.halo_bytes();
      some.insert(some.end(), begin, begin + spec.halo_bytes());
    }
    return some;
  };
  const bool halos = given.job.initial_halos;
  const std::vector<std::byte> initial = of(backward.beginning(), given.initial);
  const std::vector<std::byte> dfinal = of(backward.ending(), given.dfinal);
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  std::int64_t differ = 0;
  for (int round = 0; round < 2; ++round) {
    std::vector<std::byte> dx(static_cast<std::size_t>(tokens * given.row_bytes()), std::byte{0xff});
    std::vector<std::byte> dinitial(initial.size(), std::byte{0xff});
    std::vector<float> dweight(given.weight.size(), -1.0F), dbias(given.bias.size(), -1.0F);
    const CausalConv1dBackwardInputs inputs{view(x),           given.weight.data(),
                                            given.bias.data(), halos && !initial.empty() ? initial.data() : nullptr,
                                            view(dy),          halos && !dfinal.empty() ? dfinal.data() : nullptr};
    const CausalConv1dBackwardOutputs outputs{
        dense_view(static_cast<void*>(dx.data()), spec.dtype, tokens, 1, spec.channels), dweight.data(), dbias.data(),
        halos && !initial.empty() ? dinitial.data() : nullptr};
    if (round == 0) {
      backward.run(inputs, outputs);
    } else {
      backward.enqueue(inputs, outputs);
      backward.wait();
    }
    differ += dx != shard(given.dx);
    differ += halos && dinitial != of(backward.beginning(), given.dinitial);
    differ += !same(dweight, given.dweight) + !same(dbias, given.dbias);
  }
  return differ;
}

class Conv1dBackwardWorld : public ::testing::TestWithParam<int> {
 protected:
  static void expect_same(const GradientCase& given, const CausalConv1dOptions& options = gradients_on_cpu()) {
    std::atomic<std::int64_t> differ = 0;
    if (GetParam() > 1) {
      run_threads_world(GetParam(), {},
                        [&](Transport& world) { differ += differences_of_gradients(world, given, options); });
    } else {
      differ = differences_of_gradients(*make_self_transport(), given, options);
    }
    EXPECT_EQ(differ, 0) << describe(given.job.spec);
  }
};

// Sequences whose last run has fewer tokens than a halo, so that the final halo reaches into the rank before.
TEST_P(Conv1dBackwardWorld, HasTheBitsOfOneRank) {
  static const std::vector<GradientCase> cases{
      make_gradient_case(4, {2, kSuper + 1, 1, kSuper + 2, 3}), make_gradient_case(2, {2 * kSuper + 100, 1, 3}),
      make_gradient_case(3, {0, kSuper + 1, 0, 0, 2, 0}), make_gradient_case(4, {0, 0, 0}),
      make_gradient_case(4, {kSuper + 1, 5}, false)};
  for (const GradientCase& given : cases) expect_same(given);
}

TEST_P(Conv1dBackwardWorld, TakesRunsOfTheCallers) {
  static const GradientCase given = make_gradient_case(4, {5 * kSegmentTokens + 1, kSegmentTokens});
  CausalConv1dOptions options = gradients_on_cpu();
  options.runs = deal_segments(given.job.lengths, GetParam());
  expect_same(given, options);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Conv1dBackwardWorld, ::testing::Values(1, 2, 3, 5),
                         [](const auto& test) { return fmt::format("{}", test.param); });

TEST(Conv1dBackwardRefusals, NameWhatIsWrong) {
  const auto self = make_self_transport();
  CausalConv1dJob update = make_gradient_case(4, {1}).job;
  update.update = true;
  const Error error = error_of([&] { CausalConv1dBackward(update, *self, gradients_on_cpu()); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(error.what()).find("no gradients for an update"), std::string::npos) << error.what();
}

}  // namespace
}  // namespace ringattn::testing
