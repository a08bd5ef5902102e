// SPDX-License-Identifier: Apache-2.0
// A Scan on 1 to 8 ranks gives the bits of the kernel on all tokens, by memcmp of y and of final states.
#include "attention/scan.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/scan_data.hpp"

namespace ringattn::testing {
namespace {

ScanSpec small_spec(int heads, bool selective) {
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

ScanOptions on_cpu() {
  ScanOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

// Inputs and what the kernel makes of all of them.
struct Case {
  ScanData inputs;
  ScanResult expected;
};

Case make_case(const ScanSpec& spec, const std::vector<std::int64_t>& lengths, bool initial, std::uint64_t seed) {
  Case made{with_slow_decays(random_scan(spec, lengths, seed)), {}};
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

ScanJob job_of(const Case& given) {
  return {given.inputs.spec, given.inputs.lengths, !given.inputs.initial.empty(), true};
}

// One rank's rows and states, in host memory.
class ScanRank {
 public:
  ScanRank(const Scan& scan, int rank, const Case& given) : scan_(scan), rank_(rank), given_(given) {
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
  const Case& given_;
  std::vector<std::byte> x_, dt_, b_, c_, z_, y_;
  std::vector<float> initial_, finals_;
};

class ScanWorld : public ::testing::TestWithParam<int> {
 protected:
  static int ranks() { return GetParam(); }
  static void in_world(const std::function<void(Transport&)>& rank_main, const ThreadsDelivery& delivery = {}) {
    if (ranks() > 1) {
      run_threads_world(ranks(), delivery, rank_main);
    } else {
      rank_main(*make_self_transport());
    }
  }

  static void expect_same(const Case& given, const ScanOptions& options = on_cpu(),
                          const ThreadsDelivery& delivery = {}) {
    std::atomic<std::int64_t> differ = 0;
    std::atomic<std::int64_t> tokens = 0;
    in_world(
        [&](Transport& world) {
          Scan scan(job_of(given), world, options);
          ScanRank rank(scan, world.rank(), given);
          scan.run(rank.inputs(), rank.outputs());
          differ += rank.differences();
          tokens += scan.layout().tokens(world.rank());
        },
        delivery);
    EXPECT_EQ(differ, 0);
    EXPECT_EQ(tokens, given.inputs.rows());
  }
};

constexpr std::int64_t kSuper = kSuperSegmentTokens;

TEST_P(ScanWorld, OneLongSequence) {
  static const Case given = make_case(small_spec(3, false), {5 * kSuper + 777}, true, 1);
  expect_same(given);
}

TEST_P(ScanWorld, SequencesThatEndOnAndInsideOfShards) {
  static const Case given =
      make_case(small_spec(2, false), {70'000, 1, 2 * kSuper, 100, kSuper + 64, 3, kSuper}, true, 2);
  expect_same(given);
  expect_same(given, on_cpu(), {.shuffle_seed = 7, .max_delay = std::chrono::microseconds(300)});
}

TEST_P(ScanWorld, SelectiveScans) {
  static const Case given = make_case(small_spec(16, true), {3 * kSuper + 5, 40, kSuper + 1}, true, 3);
  expect_same(given);
}

TEST_P(ScanWorld, FewerSuperSegmentsThanRanks) {
  static const Case given = make_case(small_spec(2, false), {3000, 65}, false, 4);
  expect_same(given);
}

// One rank's super-segments need not be neighbours: states then go back and forth.
TEST_P(ScanWorld, RunsOfTheCallers) {
  static const Case given = make_case(small_spec(2, false), {4 * kSuper + 9, kSuper + 70}, true, 5);
  for (const bool backwards : {false, true}) {
    ScanOptions options = on_cpu();
    options.runs.emplace(static_cast<std::size_t>(ranks()));
    int next = 0;
    for (std::size_t s = 0; s < given.inputs.lengths.size(); ++s) {
      for (std::int64_t begin = 0; begin < given.inputs.lengths[s]; begin += kSuper) {
        const int rank = backwards ? ranks() - 1 - next % ranks() : next % ranks();
        (*options.runs)[static_cast<std::size_t>(rank)].push_back(
            {static_cast<std::int32_t>(s), begin, std::min(given.inputs.lengths[s], begin + kSuper)});
        ++next;
      }
    }
    expect_same(given, options);
  }
}

TEST_P(ScanWorld, LayersThatAreEnqueued) {
  static const Case given = make_case(small_spec(2, false), {2 * kSuper + 100, 700}, true, 6);
  std::atomic<std::int64_t> differ = 0;
  in_world([&](Transport& world) {
    Scan scan(job_of(given), world, on_cpu());
    ScanRank first(scan, world.rank(), given);
    ScanRank second(scan, world.rank(), given);
    for (int round = 0; round < 2; ++round) {
      scan.enqueue(first.inputs(), first.outputs());
      scan.enqueue(second.inputs(), second.outputs());
      scan.wait();
      differ += first.differences() + second.differences();
      first.clear();
      second.clear();
    }
    scan.wait();  // for nothing
  });
  EXPECT_EQ(differ, 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ScanWorld, ::testing::Values(1, 2, 3, 4, 5, 7, 8),
                         [](const auto& test) { return fmt::format("{}", test.param); });

void expect_message(const Error& error, ErrorCode code, const std::vector<std::string>& parts) {
  EXPECT_EQ(error.code(), code) << error.what();
  for (const std::string& part : parts) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\nlacks: " << part;
  }
}

TEST(ScanRefusals, JobsThatContradictThemselves) {
  const auto self = make_self_transport();
  const ScanJob good{small_spec(2, false), {100, 5}};
  const auto refused = [&](const std::function<void(ScanJob&, ScanOptions&)>& spoil, ErrorCode code,
                           const std::vector<std::string>& parts) {
    ScanJob job = good;
    ScanOptions options = on_cpu();
    spoil(job, options);
    expect_message(error_of([&] { Scan(job, *self, options); }), code, parts);
  };
  Scan(good, *self, on_cpu());
  refused([](ScanJob& job, ScanOptions&) { job.lengths.clear(); }, ErrorCode::kUsage, {"no sequences"});
  refused([](ScanJob& job, ScanOptions&) { job.lengths[1] = 0; }, ErrorCode::kUsage, {"sequence 1", "0 tokens"});
  refused([](ScanJob& job, ScanOptions&) { job.spec.groups = 4; }, ErrorCode::kUsage, {"not a multiple"});
  refused([](ScanJob& job, ScanOptions&) { job.spec.head_dim = 12; }, ErrorCode::kUnsupported, {"head_dim 12"});
  refused([](ScanJob&, ScanOptions& options) { options.memory_budget = 1000; }, ErrorCode::kMemory, {"1000 bytes"});
  refused(
      [](ScanJob&, ScanOptions& options) {
        options.runs = {{{0, 0, 100}}, {{1, 0, 5}}};
      },
      ErrorCode::kUsage, {"runs of 2 ranks"});
  refused(
      [](ScanJob&, ScanOptions& options) {
        options.runs = {{{0, 0, 100}}};
      },
      ErrorCode::kUsage, {"token 0 of sequence 1 belongs to no rank"});
}

TEST(ScanRefusals, RunsThatCutASuperSegment) {
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    ScanOptions options = on_cpu();
    options.runs = {{{0, 0, 64}}, {{0, 64, 100}}};
    const Error error = error_of([&] { Scan({small_spec(2, false), {100}}, world, options); });
    expect_message(error, ErrorCode::kUsage, {"rank 1 begins at token 64 of sequence 0", "65536"});
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

// A rank that passes wrong tensors alone: all of them hear of it, and the object stays of use.
TEST(ScanRefusals, TensorsOfTheWrongShape) {
  const Case given = make_case(small_spec(2, false), {kSuper + 100, 30}, false, 8);
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    Scan scan(job_of(given), world, on_cpu());
    ScanRank rank(scan, world.rank(), given);
    ScanInputs wrong = rank.inputs();
    if (world.rank() == 1) wrong.b.heads = 2;
    expect_message(error_of([&] { scan.run(wrong, rank.outputs()); }), ErrorCode::kUsage, {"B is bf16 [", "rank 1"});
    wrong = rank.inputs();
    if (world.rank() == 0) wrong.d = nullptr;
    expect_message(error_of([&] { scan.run(wrong, rank.outputs()); }), ErrorCode::kUsage, {"D is missing"});
    scan.run(rank.inputs(), rank.outputs());
    EXPECT_EQ(rank.differences(), 0);
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

TEST(ScanRefusals, UnlikeRanks) {
  std::atomic<int> refused = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    ScanJob job{small_spec(2, false), {100}};
    if (world.rank() == 1) job.spec.dt_most = 0.1F;
    EXPECT_EQ(error_of([&] { Scan(job, world, on_cpu()); }).code(), ErrorCode::kUnsupported);
    ++refused;
  });
  EXPECT_EQ(refused, 2);
}

}  // namespace
}  // namespace ringattn::testing
