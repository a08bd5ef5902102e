// SPDX-License-Identifier: Apache-2.0
// Layers of two kinds on one set of shards: attention, and one with states, whose ranks have adjacent whole units of
// tokens, with rows that are moved between them or with one layout. And the moving of rows by itself.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <utility>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "ops/reshard/reshard.hpp"
#include "ops/ssm/ssm.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/hybrid_stack.hpp"

namespace ringattn::testing {
namespace {

SsmOptions ssm_options() {
  SsmOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

// O of the last layer, packed. `moved`: where the bytes that all ranks receive between the layers are added.
std::vector<std::byte> run_stack(const HybridStack& stack, int ranks, std::atomic<std::int64_t>* moved = nullptr) {
  std::vector<std::byte> packed(static_cast<std::size_t>(stack.packed_bytes()));
  run_threads_world(ranks, {}, [&](Transport& transport) {
    const std::int64_t received = run_hybrid_rank(stack, transport, packed);
    if (moved != nullptr) *moved += received;
  });
  return packed;
}

HybridStack with_layout(LayoutKind layout) {
  HybridStack stack;
  stack.layout = layout;
  return stack;
}

TEST(Hybrid, AttentionSsmAttentionHasTheSameBytesOnAnyNumberOfRanks) {
  const HybridStack striped;
  const std::vector<std::byte> one = run_stack(striped, 1);
  EXPECT_EQ(what_is_empty(striped, one), "");
  EXPECT_TRUE(run_stack(striped, 2) == one);
  EXPECT_TRUE(run_stack(striped, 3) == one);
  EXPECT_TRUE(run_stack(with_layout(LayoutKind::kZigzag), 3) == one);
}

// The stack on 2, 3 and 5 ranks, with rows that are moved between the layers and with one layout.
void expect_same_bytes(HybridStack stack) {
  const std::vector<std::byte> one = run_stack(stack, 1);
  EXPECT_EQ(what_is_empty(stack, one), "");
  for (const auto& [ranks, shared] : {std::pair{2, false}, {3, true}, {5, false}, {5, true}}) {
    stack.shared_runs = shared;
    std::atomic<std::int64_t> moved = 0;
    EXPECT_TRUE(run_stack(stack, ranks, &moved) == one) << ranks << " ranks, shared runs " << shared;
    EXPECT_EQ(moved == 0, shared) << ranks << " ranks";
  }
}

HybridStack with_gated_delta(const std::vector<std::int64_t>& lengths) {
  HybridStack stack;
  stack.middle = StateLayer::kGatedDelta;
  stack.lengths = lengths;
  return stack;
}

TEST(Hybrid, AttentionGatedDeltaAttentionHasTheSameBytesOnAnyNumberOfRanks) {
  // A sequence of several ranks, one of a whole segment and short ones.
  expect_same_bytes(with_gated_delta({3 * kSegmentTokens + 300, 517, kSegmentTokens, 90}));
  // Fewer segments than ranks, of which some have no tokens.
  expect_same_bytes(with_gated_delta({kSegmentTokens + 200, 300}));
  expect_same_bytes(with_gated_delta({700}));
}

TEST(Hybrid, AttentionLinearAttentionAttentionHasTheSameBytesOnAnyNumberOfRanks) {
  HybridStack stack;
  stack.middle = StateLayer::kLinearAttention;
  stack.lengths = {kSuperSegmentTokens + 300, 517};  // two ranks share the first; the others have no tokens
  stack.heads = stack.state_heads = 1;
  stack.dim = stack.state_head_dim = 8;
  expect_same_bytes(stack);
}

// Rows that name their tokens.
std::vector<std::int64_t> named_rows(const Layout& layout, int rank) { return layout.packed_tokens(rank); }

Layout random_layout(const std::vector<std::int64_t>& lengths, int ranks, std::mt19937_64& random) {
  std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(ranks));
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    for (std::int64_t begin = 0; begin < lengths[s];) {
      const std::int64_t end = std::min(lengths[s], begin + 1 + static_cast<std::int64_t>(random() % 40));
      runs[random() % runs.size()].push_back({static_cast<std::int32_t>(s), begin, end});
      begin = end;
    }
  }
  return {lengths, std::move(runs)};
}

TEST(Reshards, OfAnyLayoutsMoveEveryRowToItsPlace) {
  std::mt19937_64 random(5);
  const std::vector<std::int64_t> tokens{300, 7, 129};
  for (const int ranks : {1, 2, 3, 5}) {
    for (int round = 0; round < 5; ++round) {
      const Layout from = random_layout(tokens, ranks, random);
      const Layout to = random_layout(tokens, ranks, random);
      run_threads_world(ranks, {}, [&](Transport& transport) {
        const int rank = transport.rank();
        const SsmChoice choice = choose_kernel(SsmSpec{}, {"cpu", "auto"});
        const auto backend = choice.row->make_backend({1, kNoDevice});
        Reshard reshard(from, to, sizeof(std::int64_t), transport, *backend);
        EXPECT_EQ(reshard.bytes_received(),
                  reshard_bytes(from, to, sizeof(std::int64_t))[static_cast<std::size_t>(rank)]);
        const std::vector<std::int64_t> rows = named_rows(from, rank);
        // Twice, as layers do: what arrived first is not what arrives later.
        std::vector<std::int64_t> other = rows;
        for (std::int64_t& row : other) row += 1000;
        std::vector<std::int64_t> target(static_cast<std::size_t>(to.tokens(rank)), -1);
        std::vector<std::int64_t> later(target.size(), -1);
        reshard.enqueue(rows.data(), target.data());
        reshard.enqueue(other.data(), later.data());
        reshard.wait();
        const std::vector<std::int64_t> expected = named_rows(to, rank);
        EXPECT_EQ(target, expected) << ranks << " ranks, rank " << rank;
        for (std::size_t i = 0; i < later.size(); ++i) EXPECT_EQ(later[i], expected[i] + 1000);
      });
    }
  }
}

TEST(Reshards, OfOtherTokensRanksOrBytesAreRefused) {
  const auto transport = make_self_transport();
  const SsmChoice choice = choose_kernel(SsmSpec{}, {"cpu", "auto"});
  const auto backend = choice.row->make_backend({1, kNoDevice});
  const std::vector<std::int64_t> tokens{10};
  const std::vector<std::int64_t> others{11};
  const Layout here(tokens, {{{0, 0, 10}}});
  const Layout more(others, {{{0, 0, 11}}});
  const Layout two(tokens, {{{0, 0, 4}}, {{0, 4, 10}}});
  const auto refused = [&](const Layout& from, const Layout& to, std::int64_t bytes) {
    return error_of([&] { Reshard(from, to, bytes, *transport, *backend); }).code();
  };
  EXPECT_EQ(refused(here, more, 8), ErrorCode::kUsage);
  // Where both layouts have the same number of tokens, the message says what differs.
  const auto told = [&](const Layout& from, const Layout& to) {
    return std::string(error_of([&] { Reshard(from, to, 8, *transport, *backend); }).what());
  };
  const Layout parts(std::vector<std::int64_t>{4, 6}, {{{0, 0, 4}, {1, 0, 6}}});
  const Layout others_parts(std::vector<std::int64_t>{4, 5, 1}, {{{0, 0, 4}, {1, 0, 5}, {2, 0, 1}}});
  const Layout moved(std::vector<std::int64_t>{3, 7}, {{{0, 0, 3}, {1, 0, 7}}});
  EXPECT_EQ(told(here, more).find("sequence 0 has 10 tokens in one layout and 11 in the other ("), 0U);
  EXPECT_EQ(told(parts, moved).find("sequence 0 has 4 tokens in one layout and 3 in the other ("), 0U);
  EXPECT_EQ(told(parts, others_parts).find("layouts of 2 sequences and of 3 sequences ("), 0U);
  EXPECT_EQ(refused(two, two, 8), ErrorCode::kUsage);
  EXPECT_EQ(refused(here, here, 0), ErrorCode::kUsage);
  run_threads_world(2, {}, [&](Transport& ranks) {
    const Layout swapped(tokens, {{{0, 4, 10}}, {{0, 0, 4}}});
    const Layout& mine = ranks.rank() == 0 ? two : swapped;
    EXPECT_EQ(error_of([&] { Reshard(two, mine, 8, ranks, *backend); }).code(), ErrorCode::kUnsupported);
  });
}

TEST(Reshards, LetACallerScanItsOwnRuns) {
  // Runs that cut super-segments, which no SSM layout has, moved to those that it deals and back.
  const std::vector<std::int64_t> tokens{500, 300};
  std::mt19937_64 random(9);
  const Layout own = random_layout(tokens, 2, random);
  run_threads_world(2, {}, [&](Transport& transport) {
    SsmJob job;
    job.spec.dtype = Dtype::kF32;
    job.spec.heads = 1;
    job.spec.head_dim = 8;
    job.spec.state_dim = 8;
    job.lengths = tokens;
    SsmOptions stated = ssm_options();
    stated.runs = std::vector<std::vector<TokenRun>>{{own.runs(0).begin(), own.runs(0).end()},
                                                     {own.runs(1).begin(), own.runs(1).end()}};
    EXPECT_EQ(error_of([&] { Ssm(job, transport, stated); }).code(), ErrorCode::kUsage);
    Ssm scan(job, transport, ssm_options());
    Reshard there(own, scan.layout(), 32, transport, scan.backend());
    Reshard back(scan.layout(), own, 32, transport, scan.backend());
    const std::vector<float> ones(static_cast<std::size_t>(own.tokens(transport.rank()) * 8), 1.0F);
    std::vector<float> x(static_cast<std::size_t>(scan.layout().tokens(transport.rank()) * 8));
    std::vector<float> y(x.size());
    std::vector<float> result(ones.size());
    const float a = 0.0F;
    const std::int64_t rows = scan.layout().tokens(transport.rank());
    const auto view = [&](std::vector<float>& data, std::int64_t dim) {
      return dense_view(static_cast<void*>(data.data()), Dtype::kF32, rows, 1, dim);
    };
    there.enqueue(ones.data(), x.data());
    std::vector<float> dt(static_cast<std::size_t>(rows), 1.0F);
    scan.enqueue({.x = view(x, 8), .dt = view(dt, 1), .b = view(x, 8), .c = view(x, 8), .a = &a}, {.y = view(y, 8)});
    back.enqueue(y.data(), result.data());
    back.wait();
    scan.wait();
    there.wait();
    const std::vector<std::int64_t> positions = own.positions(transport.rank());
    for (std::size_t i = 0; i < positions.size(); ++i) {
      EXPECT_EQ(result[8 * i], 8.0F * static_cast<float>(positions[i] + 1));  // each y counts the tokens up to its own
    }
  });
}

}  // namespace
}  // namespace ringattn::testing
