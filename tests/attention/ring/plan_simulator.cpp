// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/ring/plan_simulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "ops/attention/attention_work.hpp"
#include "tests/attention/ring/recorded_exchanges.hpp"

namespace ringattn::testing {

namespace {

struct Broken {
  std::string what;
};

template <typename... Args>
void require(bool condition, fmt::format_string<Args...> what, Args&&... args) {
  if (!condition) throw Broken{fmt::format(what, std::forward<Args>(args)...)};
}

using Tokens = std::vector<std::int64_t>;

constexpr std::int64_t kStale = -1;

// Tokens [begin, end) of a sequence.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// A direction of the exchange by the job's definition: some tokens stay with their rank, the others travel to them in
// tiles.
class Direction {
 public:
  Direction(const RandomJob& random, const Layout& staying, const Layout& travelling)
      : random_(random), staying_(staying), travelling_(travelling) {}
  virtual ~Direction() = default;

  const Layout& staying() const { return staying_; }
  const Layout& travelling() const { return travelling_; }
  // Bytes of a travelling token.
  virtual std::int64_t bytes() const = 0;
  // The position by which a plan names token `index`, which stays.
  virtual std::int64_t position(std::size_t sequence, std::int64_t index) const = 0;
  virtual std::int64_t tiles(std::size_t sequence) const = 0;
  // The travelling tokens of a tile.
  virtual TokenRange tokens_of(std::size_t sequence, std::int64_t tile) const = 0;
  // The tile of travelling token `index`.
  virtual std::int64_t tile_of(std::size_t sequence, std::int64_t index) const = 0;
  // Replaces `needed` by the tiles that token `index`, which stays, needs.
  virtual void find_needed(std::size_t sequence, std::int64_t index, std::vector<TileRange>& needed) const = 0;

 protected:
  const Sequence& sequence(std::size_t index) const { return random_.job.batch.sequences[index]; }

  const RandomJob& random_;

 private:
  const Layout& staying_;
  const Layout& travelling_;
};

// The largest multiple of `divisor` that is at most `value`, divided by it.
std::int64_t floor_divide(std::int64_t value, std::int64_t divisor) {
  const std::int64_t towards_zero = value / divisor;
  return towards_zero * divisor > value ? towards_zero - 1 : towards_zero;
}

class KeysToQueries : public Direction {
 public:
  KeysToQueries(const RandomJob& random, const JobLayout& layout) : Direction(random, layout.queries, layout.keys) {}

  std::int64_t bytes() const override { return kv_token_bytes(random_.job.spec); }
  std::int64_t position(std::size_t s, std::int64_t index) const override { return sequence(s).q_offset + index; }
  std::int64_t tiles(std::size_t s) const override {
    return (sequence(s).k_len + random_.kernel.key_tile - 1) / random_.kernel.key_tile;
  }
  TokenRange tokens_of(std::size_t s, std::int64_t tile) const override {
    const std::int64_t begin = tile * random_.kernel.key_tile;
    return {begin, std::min(begin + random_.kernel.key_tile, sequence(s).k_len)};
  }
  std::int64_t tile_of(std::size_t /*s*/, std::int64_t index) const override { return index / random_.kernel.key_tile; }

  // The tiles that some position of the query's tile sees.
  void find_needed(std::size_t s, std::int64_t index, std::vector<TileRange>& needed) const override {
    needed.clear();
    const Job& job = random_.job;
    const TileRange seen = Visibility(job.spec.mask, sequence(s).k_len)
                               .tiles(position(s, index), {random_.kernel.query_tile, random_.kernel.key_tile});
    if (seen.empty()) return;
    if (job.block_mask == nullptr) return needed.push_back(seen);
    for (std::int64_t tile = seen.begin; tile < seen.end; ++tile) {
      if (lists_tile(s, position(s, index), tile)) needed.push_back({tile, tile + 1});
    }
  }

