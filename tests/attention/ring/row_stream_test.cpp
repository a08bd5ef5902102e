// SPDX-License-Identifier: Apache-2.0
// Plans and workspaces know row streams and pairs, and nothing of attention: work with one stream, or with three, is
// cut and carried like any other.
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

// One latent, or K and V, or what a backward pass would send.
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

// Every stream's rows of every key come to lie where the plan says, beside the same token's rows of the other streams.
TEST(RowStreams, TravelTogether) {
  for (const RowStreams& streams : stream_lists()) {
    for (const Route route : {Route::kDirect, Route::kChain}) {
      ThreadsDelivery delivery;
      delivery.route = route;
      run_threads_world(kRanks, delivery, [&](Transport& world) {
        const RingWork work = work_of(streams);
        const JobLayout layout = layout_of(work);
        PlanOptions options;
        options.route = route;
        options.block_tokens = 256;
        options.checksum = true;
        const Plan plan = make_plan(work, layout, kKernel, {}, options, world.rank());
        const auto backend = choose_kernel(AttentionSpec{}, {"cpu", "auto"}).row->make_backend({1});

        // A byte of a row names its token and its stream.
        const auto mark = [](std::int64_t token, std::size_t stream) {
          return static_cast<std::byte>((token * 7 + static_cast<std::int64_t>(stream) * 101) % 251);
        };
        std::vector<std::vector<std::byte>> shard(streams.size());
        StreamRows own;
        for (std::size_t s = 0; s < streams.size(); ++s) {
          for (const std::int64_t token : layout.keys.packed_tokens(world.rank())) {
            shard[s].insert(shard[s].end(), static_cast<std::size_t>(streams[s].token_bytes), mark(token, s));
          }
          own.push_back(shard[s].data());
        }
        const WorkspaceLayout places = block_buffers_layout(streams, {plan.buffer_rows});
        std::vector<std::byte> memory(places.bytes);
        const std::array<StreamRows, 2> buffers{rows_at(memory.data(), places.buffers[0]),
                                                rows_at(memory.data(), places.buffers[1])};
        BlockMover mover(plan, streams, world, *backend, true);
        mover.bind(own, buffers);
        for (std::size_t b = 0; b < plan.blocks.size(); ++b) {
          const auto block = static_cast<std::int64_t>(b);
          mover.post(block, {});
          mover.wait(block, {}, Deadline::after(60.0));
          const BlockPlan& planned = plan.blocks[b];
          for (const KeyRun& run : planned.key_runs) {
            for (std::int64_t t = 0; t < run.tiles; ++t) {
              const PageRun& tile = planned.tiles[static_cast<std::size_t>(run.table + t)];
              const std::int64_t first = (run.first_tile + t) * kKernel.key_tile;
              for (std::int64_t token = first; token < std::min(first + kKernel.key_tile, kTokens); ++token) {
                for (std::size_t s = 0; s < streams.size(); ++s) {
                  const std::byte* rows = tile.source == kOwnShard ? own[s] : buffers[b % 2][s];
                  const std::byte* row = rows + (tile.row + token - first) * streams[s].token_bytes;
                  ASSERT_EQ(row[0], mark(token, s)) << streams[s].name << " of token " << token;
                  ASSERT_EQ(row[streams[s].token_bytes - 1], mark(token, s));
                }
              }
            }
          }
        }
        world.barrier(Deadline::after(60.0));
      });
    }
  }
}

}  // namespace
}  // namespace ringattn
