// SPDX-License-Identifier: Apache-2.0
// Chooses block sizes for overlap: the receive of a block should take no longer than the computation of the block
// before it. The first block is small, because its receive is exposed. The next blocks grow by the ratio of compute
// time to receive time. At the end of a causal job they shrink, because few queries see the last keys. Without overlap,
// blocks are as large as memory allows.
#include "attention/ring/blocks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

namespace {

// If links are slower than the computation, no block size hides a receive, and small blocks only add latency. Then a
// block has at least 1 / kMinShare of the job's tiles.
constexpr std::int64_t kMinShare = 128;
// A block receives at most this factor more than the block before it, so that a machine model with an error of an order
// of magnitude costs little.
constexpr double kMaxGrowth = 16.0;
// With this number of rows a block's fixed costs (reading and writing the attention state, a launch) are below half
// a percent of its compute time. Larger blocks would only need more memory.
constexpr std::int64_t kEnoughRows = 65536;
// The remaining tiles after a block are appended to it if their receive time is at most this share of the block's.
constexpr double kMaxRest = 0.25;
// The largest number of tiles that is tried for the first block.
constexpr std::int64_t kMaxFirstTiles = 16;
constexpr double kUnlimited = std::numeric_limits<double>::infinity();

// A number of bytes in the syntax of --memory: whole mebibytes, rounded up, or bytes below one mebibyte.
std::string byte_size(double bytes) {
  constexpr double kMega = 1024.0 * 1024.0;
  return bytes < kMega ? fmt::format("{:.0f}", bytes) : fmt::format("{:.0f}m", std::ceil(bytes / kMega));
}

class BlockCutter {
 public:
  BlockCutter(std::span<const CutDirection> directions, const BlockSteps& steps, const KernelShape& kernel,
              const MachineModel& machine, const PlanOptions& options)
      : directions_(directions),
        steps_(steps),
        world_(directions.front().needs.world()),
        key_tile_(kernel.key_tile),
        machine_(machine),
        options_(options),
        latency_(machine.latency_seconds * (options.route == Route::kChain ? std::max(1, world_ - 1) : 1)),
        fixed_bytes_(options.fixed_bytes + (options.state_out || !one_block() ? options.state_bytes : 0)),
        max_rows_(std::numeric_limits<std::int64_t>::max()) {
    for (const CutDirection& direction : directions) row_bytes_ += token_bytes(direction.work.streams);
    if (options.memory_budget > 0 && options.memory_budget >= fixed_bytes_) {
      max_rows_ =
          static_cast<std::int64_t>((options.memory_budget - fixed_bytes_) / static_cast<std::size_t>(2 * row_bytes_));
    }
    if (directions.front().work.block_mask != nullptr) sum_masked_pairs();
  }

  std::vector<std::int64_t> cut() const {
    if (options_.memory_budget > 0 && options_.memory_budget < fixed_bytes_) refuse_budget();
    if (options_.block_tokens > 0) return cut_fixed();
    if (one_block()) return {0, steps_.count()};
    return options_.overlap ? cut_overlapped() : cut_without_overlap();
  }

  std::size_t min_budget() const { return fixed_bytes_ + min_buffer_bytes(); }

 private:
  // Number of buffer rows that a block needs, in the direction that needs more.
  std::int64_t max_rows_of(std::int64_t first, std::int64_t last) const {
    std::int64_t rows = 0;
    for (std::size_t d = 0; d < directions_.size(); ++d) {
      rows = std::max(rows, directions_[d].needs.largest(steps_.tile(d, first), steps_.tile(d, last)).all);
    }
    return rows;
  }
  // An upper bound of max_rows_of() that doesn't iterate over the ranks.
  std::int64_t row_bound(std::int64_t first, std::int64_t last) const {
    std::int64_t rows = 0;
    for (std::size_t d = 0; d < directions_.size(); ++d) {
      rows = std::max(rows, directions_[d].needs.bound(steps_.tile(d, first), steps_.tile(d, last)).all);
    }
    return rows;
  }

