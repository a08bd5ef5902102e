// SPDX-License-Identifier: Apache-2.0
// The plan of one rank, from the message parts of all ranks (message_parts.hpp): its messages, the rows of its block
// buffer, and the address of every tile that it attends to.
#include "attention/ring/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "attention/ring/blocks.hpp"
#include "attention/ring/message_parts.hpp"
#include "attention/ring/needs.hpp"
#include "attention/tokens/tile_axis.hpp"
#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

namespace {

// A part that a rank sends or receives in a round. The ring distance to the peer orders the messages of a round.
struct Hop {
  int round;
  int distance;
  int peer;
  std::int32_t part;
};

std::vector<PlannedMessage> messages(std::vector<Hop> hops) {
  std::sort(hops.begin(), hops.end(), [](const Hop& a, const Hop& b) {
    return std::tie(a.round, a.distance, a.part) < std::tie(b.round, b.distance, b.part);
  });
  std::vector<PlannedMessage> result;
  for (const Hop& hop : hops) {
    if (result.empty() || result.back().round != hop.round || result.back().peer != hop.peer) {
      result.push_back({hop.peer, hop.round, {}});
    }
    result.back().parts.push_back(hop.part);
  }
  return result;
}

// Plans one block of one rank.
class BlockPlanner {
 public:
  BlockPlanner(const RingWork& work, const JobLayout& layout, const TileAxis& axis, const Needs& needs,
               const PlanOptions& options, int rank)
      : work_(work), layout_(layout), axis_(axis), needs_(needs), options_(options), rank_(rank) {}

  BlockPlan plan(std::int64_t first_tile, std::int64_t last_tile, std::span<const WorldMessagePart> parts,
                 std::span<const RankSet> sets) const {
    BlockPlan block;
    block.first_token = axis_.token(first_tile);
    block.last_token = axis_.token(last_tile);
    plan_transfers(parts, sets, block);
    plan_tiles(first_tile, last_tile, block);
    block.flops = flops(block);
    if (first_tile == 0) block.flops += work_.query_flops * static_cast<double>(layout_.queries.tokens(rank_));
    return block;
  }

 private:
  int distance(int from, int to) const { return (to - from + needs_.world()) % needs_.world(); }

  void plan_transfers(std::span<const WorldMessagePart> parts, std::span<const RankSet> sets, BlockPlan& block) const {
    std::vector<Hop> sends;
    std::vector<Hop> receives;
    const auto send = [&](int peer, int round) {
      sends.push_back({round, distance(rank_, peer), peer, static_cast<std::int32_t>(block.parts.size())});
    };
    for (const WorldMessagePart& part : parts) {
      const RankSet& receivers = sets[static_cast<std::size_t>(part.receivers)];
      if (part.owner == rank_) {
        int peer = receivers.first_between(rank_, rank_);
        for (; peer >= 0; peer = part.chain ? -1 : receivers.first_between(peer, rank_)) send(peer, part.first_round);
        block.parts.push_back({part.owner, part.row, part.rows, -1});
      } else if (receivers.contains(rank_)) {
        int source = part.owner;
        int round = part.first_round;
        if (part.chain) {
          const int before = receivers.count_between(part.owner, rank_);
          if (before > 0) source = receivers.last_between(part.owner, rank_);
          round += before;
          const int next = receivers.first_between(rank_, part.owner);
          if (next >= 0) send(next, round + 1);
        }
        receives.push_back({round, distance(source, rank_), source, static_cast<std::int32_t>(block.parts.size())});
        block.parts.push_back({part.owner, part.row, part.rows, block.buffer_rows});
        block.buffer_rows += part.rows;
      }
    }
    block.bytes_sent = bytes(sends, block);
    block.bytes_received = bytes(receives, block);
    block.sends = messages(std::move(sends));
    block.receives = messages(std::move(receives));
  }

  std::int64_t bytes(std::span<const Hop> hops, const BlockPlan& block) const {
    std::int64_t sum = 0;
    for (const Hop& hop : hops) {
      sum += block.parts[static_cast<std::size_t>(hop.part)].rows * token_bytes(work_.streams);
      if (options_.checksum) sum += kChecksumBytes;
    }
    return sum;
  }

  // Address of a row that the rank owns or has received.
  struct RowAddress {
    std::int32_t source;
    std::int64_t row;
  };

  RowAddress row_address(const OwnedRun& run, std::int64_t token, const BlockPlan& block) const {
    const std::int64_t row = run.row + token - run.token;
    if (run.owner == rank_) return {kOwnShard, row};
    // The rank needs all rows of this tile, so it has received them, in the last part that begins at or before `row`.
    const auto after = std::partition_point(block.parts.begin(), block.parts.end(), [&](const MessagePart& part) {
      return std::tie(part.owner, part.owner_row) <= std::tie(run.owner, row);
    });
    const MessagePart& part = *std::prev(after);
    return {kBlockBuffer, part.buffer_row + row - part.owner_row};
  }