 private:
  // Whether some head's mask row of the position names the tile.
  bool lists_tile(std::size_t s, std::int64_t position, std::int64_t tile) const {
    const BlockMaskShape& shape = random_.job.block_mask->shape();
    const std::int64_t block = floor_divide(position, shape.query_block);
    for (int head = 0; head < shape.heads; ++head) {
      const auto list = random_.job.block_mask->row(s, head, block);
      if (std::ranges::binary_search(list, tile * random_.kernel.key_tile / shape.key_block)) return true;
    }
    return false;
  }
};

class QueriesToKeys : public Direction {
 public:
  QueriesToKeys(const RandomJob& random, const JobLayout& layout) : Direction(random, layout.keys, layout.queries) {}

  std::int64_t bytes() const override { return token_bytes(random_.query_streams, /*queries=*/true); }
  // Positions count from the sequence's first tile of queries.
  std::int64_t position(std::size_t s, std::int64_t index) const override { return index - origin(s); }
  std::int64_t tiles(std::size_t s) const override {
    return sequence(s).q_len == 0 ? 0 : tile_of(s, sequence(s).q_len - 1) + 1;
  }
  TokenRange tokens_of(std::size_t s, std::int64_t tile) const override {
    const std::int64_t begin = origin(s) + tile * random_.kernel.query_tile - sequence(s).q_offset;
    return {std::max<std::int64_t>(0, begin), std::min(begin + random_.kernel.query_tile, sequence(s).q_len)};
  }
  std::int64_t tile_of(std::size_t s, std::int64_t index) const override {
    return floor_divide(sequence(s).q_offset + index - origin(s), random_.kernel.query_tile);
  }

  // The tiles with a query that sees some position of the key's tile: the query at position p sees positions
  // p − left … p + right.
  void find_needed(std::size_t s, std::int64_t index, std::vector<TileRange>& needed) const override {
    needed.clear();
    const Mask& mask = random_.job.spec.mask;
    const std::int64_t key_tile = random_.kernel.key_tile;
    const std::int64_t first_position = index / key_tile * key_tile;
    const std::int64_t last_position = first_position + key_tile - 1;
    std::int64_t first = sequence(s).q_offset;
    std::int64_t last = sequence(s).q_offset + sequence(s).q_len - 1;
    if (mask.right >= 0) first = std::max(first, first_position - mask.right);
    if (mask.left >= 0) last = std::min(last, last_position + mask.left);
    if (first > last) return;
    needed.push_back({tile_of(s, first - sequence(s).q_offset), tile_of(s, last - sequence(s).q_offset) + 1});
  }

 private:
  // The position at which the first tile of queries begins.
  std::int64_t origin(std::size_t s) const {
    if (sequence(s).q_len == 0) return 0;
    return floor_divide(sequence(s).q_offset, random_.kernel.query_tile) * random_.kernel.query_tile;
  }
};

// The plans of all ranks in one direction.
class Simulator {
 public:
  // All arguments but `plans` outlive the object. `boundaries`: first travelling token of each block, then their
  // number.
  Simulator(const RandomJob& random, const Direction& direction, std::vector<const Plan*> plans,
            const std::vector<std::int64_t>& boundaries)
      : random_(random), direction_(direction), plans_(std::move(plans)), boundaries_(boundaries) {
    for (const Plan* plan : plans_) shards_.push_back(direction.travelling().packed_tokens(plan->rank));
  }

  void check_plans() const {
    check_boundaries();
    for (const Plan* plan : plans_) {
      check_sums(*plan);
      check_rows(*plan);
      check_tasks(*plan);
    }
  }

