// SPDX-License-Identifier: Apache-2.0
// The plan of one rank, from the message parts of all ranks (message_parts.hpp): its messages, the rows of its block
// buffer, and the address of every tile that it attends to.
#include "attention/ring/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
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
      const std::int64_t origin = layout_.keys.cu()[static_cast<std::size_t>(sequence)] - s.k_begin;
      const KeyRange keys{std::max(s.k_begin, block.first_token - origin),
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

// What the plans of all ranks have in common in one direction: keys that are sent to queries, or queries that are sent
// to keys. For the latter, queries_to_keys() exchanges the two.
struct Planner::Direction {
  Direction(RingWork the_work, const JobLayout& the_layout, const KernelShape& the_kernel)
      : work(std::move(the_work)),
        layout(the_layout),
        kernel(the_kernel),
        axis(work.batch, kernel.key_tile),
        needs(work, layout, axis, kernel.query_tile, kernel.key_tile) {}

  Plan plan(const PlanOptions& options, int rank) const {
    Plan plan;
    plan.rank = rank;
    plan.world = needs.world();
    plan.kernel = kernel;
    for (std::size_t i = 0; i < layout.queries.runs(rank).size(); ++i) {
      const TokenRun& run = layout.queries.runs(rank)[i];
      const Sequence& s = work.batch.sequences[static_cast<std::size_t>(run.sequence)];
      plan.queries.push_back({run.sequence, run.begin + s.q_offset, layout.queries.run_rows(rank)[i], run.tokens()});
    }
    for (const Sequence& s : work.batch.sequences) plan.key_lengths.push_back(s.k_len);
    plan.block_mask = work.block_mask;
    plan.positions = work.positions;
    const BlockPlanner planner(work, layout, axis, needs, options, rank);
    for (std::size_t i = 0; i < parts.blocks.size(); ++i) {
      plan.blocks.push_back(planner.plan(tile_boundaries[i], tile_boundaries[i + 1], parts.blocks[i], parts.sets));
      plan.buffer_rows = std::max(plan.buffer_rows, plan.blocks.back().buffer_rows);
    }
    plan.blocks.front().flops += work.query_flops * static_cast<double>(layout.queries.tokens(rank));
    plan.block_buffer_bytes = static_cast<std::size_t>(plan.buffer_rows * token_bytes(work.streams));
    return plan;
  }

  RingWork work;
  const JobLayout& layout;
  KernelShape kernel;
  TileAxis axis;
  Needs needs;
  std::vector<std::int64_t> tile_boundaries;  // [blocks + 1]
  WorldMessageParts parts;
};

struct Planner::Shared {
  Shared(const RingWork& work, const JobLayout& layout, const KernelShape& kernel, const MachineModel& machine,
         const PlanOptions& the_options)
      : options(the_options) {
    directions.reserve(2);
    if (work.sends_queries()) {
      exchanged.emplace(JobLayout{layout.request, layout.keys, layout.queries});
      directions.emplace_back(keys_to_queries(work), layout, kernel);
      directions.emplace_back(queries_to_keys(work, kernel.query_tile), *exchanged,
                              KernelShape{kernel.query_tile, kernel.key_tile});
    } else {
      directions.emplace_back(work, layout, kernel);
    }
    const BlockSteps steps = directions.size() == 1
                                 ? BlockSteps(directions[0].axis)
                                 : BlockSteps(work.batch, directions[0].axis, directions[1].axis, kernel);
    std::vector<CutDirection> cut;
    for (const Direction& direction : directions) cut.push_back({direction.work, direction.axis, direction.needs});
    const std::vector<std::int64_t> ends = cut_blocks(cut, steps, kernel, machine, options);
    for (std::size_t d = 0; d < directions.size(); ++d) {
      Direction& direction = directions[d];
      for (const std::int64_t step : ends) direction.tile_boundaries.push_back(steps.tile(d, step));
      direction.parts =
          cut_message_parts(direction.axis, direction.needs, direction.layout.keys, direction.tile_boundaries,
                            options.route, machine, token_bytes(direction.work.streams));
    }
    for (const std::int64_t tile : directions[0].tile_boundaries) boundaries.push_back(directions[0].axis.token(tile));
  }

  PlanOptions options;
  std::optional<JobLayout> exchanged;  // with queries and keys exchanged, if queries are sent
  std::vector<Direction> directions;   // keys to queries; queries to keys
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
  const PlanOptions& options = shared_->options;
  Plan plan = shared_->directions[0].plan(options, rank);
  std::size_t buffer_bytes = plan.block_buffer_bytes;
  if (shared_->directions.size() > 1) {
    auto to_keys = std::make_shared<Plan>(shared_->directions[1].plan(options, rank));
    buffer_bytes += to_keys->block_buffer_bytes;
    plan.to_keys = std::move(to_keys);
  }
  plan.keeps_state = plan.blocks.size() > 1 || options.state_out;
  plan.memory_bytes = options.fixed_bytes + (plan.keeps_state ? options.state_bytes : 0) + 2 * buffer_bytes;
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

double Plan::block_flops(std::size_t block) const {
  return blocks[block].flops + (to_keys != nullptr ? to_keys->block_flops(block) : 0.0);
}

std::int64_t Plan::block_bytes_received(std::size_t block) const {
  return blocks[block].bytes_received + (to_keys != nullptr ? to_keys->block_bytes_received(block) : 0);
}

std::int64_t Plan::block_bytes_sent(std::size_t block) const {
  return blocks[block].bytes_sent + (to_keys != nullptr ? to_keys->block_bytes_sent(block) : 0);
}

double Plan::flops() const {
  double sum = 0.0;
  for (std::size_t block = 0; block < blocks.size(); ++block) sum += block_flops(block);
  return sum;
}

std::int64_t Plan::bytes_received() const {
  std::int64_t sum = 0;
  for (std::size_t block = 0; block < blocks.size(); ++block) sum += block_bytes_received(block);
  return sum;
}

std::int64_t Plan::bytes_sent() const {
  std::int64_t sum = 0;
  for (std::size_t block = 0; block < blocks.size(); ++block) sum += block_bytes_sent(block);
  return sum;
}

}  // namespace ringattn
