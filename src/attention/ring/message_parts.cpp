// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/message_parts.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace ringattn {

namespace {

// Iterates once over the key tiles, with the set of ranks that need the current tile.
class MessagePartCutter {
 public:
  MessagePartCutter(const TileAxis& axis, const Needs& needs, const Layout& keys)
      : axis_(axis), keys_(keys), active_(needs.world()), open_(static_cast<std::size_t>(needs.world())) {
    for (int rank = 0; rank < needs.world(); ++rank) {
      for (const TileRange& span : needs.spans(rank, 0, axis.tiles())) {
        changes_.push_back({span.begin, rank, true});
        changes_.push_back({span.end, rank, false});
      }
    }
    std::sort(changes_.begin(), changes_.end(),
              [](const Change& a, const Change& b) { return a.tile != b.tile ? a.tile < b.tile : a.rank < b.rank; });
  }

  // The parts of the next block, up to tile `last`. Appends the receiver sets that they refer to to `sets`.
  std::vector<WorldMessagePart> next_block(std::int64_t last, std::vector<RankSet>& sets) {
    std::vector<WorldMessagePart> parts;
    std::fill(open_.begin(), open_.end(), kNone);
    while (tile_ < last) {
      apply_changes();
      const std::int64_t until = next_change_ < changes_.size() ? std::min(last, changes_[next_change_].tile) : last;
      add_rows(axis_.token(tile_), axis_.token(until), parts, sets);
      tile_ = until;
    }
    std::sort(parts.begin(), parts.end(), [](const WorldMessagePart& a, const WorldMessagePart& b) {
      return a.owner != b.owner ? a.owner < b.owner : a.row < b.row;
    });
    return parts;
  }

 private:
  // A rank starts or stops needing tiles.
  struct Change {
    std::int64_t tile;
    int rank;
    bool begins;
  };
  static constexpr std::size_t kNone = ~std::size_t{0};

  void apply_changes() {
    for (; next_change_ < changes_.size() && changes_[next_change_].tile <= tile_; ++next_change_) {
      const Change& change = changes_[next_change_];
      if (change.begins) {
        active_.insert(change.rank);
      } else {
        active_.erase(change.rank);
      }
      active_is_stored_ = false;
    }
  }

  // Adds packed tokens [begin, end), which the active ranks need, for each owner. Extends the owner's last part if
  // possible.
  void add_rows(std::int64_t begin, std::int64_t end, std::vector<WorldMessagePart>& parts,
                std::vector<RankSet>& sets) {
    const std::span<const OwnedRun> owners = keys_.owners();
    for (; begin < end; begin = std::min(end, owners[owner_].end())) {
      while (owners[owner_].end() <= begin) ++owner_;
      const OwnedRun& run = owners[owner_];
      if (active_.first_between(run.owner, run.owner) < 0) continue;
      const std::int64_t row = run.row + begin - run.token;
      const std::int64_t rows = std::min(end, run.end()) - begin;
      std::size_t& open = open_[static_cast<std::size_t>(run.owner)];
      if (open != kNone) {
        WorldMessagePart& part = parts[open];
        if (part.row + part.rows == row &&
            active_.equals_but(sets[static_cast<std::size_t>(part.receivers)], run.owner)) {
          part.rows += rows;
          continue;
        }
      }
      if (!active_is_stored_) {
        sets.push_back(active_);
        active_is_stored_ = true;
      }
      open = parts.size();
      parts.push_back({run.owner, row, rows, static_cast<std::int32_t>(sets.size()) - 1});
    }
  }

  const TileAxis& axis_;
  const Layout& keys_;
  std::vector<Change> changes_;
  std::size_t next_change_ = 0;
  std::int64_t tile_ = 0;
  std::size_t owner_ = 0;  // index into keys_.owners() of the run at tile_
  RankSet active_;
  bool active_is_stored_ = false;  // active_ is the last of `sets`
  std::vector<std::size_t> open_;  // [world] index of the owner's last part in this block
};

// Chooses direct or chain routing for the parts of each owner, and cuts chained parts into chunks, so that the chain is
// a pipeline.
class Router {
 public:
  Router(Route route, const MachineModel& machine, std::int64_t token_bytes, const std::vector<RankSet>& sets)
      : route_(route),
        latency_(machine.latency_seconds),
        row_seconds_(static_cast<double>(token_bytes) / machine.link_bytes_per_second),
        sets_(sets) {}