  // Exchanges and assembles a block. Returns the block buffers: [ranks].
  std::vector<Tokens> run_block(std::size_t index) const {
    std::vector<Tokens> buffers;
    for (const Plan* plan : plans_) {
      buffers.emplace_back(static_cast<std::size_t>(plan->blocks[index].buffer_rows), kStale);
    }
    std::vector<std::int64_t> bytes_sent(plans_.size(), 0);
    std::vector<std::int64_t> bytes_received(plans_.size(), 0);
    const MessagePairs all = message_pairs(index);
    for (auto pair = all.begin(); pair != all.end();) {
      // A round reads what earlier rounds brought, and nothing of its own.
      const int round = std::get<0>(pair->first);
      std::vector<std::tuple<int, std::int64_t, Tokens>> arrivals;  // rank, row, tokens
      for (; pair != all.end() && std::get<0>(pair->first) == round; ++pair) {
        const auto [unused, sender, receiver] = pair->first;
        deliver(index, sender, receiver, pair->second, buffers, arrivals);
        for (const auto part : pair->second.send->parts) {
          const std::int64_t bytes =
              plan(sender).blocks[index].parts[static_cast<std::size_t>(part)].rows * direction_.bytes() +
              (random_.options.checksum ? kChecksumBytes : 0);
          bytes_sent[static_cast<std::size_t>(sender)] += bytes;
          bytes_received[static_cast<std::size_t>(receiver)] += bytes;
        }
      }
      for (const auto& [rank, row, tokens] : arrivals) {
        Tokens& buffer = buffers[static_cast<std::size_t>(rank)];
        for (std::size_t i = 0; i < tokens.size(); ++i) {
          std::int64_t& target = buffer[static_cast<std::size_t>(row) + i];
          require(target == kStale, "rank {} receives into row {} twice", rank, row);
          target = tokens[i];
        }
      }
    }
    for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
      const BlockPlan& block = plans_[rank]->blocks[index];
      require(block.bytes_sent == bytes_sent[rank] && block.bytes_received == bytes_received[rank],
              "rank {} counts other bytes than it moves in block {}", rank, index);
      check_only_needed(block, static_cast<int>(rank), buffers[rank]);
      assemble(block, static_cast<int>(rank), buffers[rank]);
      check_tiles(block, static_cast<int>(rank), buffers[rank]);
    }
    return buffers;
  }

  const Tokens& shard(int rank) const { return shards_[static_cast<std::size_t>(rank)]; }

 private:
  const Plan& plan(int rank) const { return *plans_[static_cast<std::size_t>(rank)]; }
  std::span<const std::int64_t> cu() const { return direction_.travelling().cu(); }

  void check_boundaries() const {
    require(boundaries_.size() >= 2 && boundaries_.front() == 0 && boundaries_.back() == cu().back(),
            "blocks don't run from the first to the last token");
    for (std::size_t i = 0; i + 1 < boundaries_.size(); ++i) {
      const std::int64_t token = boundaries_[i];
      const std::int64_t tokens = boundaries_[i + 1] - token;
      require(tokens >= 0, "block {} has {} tokens", i, tokens);
      if (token < cu().back()) {
        const auto s = static_cast<std::size_t>(std::upper_bound(cu().begin(), cu().end(), token) - cu().begin() - 1);
        const std::int64_t index = token - cu()[s];
        require(direction_.tokens_of(s, direction_.tile_of(s, index)).begin == index, "block {} cuts a tile", i);
      }
      const std::int64_t wanted = random_.options.block_tokens;
      require(wanted == 0 || tokens < wanted + random_.kernel.key_tile, "block {} has {} tokens, not {}", i, tokens,
              wanted);
      const std::int64_t limit = random_.options.max_block_tokens;
      require(limit == 0 || wanted > 0 || tokens <= std::max<std::int64_t>(limit, random_.kernel.key_tile),
              "block {} has {} tokens, more than {}", i, tokens, limit);
    }
  }

  void check_sums(const Plan& plan) const {
    require(plan.blocks.size() + 1 == boundaries_.size(), "rank {} has {} blocks", plan.rank, plan.blocks.size());
    require(plan.key_lengths.size() == random_.job.batch.sequences.size(), "key_lengths of rank {}", plan.rank);
    std::int64_t rows = 0;
    for (std::size_t i = 0; i < plan.blocks.size(); ++i) {
      rows = std::max(rows, plan.blocks[i].buffer_rows);
      require(plan.blocks[i].first_token == boundaries_[i] && plan.blocks[i].last_token == boundaries_[i + 1],
              "block {} of rank {} has other ends", i, plan.rank);
    }
    require(plan.buffer_rows == rows, "rank {} says {} buffer rows, needs {}", plan.rank, plan.buffer_rows, rows);
    require(static_cast<std::int64_t>(plan.block_buffer_bytes) == rows * direction_.bytes(), "buffer bytes");
  }

