// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/ring/plan_simulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "ops/attention/attention_work.hpp"

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

class Simulator {
 public:
  Simulator(const RandomJob& random, const JobLayout& layout)
      : random_(random), job_(random.job), layout_(layout), cu_k_(random.job.batch.cu_k()) {
    const Planner planner(attention_work(job_), layout, random.kernel, random.machine, random.options);
    boundaries_ = planner.boundaries();
    for (int rank = 0; rank < random.world; ++rank) {
      plans_.push_back(planner.plan(rank));
      shards_.push_back(layout.keys.packed_tokens(rank));
    }
  }

  void run() {
    check_boundaries();
    check_sums();
    for (int rank = 0; rank < random_.world; ++rank) {
      check_queries(plan(rank));
      check_tasks(plan(rank));
    }
    for (std::size_t block = 0; block + 1 < boundaries_.size(); ++block) run_block(block);
  }

 private:
  const Plan& plan(int rank) const { return plans_[static_cast<std::size_t>(rank)]; }
  const Tokens& shard(int rank) const { return shards_[static_cast<std::size_t>(rank)]; }

  void check_boundaries() const {
    require(boundaries_.size() >= 2 && boundaries_.front() == 0 && boundaries_.back() == cu_k_.back(),
            "blocks don't run from the first to the last token");
    for (std::size_t i = 0; i + 1 < boundaries_.size(); ++i) {
      const std::int64_t token = boundaries_[i];
      require(token < boundaries_[i + 1] || cu_k_.back() == 0, "block {} is empty", i);
      const std::int64_t begin = *std::prev(std::upper_bound(cu_k_.begin(), cu_k_.end(), token));
      require((token - begin) % random_.kernel.key_tile == 0 || token == cu_k_.back(), "block {} cuts a tile", i);
      const std::int64_t wanted = random_.options.block_tokens;
      if (wanted == 0) continue;
      const std::int64_t tokens = boundaries_[i + 1] - token;
      require(tokens < wanted + random_.kernel.key_tile, "block {} has {} tokens, not {}", i, tokens, wanted);
      require(tokens >= wanted || boundaries_[i + 1] == cu_k_.back(), "block {} has only {} tokens", i, tokens);
    }
  }

  void check_sums() const {
    double flops = 0.0;
    std::int64_t sent = 0;
    std::int64_t received = 0;
    for (const Plan& plan : plans_) {
      require(plan.blocks.size() + 1 == boundaries_.size(), "rank {} has {} blocks", plan.rank, plan.blocks.size());
      require(plan.key_lengths.size() == job_.batch.sequences.size(), "key_lengths of rank {}", plan.rank);
      flops += plan.flops();
      sent += plan.bytes_sent();
      received += plan.bytes_received();
      std::int64_t rows = 0;
      for (std::size_t i = 0; i < plan.blocks.size(); ++i) {
        rows = std::max(rows, plan.blocks[i].buffer_rows);
        require(plan.blocks[i].first_token == boundaries_[i] && plan.blocks[i].last_token == boundaries_[i + 1],
                "block {} of rank {} has other ends", i, plan.rank);
      }
      require(plan.buffer_rows == rows, "rank {} says {} buffer rows, needs {}", plan.rank, plan.buffer_rows, rows);
      require(static_cast<std::int64_t>(plan.block_buffer_bytes) == rows * kv_token_bytes(job_.spec), "buffer bytes");
      require(plan.keeps_state == (plan.blocks.size() > 1 || random_.options.state_out), "rank {} keeps state: {}",
              plan.rank, plan.keeps_state);
      const std::size_t state_bytes = plan.keeps_state ? random_.options.state_bytes : 0;
      require(plan.memory_bytes == random_.options.fixed_bytes + state_bytes + 2 * plan.block_buffer_bytes,
              "memory bytes");
      require(random_.options.memory_budget == 0 || plan.memory_bytes <= random_.options.memory_budget,
              "rank {} takes {} bytes of {}", plan.rank, plan.memory_bytes, random_.options.memory_budget);
    }
    require(sent == received, "{} bytes sent, {} received", sent, received);
    require(std::abs(flops - job_flops(job_)) <= 1e-12 * job_flops(job_), "{} flops, the job has {}", flops,
            job_flops(job_));
  }

  // The runs cover every row once, in order, and stand where the layout says.
  void check_queries(const Plan& plan) const {
    const std::vector<std::int64_t> tokens = layout_.queries.packed_tokens(plan.rank);
    const std::vector<std::int64_t> cu_q = job_.batch.cu_q();
    std::int64_t row = 0;
    for (const QueryRun& run : plan.queries) {
      require(run.row == row && run.rows > 0, "query run of rank {} at row {}", plan.rank, row);
      const auto s = static_cast<std::size_t>(run.sequence);
      for (std::int64_t i = 0; i < run.rows; ++i, ++row) {
        const std::int64_t position =
            tokens[static_cast<std::size_t>(row)] - cu_q[s] + job_.batch.sequences[s].q_offset;
        require(run.position + i == position, "row {} of rank {} at position {}, not {}", row, plan.rank,
                run.position + i, position);
      }
    }
    require(row == static_cast<std::int64_t>(tokens.size()), "rank {} covers {} rows", plan.rank, row);
  }