  std::vector<WorldMessagePart> route_block(std::span<const WorldMessagePart> parts, std::int64_t block_tokens,
                                            int world) const {
    // Rows of a chunk: a step of a classic ring, but at least what a link sends in a message's latency.
    const std::int64_t step_rows = std::max((block_tokens + world - 1) / world, rows_of_latency(block_tokens));
    std::vector<WorldMessagePart> routed;
    routed.reserve(parts.size());
    for (std::size_t begin = 0; begin < parts.size();) {
      std::size_t end = begin;
      while (end < parts.size() && parts[end].owner == parts[begin].owner) ++end;
      route_owner(parts.subspan(begin, end - begin), step_rows, routed);
      begin = end;
    }
    return routed;
  }

 private:
  std::int64_t rows_of_latency(std::int64_t max_rows) const {
    return static_cast<std::int64_t>(std::min(static_cast<double>(max_rows), std::ceil(latency_ / row_seconds_)));
  }

  int receivers(const WorldMessagePart& part) const {
    return sets_[static_cast<std::size_t>(part.receivers)].count_between(part.owner, part.owner);
  }

  void route_owner(std::span<const WorldMessagePart> parts, std::int64_t step_rows,
                   std::vector<WorldMessagePart>& routed) const {
    std::int64_t chain_rows = 0;   // needed by more than one rank
    std::int64_t pushed_rows = 0;  // sent by the owner with direct routing
    int longest = 0;
    for (const WorldMessagePart& part : parts) {
      const int count = receivers(part);
      if (count > 1) chain_rows += part.rows;
      pushed_rows += part.rows * count;
      longest = std::max(longest, count);
    }
    // Rounded to nearest: rows that barely exceed a chunk stay one chunk.
    const std::int64_t chunks = std::max<std::int64_t>(1, (chain_rows + step_rows / 2) / step_rows);
    const std::int64_t chunk_rows = (chain_rows + chunks - 1) / chunks;
    if (longest <= 1 || (route_ == Route::kDirect && !chain_is_faster(pushed_rows, chunks, chunk_rows, longest))) {
      routed.insert(routed.end(), parts.begin(), parts.end());
      return;
    }
    std::int64_t before = 0;  // rows of the chain before this part
    for (WorldMessagePart part : parts) {
      if (receivers(part) == 1) {
        routed.push_back(part);
        continue;
      }
      part.chain = true;
      const std::int64_t row_end = part.row + part.rows;
      while (part.row < row_end) {
        part.rows = std::min(row_end - part.row, chunk_rows - before % chunk_rows);
        part.first_round = static_cast<int>(before / chunk_rows);
        routed.push_back(part);
        part.row += part.rows;
        before += part.rows;
      }
    }
  }

  // With direct routing, an owner of a large share of a block sends it up to P − 1 times over its one link.
  bool chain_is_faster(std::int64_t pushed_rows, std::int64_t chunks, std::int64_t chunk_rows, int longest) const {
    const double direct = latency_ + static_cast<double>(pushed_rows) * row_seconds_;
    const double chain =
        static_cast<double>(chunks + longest - 1) * (latency_ + static_cast<double>(chunk_rows) * row_seconds_);
    return chain < direct;
  }

  Route route_;
  double latency_;
  double row_seconds_;  // to send one token over a link
  const std::vector<RankSet>& sets_;
};

}  // namespace

WorldMessageParts cut_message_parts(const TileAxis& axis, const Needs& needs, const Layout& keys,
                                    std::span<const std::int64_t> boundaries, Route route, const MachineModel& machine,
                                    std::int64_t token_bytes) {
  WorldMessageParts world;
  MessagePartCutter cutter(axis, needs, keys);
  const Router router(route, machine, token_bytes, world.sets);
  for (std::size_t i = 0; i + 1 < boundaries.size(); ++i) {
    const std::vector<WorldMessagePart> parts = cutter.next_block(boundaries[i + 1], world.sets);
    world.blocks.push_back(
        router.route_block(parts, axis.token(boundaries[i + 1]) - axis.token(boundaries[i]), needs.world()));
  }
  return world;
}

}  // namespace ringattn