  // The runs cover every row that stays once, in order, and are where the layout says.
  void check_rows(const Plan& plan) const {
    const Tokens tokens = direction_.staying().packed_tokens(plan.rank);
    const std::span<const std::int64_t> cu = direction_.staying().cu();
    std::int64_t row = 0;
    for (const QueryRun& run : plan.queries) {
      require(run.row == row && run.rows > 0, "run of rank {} at row {}", plan.rank, row);
      const auto s = static_cast<std::size_t>(run.sequence);
      for (std::int64_t i = 0; i < run.rows; ++i, ++row) {
        const std::int64_t position = direction_.position(s, tokens[static_cast<std::size_t>(row)] - cu[s]);
        require(run.position + i == position, "row {} of rank {} at position {}, not {}", row, plan.rank,
                run.position + i, position);
      }
    }
    require(row == static_cast<std::int64_t>(tokens.size()), "rank {} covers {} rows", plan.rank, row);
  }

  // Over all blocks, a rank's tiles are exactly those of its rows, each once, ascending, each in its block.
  void check_tasks(const Plan& plan) const {
    std::vector<std::vector<int>> changes(random_.job.batch.sequences.size());  // of the number of rows that use a tile
    for (std::size_t s = 0; s < changes.size(); ++s) {
      changes[s].assign(static_cast<std::size_t>(direction_.tiles(s)) + 1, 0);
    }
    std::vector<TileRange> needed;
    for (const TokenRun& run : direction_.staying().runs(plan.rank)) {
      const auto s = static_cast<std::size_t>(run.sequence);
      for (std::int64_t index = run.begin; index < run.end; ++index) {
        direction_.find_needed(s, index, needed);
        for (const TileRange& tiles : needed) {
          ++changes[s][static_cast<std::size_t>(tiles.begin)];
          --changes[s][static_cast<std::size_t>(tiles.end)];
        }
      }
    }
    std::vector<std::pair<std::int32_t, std::int64_t>> expected;
    for (std::size_t s = 0; s < changes.size(); ++s) {
      int rows = 0;
      for (std::size_t tile = 0; tile < changes[s].size(); ++tile) {
        rows += changes[s][tile];
        if (rows > 0) expected.emplace_back(static_cast<std::int32_t>(s), static_cast<std::int64_t>(tile));
      }
    }
    std::vector<std::pair<std::int32_t, std::int64_t>> planned;
    for (const BlockPlan& block : plan.blocks) {
      std::int64_t table = 0;
      for (const KeyRun& run : block.key_runs) {
        require(run.table == table && run.tiles > 0, "tile table of rank {}", plan.rank);
        table += run.tiles;
        for (std::int64_t i = 0; i < run.tiles; ++i) {
          const auto [begin, end] = packed_tokens_of(run.sequence, run.first_tile + i);
          require(begin >= block.first_token && end <= block.last_token, "rank {} computes a tile in the wrong block",
                  plan.rank);
          planned.emplace_back(run.sequence, run.first_tile + i);
        }
      }
      require(table == static_cast<std::int64_t>(block.tiles.size()), "tile map of rank {}", plan.rank);
    }
    require(planned == expected, "rank {} computes {} tiles, should compute {}, or others or in another order",
            plan.rank, planned.size(), expected.size());
  }

  TokenRange packed_tokens_of(std::int32_t sequence, std::int64_t tile) const {
    const auto s = static_cast<std::size_t>(sequence);
    const TokenRange tokens = direction_.tokens_of(s, tile);
    return {cu()[s] + tokens.begin, cu()[s] + tokens.end};
  }

  // One message as both sides describe it.
  struct MessagePair {
    const PlannedMessage* send = nullptr;
    const PlannedMessage* receive = nullptr;
  };
  using MessagePairs = std::map<std::tuple<int, int, int>, MessagePair>;  // by (round, sender, receiver)

