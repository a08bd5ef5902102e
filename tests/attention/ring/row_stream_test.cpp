// SPDX-License-Identifier: Apache-2.0
// Plans and workspaces know row streams and pairs, and nothing of attention: work with one stream, with three, or with
// streams of keys and of queries, is cut and carried like any other.
#include "attention/ring/row_stream.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "attention/ring/block_mover.hpp"
#include "attention/ring/plan.hpp"
#include "attention/ring/workspace.hpp"
#include "attention/tokens/layout.hpp"
#include "comm/threads.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {
namespace {

constexpr std::int64_t kTokens = 1000;
constexpr int kRanks = 3;
constexpr KernelShape kKernel{64, 1};

RingWork work_of(RowStreams streams) { return {uniform_batch(1, kTokens, kTokens), {-1, 0}, std::move(streams), 10.0}; }

JobLayout layout_of(const RingWork& work) {
  return make_layout(
      work.batch, [](const TokenRun& run) { return static_cast<double>(run.tokens()); }, kRanks, {}, 1,
      kKernel.key_tile);
}

// One latent, or K and V, or three streams.
std::vector<RowStreams> stream_lists() {
  return {{{"latent", 1152}}, {{"k", 256}, {"v", 128}}, {{"q", 512}, {"do", 512}, {"lse", 16}}};
}

TEST(RowStreams, PlansCountTheBytesOfAllStreams) {
  PlanOptions options;
  options.block_tokens = 256;
  const RingWork one_byte = work_of({{"unit", 1}});
  const JobLayout layout = layout_of(one_byte);
  const Planner units(one_byte, layout, kKernel, {}, options);
  for (const RowStreams& streams : stream_lists()) {
    const std::int64_t bytes = token_bytes(streams);
    const Planner planner(work_of(streams), layout, kKernel, {}, options);
    ASSERT_EQ(planner.boundaries(), units.boundaries());
    for (int rank = 0; rank < kRanks; ++rank) {
      const Plan plan = planner.plan(rank);
      const Plan unit = units.plan(rank);
      EXPECT_GT(plan.bytes_received(), 0);
      EXPECT_EQ(plan.bytes_received(), bytes * unit.bytes_received());
      EXPECT_EQ(plan.bytes_sent(), bytes * unit.bytes_sent());
      EXPECT_EQ(plan.block_buffer_bytes, static_cast<std::size_t>(bytes * plan.buffer_rows));
      EXPECT_EQ(plan.flops(), unit.flops());
    }
  }
}

TEST(RowStreams, PairsCostWhatTheWorkSays) {
  RingWork work = work_of({{"latent", 1152}});
  const JobLayout layout = layout_of(work);
  const auto flops = [&] {
    const Planner planner(work, layout, kKernel, {}, {});
    double sum = 0.0;
    for (int rank = 0; rank < kRanks; ++rank) sum += planner.plan(rank).flops();
    return sum;
  };
  EXPECT_EQ(flops(), 10.0 * kTokens * (kTokens + 1) / 2);
  work.pair_flops = 3.0;
  EXPECT_EQ(flops(), 3.0 * kTokens * (kTokens + 1) / 2);
}

TEST(RowStreams, WorkspacesHoldEach) {
  for (const RowStreams& streams : stream_lists()) {
    const WorkspaceLayout layout = workspace_layout(streams, 100, {7}, {3});
    std::size_t at = 256;  // after the state, aligned
    const auto next = [&](std::int64_t rows, const RowStream& stream) {
      const std::size_t here = at;
      at += (static_cast<std::size_t>(rows * stream.token_bytes) + 255) / 256 * 256;
      return here;
    };
    for (const auto& buffer : layout.buffers) {
      ASSERT_EQ(buffer.size(), streams.size());
      for (std::size_t s = 0; s < streams.size(); ++s) EXPECT_EQ(buffer[s], next(7, streams[s]));
    }
    ASSERT_EQ(layout.staged.size(), streams.size());
    for (std::size_t s = 0; s < streams.size(); ++s) EXPECT_EQ(layout.staged[s], next(3, streams[s]));
    EXPECT_EQ(layout.bytes, at);
  }
}

TEST(RowStreams, WorkspacesCountKeysAndQueries) {
  const RowStreams streams{{"k", 100}, {"q", 300, true}};
  const WorkspaceLayout layout = workspace_layout(streams, 0, {7, 2}, {1, 5});
  // 7 keys take 700 bytes, 2 queries 600; in the copy 1 key takes 100 and 5 queries 1500. All are aligned to 256.
  EXPECT_EQ(layout.buffers[0], (std::vector<std::size_t>{0, 768}));
  EXPECT_EQ(layout.buffers[1], (std::vector<std::size_t>{1536, 2304}));
  EXPECT_EQ(layout.staged, (std::vector<std::size_t>{3072, 3328}));
  EXPECT_EQ(layout.bytes, 4864U);
  EXPECT_EQ(block_buffers_layout(streams, {7, 2}).bytes, 3072U);
  EXPECT_EQ(token_bytes(streams), 100);
  EXPECT_EQ(token_bytes(streams, /*queries=*/true), 300);
}

TEST(RowStreams, DivideTheWorkByDirection) {
  RingWork work{Batch{{100, 50, 70}}, {5, 7}, {{"k", 10}, {"q", 20, true}, {"v", 30}}, 3.0};
  work.query_pair_flops = 4.0;
  work.query_flops = 6.0;
  const RingWork keys = keys_to_queries(work);
  EXPECT_EQ(keys.batch, work.batch);
  EXPECT_EQ(keys.streams, (RowStreams{{"k", 10}, {"v", 30}}));
  EXPECT_EQ(keys.pair_flops, 3.0);
  EXPECT_EQ(keys.query_flops, 6.0);
  EXPECT_FALSE(keys.sends_queries());
  const RingWork queries = queries_to_keys(work, 64);
  EXPECT_EQ(queries.batch, (Batch{{50, 106, -64, 6}}));
  EXPECT_EQ(queries.mask, (Mask{7, 5}));
  EXPECT_EQ(queries.streams, (RowStreams{{"q", 20}}));
  EXPECT_EQ(queries.pair_flops, 4.0);
  EXPECT_EQ(queries.query_flops, 0.0);
}

constexpr KernelShape kBothKernel{128, 64};

// With a causal mask and contiguous shards, keys travel to later ranks and queries to earlier ones.
TEST(RowStreams, QueriesTravelOppositeToKeys) {
  const RingWork work{uniform_batch(1, 1024, 1024), {-1, 0}, {{"k", 10}, {"q", 20, true}}, 3.0};
  const auto pairs = [](const TokenRun& run) { return static_cast<double>(run.tokens()); };
  const JobLayout layout = make_layout(work.batch, pairs, 2, {LayoutKind::kContiguous, 0}, 64, 128);
  const Planner planner(work, layout, kBothKernel, {}, {});
  for (int rank = 0; rank < 2; ++rank) {
    const Plan plan = planner.plan(rank);
    EXPECT_EQ(plan.bytes_received(), rank == 0 ? 512 * 20 : 512 * 10);
    EXPECT_EQ(plan.bytes_sent(), rank == 0 ? 512 * 10 : 512 * 20);
    EXPECT_EQ(plan.to_keys->bytes_received(), rank == 0 ? 512 * 20 : 0);
    EXPECT_EQ(plan.to_keys->queries, (std::vector<QueryRun>{{0, rank * 512, 0, 512}}));
  }
}

// What is computed once for each query counts in the first block, though several blocks have no key.
TEST(RowStreams, FlopsOfQueriesAreCountedOnce) {
  RingWork work{Batch{{400, 128, -256}}, {0, 0}, {{"k", 10}, {"q", 20, true}}, 3.0};
  work.query_pair_flops = 4.0;
  work.query_flops = 1000.0;
  PlanOptions options;
  options.block_tokens = 128;
  const JobLayout layout = make_layout(
      work.batch, [](const TokenRun& run) { return static_cast<double>(run.tokens()); }, 1, {}, 64, 128);
  const Plan plan = make_plan(work, layout, kBothKernel, {}, options, 0);
  ASSERT_EQ(plan.blocks.size(), 4U);
  EXPECT_EQ(plan.block_flops(0), 400 * 1000.0);
  EXPECT_EQ(plan.block_flops(1), 0.0);
  EXPECT_EQ(plan.block_flops(2), 128 * (3.0 + 4.0));
  EXPECT_EQ(plan.block_flops(3), 0.0);
}

// The window reaches 10 positions, so keys 0 … 63 see no query at 75 … 94, though they would see the first positions of
// the queries' first tile.
TEST(RowStreams, AnIncompleteTileIsNeededOnlyForItsQueries) {
  const RingWork work{Batch{{20, 64, 75}}, {10, 0}, {{"k", 10}, {"q", 20, true}}, 3.0};
  const JobLayout layout = make_layout(
      work.batch, [](const TokenRun& run) { return static_cast<double>(run.tokens()); }, 1, {}, 64, 64);
  EXPECT_TRUE(make_plan(work, layout, {64, 64}, {}, {}, 0).to_keys->blocks[0].key_runs.empty());
  RingWork wider = work;
  wider.mask.left = 12;
  EXPECT_EQ(make_plan(wider, layout, {64, 64}, {}, {}, 0).to_keys->blocks[0].key_runs.size(), 1U);
}

// The tokens that travel in one direction of a work with one sequence.
struct TravellingTokens {
  bool queries = false;
  std::int64_t tokens = 0;
  std::int64_t tile = 0;
  std::int64_t absent = 0;  // positions of the first tile without a token
};

// A byte of a row names its token and its stream.
std::byte mark(std::int64_t token, std::size_t stream) {
  return static_cast<std::byte>((token * 7 + static_cast<std::int64_t>(stream) * 101) % 251);
}

// The rows of the block's tiles are where the plan says, in every stream of the direction.
void expect_rows(const BlockPlan& planned, const TravellingTokens& travelling, const RowStreams& streams,
                 const StreamRows& own, const StreamRows& buffer) {
  for (const KeyRun& run : planned.key_runs) {
    for (std::int64_t t = 0; t < run.tiles; ++t) {
      const PageRun& tile = planned.tiles[static_cast<std::size_t>(run.table + t)];
      const std::int64_t begin = (run.first_tile + t) * travelling.tile - travelling.absent;
      const std::int64_t first = std::max<std::int64_t>(0, begin);
      for (std::int64_t token = first; token < std::min(begin + travelling.tile, travelling.tokens); ++token) {
        for (std::size_t s = 0; s < streams.size(); ++s) {
          if (streams[s].queries != travelling.queries) continue;
          const std::byte* rows = tile.source == kOwnShard ? own[s] : buffer[s];
          const std::byte* row = rows + (tile.row + token - first) * streams[s].token_bytes;
          ASSERT_EQ(row[0], mark(token, s)) << streams[s].name << " of token " << token;
          ASSERT_EQ(row[streams[s].token_bytes - 1], mark(token, s));
        }
      }
    }
  }
}

// Exchanges the blocks of a work with one sequence between ranks that are threads. `queries` is null if only keys
// travel.
void expect_travel(const RingWork& work, const KernelShape& kernel, const TravellingTokens& keys,
                   const TravellingTokens* queries, Route route, bool checksum) {
  ThreadsDelivery delivery;
  delivery.route = route;
  run_threads_world(kRanks, delivery, [&](Transport& world) {
    const JobLayout layout = make_layout(
        work.batch, [](const TokenRun& run) { return static_cast<double>(run.tokens()); }, kRanks, {}, 1,
        kernel.key_tile);
    PlanOptions options;
    options.route = route;
    options.block_tokens = 256;
    options.checksum = checksum;
    const Plan plan = make_plan(work, layout, kernel, {}, options, world.rank());
    ASSERT_GT(plan.blocks.size(), 2U);
    const auto backend = choose_kernel(AttentionSpec{}, {"cpu", "auto"}).row->make_backend({1});

    const RowStreams& streams = work.streams;
    std::vector<std::vector<std::byte>> shard(streams.size());
    StreamRows own;
    for (std::size_t s = 0; s < streams.size(); ++s) {
      const Layout& tokens = streams[s].queries ? layout.queries : layout.keys;
      for (const std::int64_t token : tokens.packed_tokens(world.rank())) {
        shard[s].insert(shard[s].end(), static_cast<std::size_t>(streams[s].token_bytes), mark(token, s));
      }
      own.push_back(shard[s].data());
    }
    const WorkspaceLayout offsets = block_buffers_layout(streams, plan.all_buffer_rows());
    std::vector<std::byte> memory(offsets.bytes);
    const std::array<StreamRows, 2> buffers{rows_at(memory.data(), offsets.buffers[0]),
                                            rows_at(memory.data(), offsets.buffers[1])};
    BlockMover mover(plan, streams, world, *backend, checksum);
    mover.bind(own, buffers);
    for (std::size_t b = 0; b < plan.blocks.size(); ++b) {
      const auto block = static_cast<std::int64_t>(b);
      mover.post(block, {});
      mover.wait(block, {}, Deadline::after(60.0));
      expect_rows(plan.blocks[b], keys, streams, own, buffers[b % 2]);
      if (queries != nullptr) expect_rows(plan.to_keys->blocks[b], *queries, streams, own, buffers[b % 2]);
    }
    world.barrier(Deadline::after(60.0));
  });
}

// Every stream's rows of every key come to lie where the plan says, beside the same token's rows of the other streams.
TEST(RowStreams, TravelTogether) {
  for (const RowStreams& streams : stream_lists()) {
    for (const Route route : {Route::kDirect, Route::kChain}) {
      expect_travel(work_of(streams), kKernel, {false, kTokens, kKernel.key_tile}, nullptr, route, /*checksum=*/true);
    }
  }
}

// Queries at −37 … 962 begin 27 positions after their first tile does, at −64.
TEST(RowStreams, TravelInBothDirections) {
  const RowStreams streams{{"k", 256}, {"q", 512, true}, {"v", 128}, {"dout", 384, true}, {"row_stats", 16, true}};
  const TravellingTokens keys{false, 1300, 128};
  const TravellingTokens queries{true, 1000, 64, 27};
  for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}, Mask{100, 30}}) {
    const RingWork work{Batch{{queries.tokens, keys.tokens, -37}}, mask, streams, 10.0};
    for (const Route route : {Route::kDirect, Route::kChain}) {
      for (const bool checksum : {false, true}) {
        expect_travel(work, kBothKernel, keys, &queries, route, checksum);
      }
    }
  }
}

}  // namespace
}  // namespace ringattn