  void plan_tiles(std::int64_t first_tile, std::int64_t last_tile, BlockPlan& block) const {
    for (const TileRange& span : needs_.spans(rank_, first_tile, last_tile)) {
      const std::span<const OwnedRun> owners = layout_.keys.owners();
      const std::int64_t first_token = axis_.token(span.begin);
      auto run =
          std::partition_point(owners.begin(), owners.end(), [&](const OwnedRun& r) { return r.end() <= first_token; });
      std::int32_t sequence = axis_.sequence(span.begin);
      for (std::int64_t tile = span.begin; tile < span.end; ++tile) {
        const bool next_sequence = tile >= axis_.first(sequence + 1);
        if (next_sequence) sequence = axis_.sequence(tile);
        if (tile == span.begin || next_sequence) {
          block.key_runs.push_back(
              {sequence, tile - axis_.first(sequence), 0, static_cast<std::int64_t>(block.tiles.size())});
        }
        ++block.key_runs.back().tiles;
        while (run->end() <= axis_.token(tile)) ++run;
        block.tiles.push_back(tile_address(&*run, axis_.token(tile), axis_.token(tile + 1), block));
      }
    }
  }

  // The address of the keys [begin, end) of one tile. If they are not contiguous, copies them together first. `run` is
  // the run of the first key.
  PageRun tile_address(const OwnedRun* run, std::int64_t begin, std::int64_t end, BlockPlan& block) const {
    std::vector<std::pair<RowAddress, std::int64_t>> runs_of_rows;  // with their numbers of rows
    for (std::int64_t token = begin; token < end; ++run) {
      const RowAddress at = row_address(*run, token, block);
      const std::int64_t rows = std::min(end, run->end()) - token;
      token += rows;
      if (!runs_of_rows.empty()) {
        auto& [last, last_rows] = runs_of_rows.back();
        if (last.source == at.source && last.row + last_rows == at.row) {
          last_rows += rows;
          continue;
        }
      }
      runs_of_rows.emplace_back(at, rows);
    }
    if (runs_of_rows.size() == 1) return {runs_of_rows[0].first.source, runs_of_rows[0].first.row};
    const std::int64_t assembled = block.buffer_rows;
    for (const auto& [from, rows] : runs_of_rows)
      add_copy({from.source == kOwnShard, from.row, block.buffer_rows, rows}, block);
    return {kBlockBuffer, assembled};
  }

  // Appends a copy to the next free rows of the buffer. Merges it with the last copy if both are contiguous.
  static void add_copy(const RowCopy& copy, BlockPlan& block) {
    block.buffer_rows += copy.rows;
    if (!block.copies.empty()) {
      RowCopy& last = block.copies.back();
      if (last.from_shard == copy.from_shard && last.from_row + last.rows == copy.from_row) {
        last.rows += copy.rows;
        return;
      }
    }
    block.copies.push_back(copy);
  }

  double flops(const BlockPlan& block) const {
    const std::span<const TokenRun> queries = layout_.queries.runs(rank_);
    double pairs = 0.0;
    auto run = queries.begin();
    for (std::size_t i = 0; i < block.key_runs.size(); ++i) {
      const std::int32_t sequence = block.key_runs[i].sequence;
      if (i > 0 && block.key_runs[i - 1].sequence == sequence) continue;
      const Sequence& s = work_.batch.sequences[static_cast<std::size_t>(sequence)];
      const std::int64_t origin = layout_.keys.cu()[static_cast<std::size_t>(sequence)];
      const KeyRange keys{std::max<std::int64_t>(0, block.first_token - origin),
                          std::min(s.k_len, block.last_token - origin)};
      run = std::partition_point(run, queries.end(), [&](const TokenRun& r) { return r.sequence < sequence; });
      for (; run != queries.end() && run->sequence == sequence; ++run) {
        const std::int64_t position = s.q_offset + run->begin;
        const auto of = static_cast<std::size_t>(sequence);
        pairs += work_.block_mask == nullptr
                     ? work_.visibility(of).pairs(position, run->tokens(), keys)
                     : masked_pairs(*work_.block_mask, work_.mask, of, position, run->tokens(), keys);
      }
    }
    return pairs * work_.pair_flops + work_.key_flops * static_cast<double>(keys_of(block));
  }

  // Number of keys of the rank's task.
  std::int64_t keys_of(const BlockPlan& block) const {
    std::int64_t keys = 0;
    for (const KeyRun& run : block.key_runs) {
      const std::int64_t first = axis_.first(run.sequence) + run.first_tile;
      keys += axis_.token(first + run.tiles) - axis_.token(first);
    }
    return keys;
  }