  // Time to receive a block, without latency, on the rank that receives most in each direction.
  double transfer_seconds(std::int64_t first, std::int64_t last) const {
    double bytes = 0.0;
    for (std::size_t d = 0; d < directions_.size(); ++d) {
      const BufferRows rows = directions_[d].needs.largest(steps_.tile(d, first), steps_.tile(d, last));
      bytes += received_bytes(directions_[d], rows);
    }
    return bytes / machine_.link_bytes_per_second;
  }
  // An upper bound that doesn't iterate over the ranks.
  double transfer_bound(std::int64_t first, std::int64_t last) const {
    double bytes = 0.0;
    for (std::size_t d = 0; d < directions_.size(); ++d) {
      const BufferRows rows = directions_[d].needs.bound(steps_.tile(d, first), steps_.tile(d, last));
      bytes += received_bytes(directions_[d], rows);
    }
    return bytes / machine_.link_bytes_per_second;
  }
  static double received_bytes(const CutDirection& direction, const BufferRows& rows) {
    return static_cast<double>(rows.received) * static_cast<double>(token_bytes(direction.work.streams));
  }

  // True if it is clear before the cut that there will be one block.
  bool one_block() const {
    if (options_.block_tokens > 0) return options_.block_tokens >= steps_.token(steps_.count());
    if (limit_from(0) < steps_.count()) return false;
    return transfer_seconds(0, steps_.count()) == 0.0;
  }

  std::vector<std::int64_t> equal_blocks(std::int64_t block_tokens) const {
    std::vector<std::int64_t> boundaries{0};
    do {
      const std::int64_t begin = steps_.token(boundaries.back());
      const std::int64_t tokens = std::min(block_tokens, steps_.token(steps_.count()) - begin);
      boundaries.push_back(steps_.step_from(begin + tokens));
    } while (boundaries.back() < steps_.count());
    return boundaries;
  }

  // The last possible end of a block that begins at `begin`, by max_block_tokens.
  std::int64_t limit_from(std::int64_t begin) const {
    if (options_.max_block_tokens == 0 || begin >= steps_.count()) return steps_.count();
    return last_good(begin + 1, steps_.count(), [&](std::int64_t end) {
      return steps_.token(end) - steps_.token(begin) <= options_.max_block_tokens;
    });
  }

  // True if the block needs at most `rows` buffer rows on every rank.
  bool fits(std::int64_t first, std::int64_t last, std::int64_t rows) const {
    return row_bound(first, last) <= rows || max_rows_of(first, last) <= rows;
  }

  bool fits(const std::vector<std::int64_t>& boundaries) const {
    for (std::size_t i = 0; i + 1 < boundaries.size(); ++i) {
      if (!fits(boundaries[i], boundaries[i + 1], max_rows_)) return false;
    }
    return true;
  }

  std::vector<std::int64_t> cut_fixed() const {
    std::vector<std::int64_t> boundaries = equal_blocks(options_.block_tokens);
    if (fits(boundaries)) return boundaries;
    for (std::int64_t tokens = std::min(options_.block_tokens, steps_.token(steps_.count())) / 2; tokens >= key_tile_;
         tokens /= 2) {
      const std::int64_t whole_tiles = tokens / key_tile_ * key_tile_;
      if (!fits(equal_blocks(whole_tiles))) continue;
      fail(ErrorCode::kMemory,
           fmt::format("blocks of {} tokens don't fit into the memory budget", options_.block_tokens),
           fmt::format("{} bytes of {} are left for two of them, at {} bytes a token",
                       options_.memory_budget - fixed_bytes_, options_.memory_budget, row_bytes_),
           {setting("block", whole_tiles), " would fit."});
    }
    refuse_budget();
  }

  // All receives are exposed, and each block adds latency: uses as few blocks as the buffers allow.
  std::vector<std::int64_t> cut_without_overlap() const {
    const std::int64_t enough = std::min(kEnoughRows, max_rows_);
    std::vector<std::int64_t> boundaries{0};
    while (boundaries.back() < steps_.count()) {
      const std::int64_t begin = boundaries.back();
      if (!fits(begin, begin + 1, max_rows_)) refuse_budget();
      boundaries.push_back(farthest_end(begin, kUnlimited, enough));
    }
    return boundaries;
  }

  // The cut with the shortest estimated time of several candidates.
  std::vector<std::int64_t> cut_overlapped() const {
    std::vector<std::int64_t> best = cut_overlapped_from(1);
    double best_seconds = estimated_seconds(best);
    // A block of few tiles has few owners. A rank that owns none of them must receive all of it, up to P / (P − 1)
    // times what it receives of a block that all ranks own equal parts of. This matters for small P.
    for (std::int64_t first = 2; first <= kMaxFirstTiles && world_ <= kMaxFirstTiles; first *= 2) {
      std::vector<std::int64_t> boundaries = cut_overlapped_from(first);
      const double seconds = estimated_seconds(boundaries);
      if (seconds >= best_seconds) continue;
      best = std::move(boundaries);
      best_seconds = seconds;
    }
    return best;
  }

