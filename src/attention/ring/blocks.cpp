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
  BlockCutter(const RingWork& work, const TileAxis& axis, const Needs& needs, const KernelShape& kernel,
              const MachineModel& machine, const PlanOptions& options)
      : work_(work),
        axis_(axis),
        needs_(needs),
        key_tile_(kernel.key_tile),
        machine_(machine),
        options_(options),
        row_bytes_(static_cast<double>(token_bytes(work.streams))),
        latency_(machine.latency_seconds * (options.route == Route::kChain ? std::max(1, needs.world() - 1) : 1)),
        fixed_bytes_(options.fixed_bytes + (options.state_out || !one_block() ? options.state_bytes : 0)),
        max_rows_(std::numeric_limits<std::int64_t>::max()) {
    if (options.memory_budget > 0 && options.memory_budget >= fixed_bytes_) {
      const auto two_tokens = static_cast<std::size_t>(2 * token_bytes(work.streams));
      max_rows_ = static_cast<std::int64_t>((options.memory_budget - fixed_bytes_) / two_tokens);
    }
    if (work.block_mask != nullptr) sum_masked_pairs();
  }

  std::vector<std::int64_t> cut() const {
    if (options_.memory_budget > 0 && options_.memory_budget < fixed_bytes_) refuse_budget();
    if (options_.block_tokens > 0) return cut_fixed();
    if (one_block()) return {0, axis_.tiles()};
    return options_.overlap ? cut_overlapped() : cut_without_overlap();
  }

  std::size_t min_budget() const { return fixed_bytes_ + min_buffer_bytes(); }

 private:
  // True if there will be one block, as far as it is known before the cut.
  bool one_block() const {
    if (options_.block_tokens > 0) return options_.block_tokens >= axis_.token(axis_.tiles());
    if (limit_from(0) < axis_.tiles()) return false;
    return needs_.largest(0, axis_.tiles()).received == 0;
  }

  std::vector<std::int64_t> equal_blocks(std::int64_t block_tokens) const {
    std::vector<std::int64_t> boundaries{0};
    do {
      const std::int64_t begin = axis_.token(boundaries.back());
      const std::int64_t tokens = std::min(block_tokens, axis_.token(axis_.tiles()) - begin);
      boundaries.push_back(axis_.boundary_from(begin + tokens));
    } while (boundaries.back() < axis_.tiles());
    return boundaries;
  }

  // The last possible end of a block that begins at `begin`, by max_block_tokens.
  std::int64_t limit_from(std::int64_t begin) const {
    if (options_.max_block_tokens == 0 || begin >= axis_.tiles()) return axis_.tiles();
    return last_good(begin + 1, axis_.tiles(), [&](std::int64_t end) {
      return axis_.token(end) - axis_.token(begin) <= options_.max_block_tokens;
    });
  }

  // True if the block needs at most `rows` buffer rows on every rank.
  bool fits(std::int64_t first_tile, std::int64_t last_tile, std::int64_t rows) const {
    return needs_.bound(first_tile, last_tile).all <= rows || needs_.largest(first_tile, last_tile).all <= rows;
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
    for (std::int64_t tokens = std::min(options_.block_tokens, axis_.token(axis_.tiles())) / 2; tokens >= key_tile_;
         tokens /= 2) {
      const std::int64_t whole_tiles = tokens / key_tile_ * key_tile_;
      if (!fits(equal_blocks(whole_tiles))) continue;
      fail(ErrorCode::kMemory,
           fmt::format("blocks of {} tokens don't fit into the memory budget", options_.block_tokens),
           fmt::format("{} bytes of {} are left for two of them, at {} bytes a token",
                       options_.memory_budget - fixed_bytes_, options_.memory_budget, token_bytes(work_.streams)),
           {setting("block", whole_tiles), " would fit."});
    }
    refuse_budget();
  }

  // All receives are exposed, and each block adds latency: uses as few blocks as the buffers allow.
  std::vector<std::int64_t> cut_without_overlap() const {
    const std::int64_t enough = std::min(kEnoughRows, max_rows_);
    std::vector<std::int64_t> boundaries{0};
    while (boundaries.back() < axis_.tiles()) {
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
    for (std::int64_t first = 2; first <= kMaxFirstTiles && needs_.world() <= kMaxFirstTiles; first *= 2) {
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
    const std::int64_t tiles = axis_.tiles();
    const std::int64_t enough = std::min(kEnoughRows, max_rows_);
    const double half_tile = transfer_seconds({key_tile_, key_tile_}) / 2.0;
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
      const double transfer = transfer_seconds(needs_.largest(begin, end));
      const bool small_rest =
          begin > 0 && transfer_seconds(needs_.largest(begin, tiles)) <= (1.0 + kMaxRest) * transfer;
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
      const double transfer = transfer_seconds(needs_.largest(boundaries[i], boundaries[i + 1]));
      arrived = std::max(arrived, computed_before) + (transfer > 0.0 ? transfer + latency_ : 0.0);
      computed_before = computed;
      computed = std::max(computed, arrived) + compute_seconds(boundaries[i], boundaries[i + 1]);
    }
    return computed;
  }

  // The end of the largest block from `begin` that is received in at most `seconds` and needs at most `max_rows` buffer
  // rows; at least one tile.
  std::int64_t farthest_end(std::int64_t begin, double seconds, std::int64_t max_rows) const {
    const auto is_good = [&](const BufferRows& rows) {
      return transfer_seconds(rows) <= seconds && rows.all <= max_rows;
    };
    const auto is_bound_good = [&](std::int64_t end) { return is_good(needs_.bound(begin, end)); };
    const auto is_largest_good = [&](std::int64_t end) { return is_good(needs_.largest(begin, end)); };
    // largest() iterates over all ranks, so start at the result for bound() and grow the step.
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

  // Without latency.
  double transfer_seconds(const BufferRows& rows) const {
    return static_cast<double>(rows.received) * row_bytes_ / machine_.link_bytes_per_second;
  }

  // Prefix sums over tiles of the pairs that the block mask lets through, so that it is read only once.
  void sum_masked_pairs() {
    std::vector<double>& sums = masked_pairs_;
    sums.assign(static_cast<std::size_t>(axis_.tiles()) + 1, 0.0);
    const BlockMask& block_mask = *work_.block_mask;
    const int query_block = block_mask.shape().query_block;
    for (std::size_t sequence = 0; sequence < work_.batch.sequences.size(); ++sequence) {
      const Sequence& s = work_.batch.sequences[sequence];
      const Visibility visibility(work_.mask, s.k_len);
      const auto first = static_cast<std::size_t>(axis_.first(static_cast<std::int32_t>(sequence)));
      const std::int64_t end = s.q_offset + s.q_len;
      for (std::int64_t position = s.q_offset; position < end;) {
        const std::int64_t block = query_block_of(position, query_block);
        const std::int64_t rows = std::min(end, (block + 1) * query_block) - position;
        for (int head = 0; head < block_mask.shape().heads; ++head) {
          for_each_masked_tile_run(
              block_mask, work_.mask, key_tile_, sequence, head, block, [&](const MaskedTileRun& run) {
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

  // Mean over the ranks.
  double compute_seconds(std::int64_t first_tile, std::int64_t last_tile) const {
    const double once = first_tile == 0 && work_.query_flops > 0.0
                            ? work_.query_flops * static_cast<double>(work_.batch.q_tokens())
                            : 0.0;
    const auto keys = static_cast<double>(axis_.token(last_tile) -
                                          axis_.token(first_tile));  // nearly every rank computes with every key
    double pairs = 0.0;
    if (work_.block_mask != nullptr) {
      pairs = masked_pairs_[static_cast<std::size_t>(last_tile)] - masked_pairs_[static_cast<std::size_t>(first_tile)];
      first_tile = last_tile;
    }
    for (std::int64_t tile = first_tile; tile < last_tile;) {
      const std::int32_t sequence = axis_.sequence(tile);
      const Sequence& s = work_.batch.sequences[static_cast<std::size_t>(sequence)];
      const std::int64_t end = std::min(last_tile, axis_.first(sequence + 1));
      const std::int64_t origin = axis_.token(axis_.first(sequence));
      pairs += work_.visibility(static_cast<std::size_t>(sequence))
                   .pairs(s.q_offset, s.q_len, {axis_.token(tile) - origin, axis_.token(end) - origin});
      tile = end;
    }
    return ((pairs * work_.pair_flops + once) / needs_.world() + keys * work_.key_flops) / machine_.flops_per_second;
  }

  // Bytes of both block buffers with the smallest possible blocks.
  std::size_t min_buffer_bytes() const {
    std::int64_t rows = 0;
    if (options_.block_tokens > 0) {
      const std::vector<std::int64_t> boundaries = equal_blocks(options_.block_tokens);
      for (std::size_t i = 0; i + 1 < boundaries.size(); ++i) {
        rows = std::max(rows, needs_.largest(boundaries[i], boundaries[i + 1]).all);
      }
    } else if (!one_block()) {
      for (std::int64_t tile = 0; tile < axis_.tiles(); ++tile) {
        if (needs_.bound(tile, tile + 1).all <= rows) continue;  // bound() doesn't iterate over the ranks
        rows = std::max(rows, needs_.largest(tile, tile + 1).all);
      }
    }
    return static_cast<std::size_t>(2 * rows * token_bytes(work_.streams));
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

  const RingWork& work_;
  const TileAxis& axis_;
  const Needs& needs_;
  int key_tile_;
  const MachineModel& machine_;
  const PlanOptions& options_;
  double row_bytes_;                  // of one token
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

std::vector<std::int64_t> cut_blocks(const RingWork& work, const TileAxis& axis, const Needs& needs,
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
  return BlockCutter(work, axis, needs, kernel, machine, options).cut();
}

std::size_t min_budget(const RingWork& work, const TileAxis& axis, const Needs& needs, const KernelShape& kernel,
                       const PlanOptions& options) {
  const MachineModel machine;  // any model gives the same minimum
  return BlockCutter(work, axis, needs, kernel, machine, options).min_budget();
}

std::int64_t max_block_keys(std::int64_t keys, std::int64_t block_tokens, int key_tile) {
  return block_tokens == 0 || block_tokens >= keys ? keys : std::min(keys, block_tokens + key_tile);
}

}  // namespace ringattn