  const RingWork& work_;
  const JobLayout& layout_;
  const TileAxis& axis_;
  const Needs& needs_;
  const PlanOptions& options_;
  int rank_;
};

void check_layout(const Batch& batch, const JobLayout& layout) {
  if (layout.queries.world() != layout.keys.world()) {
    fail(ErrorCode::kUsage, fmt::format("queries on {} ranks, keys on {}", layout.queries.world(), layout.keys.world()),
         "both layouts are of one world", "Make both for the same number of ranks.");
  }
  const auto check = [](std::string_view what, std::span<const std::int64_t> stated,
                        const std::vector<std::int64_t>& expected) {
    if (std::equal(stated.begin(), stated.end(), expected.begin(), expected.end())) return;
    fail(ErrorCode::kUsage,
         fmt::format("the layout of the {} holds {} tokens in {}", what, stated.back(),
                     counted(stated.size() - 1, "sequence")),
         fmt::format("the job has {} in {}, or divides them otherwise", expected.back(), expected.size() - 1),
         "Make the layout from the lengths of the job's sequences.");
  };
  check("queries", layout.queries.cu(), batch.cu_q());
  check("keys", layout.keys.cu(), batch.cu_k());
}

}  // namespace

// The common parts of all ranks' plans.
struct Planner::Shared {
  Shared(RingWork the_work, const JobLayout& the_layout, const KernelShape& the_kernel, const MachineModel& machine,
         const PlanOptions& the_options)
      : work(std::move(the_work)),
        layout(the_layout),
        kernel(the_kernel),
        options(the_options),
        axis(work.batch, kernel.key_tile),
        needs(work, layout, axis, kernel.query_tile, kernel.key_tile),
        tile_boundaries(cut_blocks(work, axis, needs, kernel, machine, options)),
        parts(cut_message_parts(axis, needs, layout.keys, tile_boundaries, options.route, machine,
                                token_bytes(work.streams))) {
    for (const std::int64_t tile : tile_boundaries) boundaries.push_back(axis.token(tile));
  }

  RingWork work;
  const JobLayout& layout;
  KernelShape kernel;
  PlanOptions options;
  TileAxis axis;
  Needs needs;
  std::vector<std::int64_t> tile_boundaries;
  WorldMessageParts parts;
  std::vector<std::int64_t> boundaries;
};

Planner::Planner(RingWork work, const JobLayout& layout, const KernelShape& kernel, const MachineModel& machine,
                 const PlanOptions& options) {
  check_layout(work.batch, layout);
  shared_ = std::make_unique<const Shared>(std::move(work), layout, kernel, machine, options);
}
Planner::~Planner() = default;
Planner::Planner(Planner&&) noexcept = default;
Planner& Planner::operator=(Planner&&) noexcept = default;

const std::vector<std::int64_t>& Planner::boundaries() const { return shared_->boundaries; }

Plan Planner::plan(int rank) const {
  const Shared& shared = *shared_;
  Plan plan;
  plan.rank = rank;
  plan.world = shared.needs.world();
  plan.kernel = shared.kernel;
  const Layout& queries = shared.layout.queries;
  for (std::size_t i = 0; i < queries.runs(rank).size(); ++i) {
    const TokenRun& run = queries.runs(rank)[i];
    const Sequence& s = shared.work.batch.sequences[static_cast<std::size_t>(run.sequence)];
    plan.queries.push_back({run.sequence, run.begin + s.q_offset, queries.run_rows(rank)[i], run.tokens()});
  }
  for (const Sequence& s : shared.work.batch.sequences) plan.key_lengths.push_back(s.k_len);
  plan.block_mask = shared.work.block_mask;
  plan.positions = shared.work.positions;
  const BlockPlanner planner(shared.work, shared.layout, shared.axis, shared.needs, shared.options, rank);
  for (std::size_t i = 0; i < shared.parts.blocks.size(); ++i) {
    plan.blocks.push_back(planner.plan(shared.tile_boundaries[i], shared.tile_boundaries[i + 1], shared.parts.blocks[i],
                                       shared.parts.sets));
    plan.buffer_rows = std::max(plan.buffer_rows, plan.blocks.back().buffer_rows);
  }
  plan.block_buffer_bytes = static_cast<std::size_t>(plan.buffer_rows * token_bytes(shared.work.streams));
  plan.keeps_state = plan.blocks.size() > 1 || shared.options.state_out;
  plan.memory_bytes =
      shared.options.fixed_bytes + (plan.keeps_state ? shared.options.state_bytes : 0) + 2 * plan.block_buffer_bytes;
  return plan;
}

std::vector<std::int64_t> block_boundaries(RingWork work, const JobLayout& layout, const KernelShape& kernel,
                                           const MachineModel& machine, const PlanOptions& options) {
  return Planner(std::move(work), layout, kernel, machine, options).boundaries();
}

Plan make_plan(RingWork work, const JobLayout& layout, const KernelShape& kernel, const MachineModel& machine,
               const PlanOptions& options, int rank) {
  return Planner(std::move(work), layout, kernel, machine, options).plan(rank);
}

double Plan::flops() const {
  double sum = 0.0;
  for (const BlockPlan& block : blocks) sum += block.flops;
  return sum;
}

std::int64_t Plan::bytes_received() const {
  std::int64_t sum = 0;
  for (const BlockPlan& block : blocks) sum += block.bytes_received;
  return sum;
}

std::int64_t Plan::bytes_sent() const {
  std::int64_t sum = 0;
  for (const BlockPlan& block : blocks) sum += block.bytes_sent;
  return sum;
}

}  // namespace ringattn