  // If the budget allows it, the first block and blocks whose receive can't be hidden have at least `first_tiles`
  // tiles.
  std::vector<std::int64_t> cut_overlapped_from(std::int64_t first_tiles) const {
    const std::int64_t tiles = steps_.count();
    const std::int64_t enough = std::min(kEnoughRows, max_rows_);
    const double half_tile =
        static_cast<double>(key_tile_) * static_cast<double>(row_bytes_) / machine_.link_bytes_per_second / 2.0;
    std::vector<std::int64_t> boundaries{0};
    double limit = latency_;  // of a receive, without latency: the first block's receive takes as long as its latency
    std::int64_t min_tiles = first_tiles;
    while (boundaries.back() < tiles) {
      const std::int64_t begin = boundaries.back();
      if (!fits(begin, begin + 1, max_rows_)) refuse_budget();
      std::int64_t end =
          farthest_end(begin, limit + half_tile, enough);  // rounded to the nearest tile, so that errors don't add up
      end = std::min(limit_from(begin), std::max(begin + min_tiles, end));
      if (!fits(begin, end, enough)) end = farthest_end(begin, kUnlimited, enough);
      const double transfer = transfer_seconds(begin, end);
      const bool small_rest = begin > 0 && transfer_seconds(begin, tiles) <= (1.0 + kMaxRest) * transfer;
      if (small_rest && limit_from(begin) == tiles && fits(begin, tiles, enough)) end = tiles;
      boundaries.push_back(end);

      limit = std::min(compute_seconds(begin, end) - latency_, kMaxGrowth * std::max(transfer, latency_));
      // Growth by less than a tile would be rounded down in each block, so the next block is at least one tile larger.
      min_tiles = limit > transfer ? end - begin + 1 : std::max(first_tiles, (tiles + kMinShare - 1) / kMinShare);
      limit = std::max(limit, latency_);
    }
    return boundaries;
  }

  // The formula of estimate_time(), for a rank with the maximum receive.
  double estimated_seconds(const std::vector<std::int64_t>& boundaries) const {
    double arrived = 0.0;
    double computed = 0.0;
    double computed_before = 0.0;
    for (std::size_t i = 0; i + 1 < boundaries.size(); ++i) {
      const double transfer = transfer_seconds(boundaries[i], boundaries[i + 1]);
      arrived = std::max(arrived, computed_before) + (transfer > 0.0 ? transfer + latency_ : 0.0);
      computed_before = computed;
      computed = std::max(computed, arrived) + compute_seconds(boundaries[i], boundaries[i + 1]);
    }
    return computed;
  }

  // The end of the largest block from `begin` that is received in at most `seconds` and needs at most `max_rows` buffer
  // rows; at least one tile.
  std::int64_t farthest_end(std::int64_t begin, double seconds, std::int64_t max_rows) const {
    const auto is_bound_good = [&](std::int64_t end) {
      return transfer_bound(begin, end) <= seconds && row_bound(begin, end) <= max_rows;
    };
    const auto is_largest_good = [&](std::int64_t end) {
      return transfer_seconds(begin, end) <= seconds && max_rows_of(begin, end) <= max_rows;
    };
    // The exact numbers iterate over all ranks, so start at the result for the bounds and grow the step.
    const std::int64_t limit = limit_from(begin);
    const std::int64_t start = last_good(begin + 1, limit, is_bound_good);
    std::int64_t step = 1;
    while (start + step < limit && is_largest_good(start + step)) step *= 2;
    return last_good(start + step / 2, std::min(start + step, limit), is_largest_good);
  }