  // Over all blocks, a rank's tiles are exactly those of its rows, each once, ascending, each in its block.
  void check_tasks(const Plan& plan) const {
    std::vector<std::vector<int>> changes(job_.batch.sequences.size());  // of the number of rows that use a tile
    for (std::size_t s = 0; s < changes.size(); ++s) {
      changes[s].assign(static_cast<std::size_t>(job_.batch.sequences[s].k_len / random_.kernel.key_tile) + 2, 0);
    }
    for (const QueryRun& run : plan.queries) {
      const auto s = static_cast<std::size_t>(run.sequence);
      for (std::int64_t i = 0; i < run.rows; ++i) {
        const TileRange tiles = Visibility(job_.spec.mask, job_.batch.sequences[s].k_len)
                                    .tiles(run.position + i, {random_.kernel.query_tile, random_.kernel.key_tile});
        for (std::int64_t tile = tiles.begin; tile < tiles.end && job_.block_mask != nullptr; ++tile) {
          if (!lists_tile(s, run.position + i, tile)) continue;
          ++changes[s][static_cast<std::size_t>(tile)];
          --changes[s][static_cast<std::size_t>(tile) + 1];
        }
        if (tiles.empty() || job_.block_mask != nullptr) continue;
        ++changes[s][static_cast<std::size_t>(tiles.begin)];
        --changes[s][static_cast<std::size_t>(tiles.end)];
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
          const auto [begin, end] = tile_tokens(run.sequence, run.first_tile + i);
          require(begin >= block.first_token && end <= block.last_token, "rank {} folds a tile in the wrong block",
                  plan.rank);
          planned.emplace_back(run.sequence, run.first_tile + i);
        }
      }
      require(table == static_cast<std::int64_t>(block.tiles.size()), "tile map of rank {}", plan.rank);
    }
    require(planned == expected, "rank {} folds {} tiles, should fold {}, or others or in another order", plan.rank,
            planned.size(), expected.size());
  }

  // Whether some head's mask row of the position names the tile.
  bool lists_tile(std::size_t sequence, std::int64_t position, std::int64_t tile) const {
    const BlockMaskShape& shape = job_.block_mask->shape();
    std::int64_t block = position / shape.query_block;
    if (block * shape.query_block > position) --block;
    for (int head = 0; head < shape.heads; ++head) {
      const auto list = job_.block_mask->row(sequence, head, block);
      if (std::ranges::binary_search(list, tile * random_.kernel.key_tile / shape.key_block)) return true;
    }
    return false;
  }

  std::pair<std::int64_t, std::int64_t> tile_tokens(std::int32_t sequence, std::int64_t tile) const {
    const auto s = static_cast<std::size_t>(sequence);
    const std::int64_t begin = tile * random_.kernel.key_tile;
    const std::int64_t end = std::min(begin + random_.kernel.key_tile, job_.batch.sequences[s].k_len);
    return {cu_k_[s] + begin, cu_k_[s] + end};
  }

  // One message as both sides describe it.
  struct MessagePair {
    const PlannedMessage* send = nullptr;
    const PlannedMessage* receive = nullptr;
  };
  using MessagePairs = std::map<std::tuple<int, int, int>, MessagePair>;  // by (round, sender, receiver)

  MessagePairs message_pairs(std::size_t index) const {
    MessagePairs all;
    for (const Plan& plan : plans_) {
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

  void run_block(std::size_t index) {
    std::vector<Tokens> buffers;
    for (const Plan& plan : plans_) {
      buffers.emplace_back(static_cast<std::size_t>(plan.blocks[index].buffer_rows), kStale);
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
              plan(sender).blocks[index].parts[static_cast<std::size_t>(part)].rows * kv_token_bytes(job_.spec) +
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
      const BlockPlan& block = plans_[rank].blocks[index];
      require(block.bytes_sent == bytes_sent[rank] && block.bytes_received == bytes_received[rank],
              "rank {} counts other bytes than it moves in block {}", rank, index);
      check_only_needed(block, static_cast<int>(rank), buffers[rank]);
      assemble(block, static_cast<int>(rank), buffers[rank]);
      check_tiles(block, static_cast<int>(rank), buffers[rank]);
    }
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
      const std::int64_t begin = tile_tokens(run.sequence, run.first_tile).first;
      const std::int64_t end = tile_tokens(run.sequence, run.first_tile + run.tiles - 1).second;
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
        const auto [begin, end] = tile_tokens(run.sequence, run.first_tile + i);
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
  const Job& job_;
  const JobLayout& layout_;
  std::vector<std::int64_t> cu_k_;
  std::vector<std::int64_t> boundaries_;
  std::vector<Plan> plans_;
  std::vector<Tokens> shards_;
};

}  // namespace

std::string broken_promise(const RandomJob& random, const JobLayout& layout) {
  try {
    Simulator(random, layout).run();
  } catch (const Broken& broken) {
    return broken.what;
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace ringattn::testing