  MessagePairs message_pairs(std::size_t index) const {
    MessagePairs all;
    for (const Plan* planned : plans_) {
      const Plan& plan = *planned;
      const BlockPlan& block = plan.blocks[index];
      int round = 0;
      for (const PlannedMessage& send : block.sends) {
        require(send.round >= round && send.peer != plan.rank && !send.parts.empty(), "sends of rank {}", plan.rank);
        round = send.round;
        MessagePair& pair = all[{send.round, plan.rank, send.peer}];
        require(pair.send == nullptr, "rank {} sends twice to {} in round {}", plan.rank, send.peer, send.round);
        pair.send = &send;
      }
      round = 0;
      for (const PlannedMessage& receive : block.receives) {
        require(receive.round >= round && receive.peer != plan.rank, "receives of rank {}", plan.rank);
        round = receive.round;
        MessagePair& pair = all[{receive.round, receive.peer, plan.rank}];
        require(pair.receive == nullptr, "rank {} receives twice in a round", plan.rank);
        pair.receive = &receive;
      }
    }
    return all;
  }

  // The tokens that a part brings, read where `rank` has them.
  Tokens read_part(const MessagePart& part, int rank, const Tokens& buffer) const {
    const bool own = part.owner == rank;
    require(own == (part.buffer_row < 0), "a part of rank {} has the wrong place", rank);
    const Tokens& from = own ? shard(rank) : buffer;
    const std::int64_t row = own ? part.owner_row : part.buffer_row;
    require(row >= 0 && part.rows > 0 && row + part.rows <= static_cast<std::int64_t>(from.size()),
            "a part of rank {} reaches out of its memory", rank);
    return {from.begin() + row, from.begin() + row + part.rows};
  }

  void deliver(std::size_t index, int sender, int receiver, const MessagePair& pair, const std::vector<Tokens>& buffers,
               std::vector<std::tuple<int, std::int64_t, Tokens>>& arrivals) const {
    require(pair.send != nullptr && pair.receive != nullptr, "block {}: only one side of {} → {} is planned", index,
            sender, receiver);
    const BlockPlan& source = plan(sender).blocks[index];
    const BlockPlan& target = plan(receiver).blocks[index];
    require(pair.send->parts.size() == pair.receive->parts.size(), "block {}: {} → {} differ in parts", index, sender,
            receiver);
    for (std::size_t i = 0; i < pair.send->parts.size(); ++i) {
      const MessagePart& from = source.parts[static_cast<std::size_t>(pair.send->parts[i])];
      const MessagePart& to = target.parts[static_cast<std::size_t>(pair.receive->parts[i])];
      require(from.owner == to.owner && from.owner_row == to.owner_row && from.rows == to.rows,
              "block {}: {} → {} differ in part {}", index, sender, receiver, i);
      require(to.buffer_row >= 0 && to.buffer_row + to.rows <= target.buffer_rows, "block {}: {} overruns its buffer",
              index, receiver);
      Tokens tokens = read_part(from, sender, buffers[static_cast<std::size_t>(sender)]);
      require(std::find(tokens.begin(), tokens.end(), kStale) == tokens.end(),
              "block {}: {} hands on what it has not received", index, sender);
      arrivals.emplace_back(receiver, to.buffer_row, std::move(tokens));
    }
  }

  // The received rows are those that the rank uses in this block and doesn't own: no row more, none less.
  void check_only_needed(const BlockPlan& block, int rank, const Tokens& buffer) const {
    Tokens needed;
    for (const KeyRun& run : block.key_runs) {
      const std::int64_t begin = packed_tokens_of(run.sequence, run.first_tile).begin;
      const std::int64_t end = packed_tokens_of(run.sequence, run.first_tile + run.tiles - 1).end;
      for (std::int64_t token = begin; token < end; ++token) needed.push_back(token);
    }
    Tokens missing;
    std::set_difference(needed.begin(), needed.end(), shard(rank).begin(), shard(rank).end(),
                        std::back_inserter(missing));
    Tokens arrived;
    std::copy_if(buffer.begin(), buffer.end(), std::back_inserter(arrived), [](std::int64_t t) { return t != kStale; });
    std::sort(arrived.begin(), arrived.end());
    require(arrived == missing, "rank {} receives {} rows, lacks {}, or others", rank, arrived.size(), missing.size());
  }