  // The last value in [first, last] for which is_good() holds, if it holds for a prefix; `first` if it never holds.
  template <typename IsGood>
  static std::int64_t last_good(std::int64_t first, std::int64_t last, const IsGood& is_good) {
    while (first < last) {
      const std::int64_t middle = first + (last - first + 1) / 2;
      if (is_good(middle)) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }

  // Prefix sums over tiles of the pairs that the block mask lets through, so that it is read only once.
  void sum_masked_pairs() {
    const auto& [work, axis, needs] = directions_.front();
    std::vector<double>& sums = masked_pairs_;
    sums.assign(static_cast<std::size_t>(axis.tiles()) + 1, 0.0);
    const BlockMask& block_mask = *work.block_mask;
    const int query_block = block_mask.shape().query_block;
    for (std::size_t sequence = 0; sequence < work.batch.sequences.size(); ++sequence) {
      const Sequence& s = work.batch.sequences[sequence];
      const Visibility visibility(work.mask, s.k_len);
      const auto first = static_cast<std::size_t>(axis.first(static_cast<std::int32_t>(sequence)));
      const std::int64_t end = s.q_offset + s.q_len;
      for (std::int64_t position = s.q_offset; position < end;) {
        const std::int64_t block = query_block_of(position, query_block);
        const std::int64_t rows = std::min(end, (block + 1) * query_block) - position;
        for (int head = 0; head < block_mask.shape().heads; ++head) {
          for_each_masked_tile_run(
              block_mask, work.mask, key_tile_, sequence, head, block, [&](const MaskedTileRun& run) {
                for (std::int64_t tile = run.tiles.begin; tile < run.tiles.end; ++tile) {
                  const KeyRange keys{tile * key_tile_, std::min(s.k_len, (tile + 1) * key_tile_)};
                  sums[first + static_cast<std::size_t>(tile) + 1] += visibility.pairs(position, rows, keys);
                }
              });
        }
        position += rows;
      }
    }
    double before = 0.0;
    for (double& sum : sums) before = sum = before + sum / block_mask.shape().heads;
  }

  double compute_seconds(std::int64_t first, std::int64_t last) const {
    double seconds = 0.0;
    for (std::size_t d = 0; d < directions_.size(); ++d) {
      seconds += compute_seconds(directions_[d], steps_.tile(d, first), steps_.tile(d, last), first == 0);
    }
    return seconds;
  }

  // Mean over the ranks.
  double compute_seconds(const CutDirection& direction, std::int64_t first_tile, std::int64_t last_tile,
                         bool first_block) const {
    const auto& [work, axis, needs] = direction;
    const double once =
        first_block && work.query_flops > 0.0 ? work.query_flops * static_cast<double>(work.batch.q_tokens()) : 0.0;
    const auto keys = static_cast<double>(axis.token(last_tile) -
                                          axis.token(first_tile));  // nearly every rank computes with every key
    double pairs = 0.0;
    if (work.block_mask != nullptr) {
      pairs = masked_pairs_[static_cast<std::size_t>(last_tile)] - masked_pairs_[static_cast<std::size_t>(first_tile)];
      first_tile = last_tile;
    }
    for (std::int64_t tile = first_tile; tile < last_tile;) {
      const std::int32_t sequence = axis.sequence(tile);
      const Sequence& s = work.batch.sequences[static_cast<std::size_t>(sequence)];
      const std::int64_t end = std::min(last_tile, axis.first(sequence + 1));
      const std::int64_t origin = axis.token(axis.first(sequence)) - s.k_begin;
      pairs += work.visibility(static_cast<std::size_t>(sequence))
                   .pairs(s.q_offset, s.q_len, {axis.token(tile) - origin, axis.token(end) - origin});
      tile = end;
    }
    return ((pairs * work.pair_flops + once) / needs.world() + keys * work.key_flops) / machine_.flops_per_second;
  }

  // Bytes of all block buffers with the smallest possible blocks.
  std::size_t min_buffer_bytes() const {
    std::int64_t rows = 0;
    if (options_.block_tokens > 0) {
      const std::vector<std::int64_t> boundaries = equal_blocks(options_.block_tokens);
      for (std::size_t i = 0; i + 1 < boundaries.size(); ++i) {
        rows = std::max(rows, max_rows_of(boundaries[i], boundaries[i + 1]));
      }
    } else if (!one_block()) {
      for (std::int64_t step = 0; step < steps_.count(); ++step) {
        if (row_bound(step, step + 1) <= rows) continue;  // doesn't iterate over the ranks
        rows = std::max(rows, max_rows_of(step, step + 1));
      }
    }
    return static_cast<std::size_t>(2 * rows * row_bytes_);
  }

  [[noreturn]] void refuse_budget() const {
    const std::size_t buffers = min_buffer_bytes();
    const std::string blocks = options_.block_tokens > 0
                                   ? counted(static_cast<std::uint64_t>(options_.block_tokens), "token")
                                   : std::string("one key tile");
    fail(ErrorCode::kMemory,
         fmt::format("a memory budget of {} a rank is too small", counted(options_.memory_budget, "byte")),
         fmt::format("{} for shards, state and scratch, and {} for two blocks of {}", fixed_bytes_, buffers, blocks),
         {setting("memory", byte_size(static_cast<double>(fixed_bytes_ + buffers))),
          " is enough; with more ranks, shards and state are smaller."});
  }

  std::span<const CutDirection> directions_;
  const BlockSteps& steps_;
  int world_;
  int key_tile_;
  const MachineModel& machine_;
  const PlanOptions& options_;
  std::int64_t row_bytes_ = 0;        // one row of each direction: all of their buffers hold equally many rows
  double latency_;                    // of the messages of a block, one after the other
  std::size_t fixed_bytes_;           // independent of the blocks
  std::int64_t max_rows_;             // of a block buffer, by the memory budget
  std::vector<double> masked_pairs_;  // [tiles + 1], with a block mask
};

MessageTemplate how_to_measure_one() { return {command("info", "measure"), " measures one."}; }

void check_rate(std::string_view name, double value) {
  if (!(value > 0.0) || !std::isfinite(value)) {
    fail(ErrorCode::kUsage, fmt::format("the machine model's {} is {}", name, value), "a rate is above zero and finite",
         how_to_measure_one());
  }
}

}  // namespace

BlockSteps::BlockSteps(const TileAxis& keys) {
  token_.reserve(static_cast<std::size_t>(keys.tiles()) + 1);
  for (std::int64_t tile = 0; tile <= keys.tiles(); ++tile) token_.push_back(keys.token(tile));
}

BlockSteps::BlockSteps(const Batch& batch, const TileAxis& keys, const TileAxis& queries, const KernelShape& kernel)
    : tiles_{{0, 0}}, token_{0} {
  for (std::size_t s = 0; s < batch.sequences.size(); ++s) {
    const auto sequence = static_cast<std::int32_t>(s);
    const std::int64_t first_key_tile = keys.first(sequence);
    const std::int64_t first_query_tile = queries.first(sequence);
    const std::int64_t key_tiles = keys.first(sequence + 1) - first_key_tile;
    const std::int64_t query_tiles = queries.first(sequence + 1) - first_query_tile;
    const std::int64_t first_position = query_tile_begin(batch.sequences[s].q_offset, kernel.query_tile);
    std::int64_t key_tile = 0;
    std::int64_t query_tile = 0;
    while (key_tile < key_tiles || query_tile < query_tiles) {
      std::int64_t position = std::numeric_limits<std::int64_t>::max();
      if (key_tile < key_tiles) position = key_tile * kernel.key_tile;
      if (query_tile < query_tiles) position = std::min(position, first_position + query_tile * kernel.query_tile);
      const std::int64_t end = query_tile_begin(position, kernel.key_tile) + kernel.key_tile;
      key_tile = std::clamp(end / kernel.key_tile, key_tile, key_tiles);
      if (end > first_position) {
        query_tile = std::clamp((end - first_position) / kernel.query_tile, query_tile, query_tiles);
      }
      tiles_.push_back({first_key_tile + key_tile, first_query_tile + query_tile});
      const auto& [key_begin, query_begin] = tiles_[tiles_.size() - 2];
      token_.push_back(token_.back() +
                       std::max(keys.token(first_key_tile + key_tile) - keys.token(key_begin),
                                queries.token(first_query_tile + query_tile) - queries.token(query_begin)));
    }
  }
}

std::int64_t BlockSteps::step_from(std::int64_t token) const {
  return std::lower_bound(token_.begin(), token_.end(), token) - token_.begin();
}

std::vector<std::int64_t> cut_blocks(std::span<const CutDirection> directions, const BlockSteps& steps,
                                     const KernelShape& kernel, const MachineModel& machine,
                                     const PlanOptions& options) {
  check_rate("flops_per_second", machine.flops_per_second);
  check_rate("link_bytes_per_second", machine.link_bytes_per_second);
  if (!(machine.latency_seconds >= 0.0) || !std::isfinite(machine.latency_seconds)) {
    fail(ErrorCode::kUsage, fmt::format("the machine model's latency_seconds is {}", machine.latency_seconds),
         "a latency is at least zero and finite", how_to_measure_one());
  }
  if (options.block_tokens < 0) {
    fail(ErrorCode::kUsage, fmt::format("blocks of {} tokens", options.block_tokens),
         "a block holds at least one token", "0 lets the plan choose.");
  }
  return BlockCutter(directions, steps, kernel, machine, options).cut();
}

std::size_t min_budget(std::span<const CutDirection> directions, const BlockSteps& steps, const KernelShape& kernel,
                       const PlanOptions& options) {
  const MachineModel machine;  // any model gives the same minimum
  return BlockCutter(directions, steps, kernel, machine, options).min_budget();
}

std::int64_t max_block_keys(std::int64_t keys, std::int64_t block_tokens, int key_tile) {
  return block_tokens == 0 || block_tokens >= keys ? keys : std::min(keys, block_tokens + key_tile);
}

}  // namespace ringattn