  void assemble(const BlockPlan& block, int rank, Tokens& buffer) const {
    for (const RowCopy& copy : block.copies) {
      const Tokens& from = copy.from_shard ? shard(rank) : buffer;
      require(copy.rows > 0 && copy.from_row >= 0 &&
                  copy.from_row + copy.rows <= static_cast<std::int64_t>(from.size()) && copy.to_row >= 0 &&
                  copy.to_row + copy.rows <= static_cast<std::int64_t>(buffer.size()),
              "a copy of rank {} reaches out of its memory", rank);
      for (std::int64_t i = 0; i < copy.rows; ++i) {
        std::int64_t& target = buffer[static_cast<std::size_t>(copy.to_row + i)];
        require(target == kStale, "rank {} assembles over row {}", rank, copy.to_row + i);
        target = from[static_cast<std::size_t>(copy.from_row + i)];
      }
    }
  }

  void check_tiles(const BlockPlan& block, int rank, const Tokens& buffer) const {
    for (const KeyRun& run : block.key_runs) {
      for (std::int64_t i = 0; i < run.tiles; ++i) {
        const PageRun& tile = block.tiles[static_cast<std::size_t>(run.table + i)];
        require(tile.source == kOwnShard || tile.source == kBlockBuffer, "rank {} has a tile in no source", rank);
        const Tokens& from = tile.source == kOwnShard ? shard(rank) : buffer;
        const auto [begin, end] = packed_tokens_of(run.sequence, run.first_tile + i);
        require(tile.row >= 0 && tile.row + end - begin <= static_cast<std::int64_t>(from.size()),
                "a tile of rank {} reaches out of its source", rank);
        for (std::int64_t token = begin; token < end; ++token) {
          const std::int64_t found = from[static_cast<std::size_t>(tile.row + token - begin)];
          require(found == token, "rank {} finds token {} where {} should be", rank, found, token);
        }
      }
    }
  }

  const RandomJob& random_;
  const Direction& direction_;
  std::vector<const Plan*> plans_;               // [ranks]
  const std::vector<std::int64_t>& boundaries_;  // [blocks + 1]
  std::vector<Tokens> shards_;                   // [ranks]
};

// The plans of all ranks, in one direction or in both.
class World {
 public:
  World(const RandomJob& random, const JobLayout& layout)
      : random_(random), layout_(layout), work_(random.work()), keys_(random, layout), queries_(random, layout) {
    const Planner planner(work_, layout, random.kernel, random.machine, random.options);
    boundaries_[0] = planner.boundaries();
    std::array<std::vector<const Plan*>, 2> plans;
    for (int rank = 0; rank < random.world; ++rank) plans_.push_back(planner.plan(rank));
    for (const Plan& plan : plans_) {
      require((plan.to_keys != nullptr) == work_.sends_queries(), "rank {} has a plan of too few directions",
              plan.rank);
      plans[0].push_back(&plan);
      plans[1].push_back(plan.to_keys.get());
    }
    directions_.emplace_back(random, keys_, plans[0], boundaries_[0]);
    if (!work_.sends_queries()) return;
    for (const BlockPlan& block : plans[1][0]->blocks) boundaries_[1].push_back(block.first_token);
    boundaries_[1].push_back(plans[1][0]->blocks.back().last_token);
    require(boundaries_[0].size() == boundaries_[1].size(), "{} blocks of keys, {} of queries",
            boundaries_[0].size() - 1, boundaries_[1].size() - 1);
    directions_.emplace_back(random, queries_, plans[1], boundaries_[1]);
    for (const Plan& plan : plans_) {
      exchanges_.push_back(
          recorded_exchanges(plan, work_.streams, {layout.keys.tokens(plan.rank), layout.queries.tokens(plan.rank)}));
    }
  }

  void check() const {
    for (const Simulator& direction : directions_) direction.check_plans();
    check_cut();
    check_sums();
    for (std::size_t block = 0; block + 1 < boundaries_[0].size(); ++block) {
      std::vector<std::vector<Tokens>> buffers;
      for (const Simulator& direction : directions_) buffers.push_back(direction.run_block(block));
      if (work_.sends_queries()) check_exchanges(block, buffers);
    }
  }

 private:
  // A token's coordinate in the job: its sequence and its key position.
  using Coordinate = std::pair<std::size_t, std::int64_t>;
  static constexpr Coordinate kBeforeAll{0, std::numeric_limits<std::int64_t>::min()};
  static constexpr Coordinate kAfterAll{std::numeric_limits<std::size_t>::max(), 0};

  Coordinate key_coordinate(std::int64_t token) const {
    const auto [s, index] = token_in_sequence(layout_.keys, token);
    return {s, index};
  }
  Coordinate query_coordinate(std::int64_t token) const {
    const auto [s, index] = token_in_sequence(layout_.queries, token);
    return {s, index + random_.job.batch.sequences[s].q_offset};
  }
  static Coordinate token_in_sequence(const Layout& layout, std::int64_t token) {
    const auto cu = layout.cu();
    const auto s = static_cast<std::size_t>(std::upper_bound(cu.begin(), cu.end(), token) - cu.begin() - 1);
    return {s, token - cu[s]};
  }

  // No block is empty, and each ends at a multiple of the key tile: before it are the keys and queries of earlier
  // blocks, after it those of later ones.
  void check_cut() const {
    const auto& [keys, queries] = boundaries_;
    const bool both = work_.sends_queries();
    for (std::size_t i = 0; i + 1 < keys.size(); ++i) {
      const std::int64_t tokens = keys[i + 1] - keys[i] + (both ? queries[i + 1] - queries[i] : 0);
      const bool last = i + 2 == keys.size();
      require(tokens > 0 || (i == 0 && last), "block {} is empty", i);
      require(last || tokens >= random_.options.block_tokens, "block {} has only {} tokens", i, tokens);
      if (!both || last) continue;
      const std::int64_t key = keys[i + 1];
      const std::int64_t query = queries[i + 1];
      const Coordinate before = std::max(key > 0 ? key_coordinate(key - 1) : kBeforeAll,
                                         query > 0 ? query_coordinate(query - 1) : kBeforeAll);
      const Coordinate after = std::min(key < keys.back() ? key_coordinate(key) : kAfterAll,
                                        query < queries.back() ? query_coordinate(query) : kAfterAll);
      require(before < after, "block {} ends at different positions", i);
      const std::int64_t tile = random_.kernel.key_tile;
      require(before.first < after.first || floor_divide(after.second, tile) * tile > before.second,
              "block {} doesn't end at a tile of keys", i);
    }
  }

  // Pairs (query, key) that the mask lets through.
  double visible_pairs() const {
    double pairs = 0.0;
    const Mask& mask = random_.job.spec.mask;
    for (const Sequence& s : random_.job.batch.sequences) {
      for (std::int64_t position = s.q_offset; position < s.q_offset + s.q_len; ++position) {
        const std::int64_t begin = mask.left < 0 ? 0 : std::max<std::int64_t>(0, position - mask.left);
        const std::int64_t end = mask.right < 0 ? s.k_len : std::min(s.k_len, position + mask.right + 1);
        pairs += static_cast<double>(std::max<std::int64_t>(0, end - begin));
      }
    }
    return pairs;
  }

  void check_sums() const {
    double flops = 0.0;
    std::int64_t sent = 0;
    std::int64_t received = 0;
    const PlanOptions& options = random_.options;
    for (const Plan& plan : plans_) {
      flops += plan.flops();
      sent += plan.bytes_sent();
      received += plan.bytes_received();
      require(plan.keeps_state == (plan.blocks.size() > 1 || options.state_out), "rank {} keeps state: {}", plan.rank,
              plan.keeps_state);
      const std::size_t buffer_bytes =
          plan.block_buffer_bytes + (work_.sends_queries() ? plan.to_keys->block_buffer_bytes : 0);
      require(
          plan.memory_bytes == options.fixed_bytes + (plan.keeps_state ? options.state_bytes : 0) + 2 * buffer_bytes,
          "memory bytes");
      require(options.memory_budget == 0 || plan.memory_bytes <= options.memory_budget, "rank {} takes {} bytes of {}",
              plan.rank, plan.memory_bytes, options.memory_budget);
    }
    require(sent == received, "{} bytes sent, {} received", sent, received);
    const double expected =
        (work_.block_mask != nullptr ? job_flops(random_.job)
                                     : visible_pairs() * (work_.pair_flops + work_.query_pair_flops)) +
        work_.query_flops * static_cast<double>(random_.job.batch.q_tokens());
    require(std::abs(flops - expected) <= 1e-12 * expected, "{} flops, the job has {}", flops, expected);
  }

  // Ranks exchange the rows of both directions in one message, and send and receive its spans in the same order.
  void check_exchanges(std::size_t block, const std::vector<std::vector<Tokens>>& buffers) const {
    using Ends = std::tuple<int, int, int>;  // round, sender, receiver
    std::map<Ends, const RecordedMessage*> receives;
    for (const Plan& plan : plans_) {
      int round = 0;
      for (const RecordedMessage& message : exchange(plan.rank, block).receives) {
        require(message.round >= round, "block {}: rank {} receives in the wrong order", block, plan.rank);
        round = message.round;
        require(receives.emplace(Ends{message.round, message.peer, plan.rank}, &message).second,
                "block {}: rank {} receives two messages of rank {} in a round", block, plan.rank, message.peer);
      }
    }
    std::set<Ends> sends;
    for (const Plan& plan : plans_) {
      std::size_t spans_of_plan = 0;
      for (const RowStream& stream : work_.streams) {
        const BlockPlan& planned = (stream.queries ? *plan.to_keys : plan).blocks[block];
        for (const PlannedMessage& message : planned.sends) spans_of_plan += message.parts.size();
      }
      int round = 0;
      for (const RecordedMessage& message : exchange(plan.rank, block).sends) {
        require(message.round >= round, "block {}: rank {} sends in the wrong order", block, plan.rank);
        round = message.round;
        const Ends ends{message.round, plan.rank, message.peer};
        require(sends.insert(ends).second, "block {}: rank {} sends two messages to rank {} in a round", block,
                plan.rank, message.peer);
        const auto receive = receives.find(ends);
        require(receive != receives.end(), "block {}: rank {} doesn't receive from rank {}", block, message.peer,
                plan.rank);
        const std::vector<SpanRows>& spans = receive->second->spans;
        spans_of_plan -= spans.size();
        require(message.spans.size() == spans.size(), "block {}: {} → {} differ in spans", block, plan.rank,
                message.peer);
        for (std::size_t i = 0; i < spans.size(); ++i) {
          require(message.spans[i].stream == spans[i].stream && !spans[i].shard &&
                      tokens_of(message.spans[i], plan.rank, buffers) == tokens_of(spans[i], message.peer, buffers),
                  "block {}: {} → {} differ in span {}", block, plan.rank, message.peer, i);
        }
      }
      require(spans_of_plan == 0, "block {}: rank {} sends other parts than planned", block, plan.rank);
    }
    require(sends.size() == receives.size(), "block {}: a message is not sent", block);
  }

  const RecordedExchange& exchange(int rank, std::size_t block) const {
    return exchanges_[static_cast<std::size_t>(rank)][block];
  }

  Tokens tokens_of(const SpanRows& span, int rank, const std::vector<std::vector<Tokens>>& buffers) const {
    const std::size_t direction = work_.streams[span.stream].queries ? 1 : 0;
    const Tokens& from =
        span.shard ? directions_[direction].shard(rank) : buffers[direction][static_cast<std::size_t>(rank)];
    require(span.row + span.rows <= static_cast<std::int64_t>(from.size()), "a span of rank {} is too long", rank);
    return {from.begin() + span.row, from.begin() + span.row + span.rows};
  }

  const RandomJob& random_;
  const JobLayout& layout_;
  RingWork work_;
  KeysToQueries keys_;
  QueriesToKeys queries_;
  std::array<std::vector<std::int64_t>, 2> boundaries_;   // [directions][blocks + 1]
  std::vector<Plan> plans_;                               // [ranks]
  std::vector<Simulator> directions_;                     // keys to queries; queries to keys
  std::vector<std::vector<RecordedExchange>> exchanges_;  // [ranks][blocks], if queries travel
};

}  // namespace

std::string broken_promise(const RandomJob& random, const JobLayout& layout) {
  try {
    World(random, layout).check();
  } catch (const Broken& broken) {
    return broken.what;
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace ringattn::testing
