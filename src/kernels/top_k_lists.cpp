// SPDX-License-Identifier: Apache-2.0
#include "kernels/top_k_lists.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/device_patience.hpp"
#include "base/error.hpp"
#include "base/pulse.hpp"
#include "kernels/list_choice.hpp"

namespace ringattn {

namespace {

void check_count(int count) {
  if (count >= 1) return;
  fail(ErrorCode::kUsage, fmt::format("lists of the best {} blocks", count), "a list names at least one",
       "Use 1 or more.");
}

// The query blocks of a sequence.
TileRange query_blocks_of(const ListedSequence& of, int query_block) {
  if (of.queries == 0) return {0, 0};
  return {query_block_of(of.position, query_block), query_block_of(of.position + of.queries - 1, query_block) + 1};
}

// What a query block of the sequence may list; `first` is left to the caller.
ListCandidates candidates_of(const FoldSpec& spec, const ListedSequence& of, std::int64_t query_block, int count) {
  const std::int64_t begin = std::max(query_block * spec.lists.query_block, of.position);
  const std::int64_t end = std::min((query_block + 1) * spec.lists.query_block, of.position + of.queries);
  const TileRange seen = tiles_of(Visibility(spec.mask, of.keys).keys(begin, end - 1), spec.lists.key_block);
  if (seen.empty()) return {};
  const std::int64_t diagonal = std::clamp((end - 1) / spec.lists.key_block, seen.begin, seen.end - 1);
  const std::int64_t wanted = std::max(count, diagonal == seen.begin ? 1 : 2);
  return {static_cast<std::int32_t>(seen.begin), static_cast<std::int32_t>(seen.end),
          static_cast<std::int32_t>(diagonal), static_cast<std::int32_t>(std::min(wanted, seen.end - seen.begin)), 0};
}

// Numbers in a backend's memory.
template <class Number>
class Numbers {
 public:
  Numbers(Backend& backend, std::int64_t count)
      : buffer_(backend.allocate(static_cast<std::size_t>(std::max<std::int64_t>(count, 1)) * sizeof(Number))) {}

  Number* data() const { return reinterpret_cast<Number*>(buffer_.data()); }

 private:
  Buffer buffer_;
};

template <class Number>
void copy(Backend& backend, Number* to, const Number* from, std::int64_t count, Stream stream) {
  const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(Number));
  if (bytes > 0) backend.copy_rows(to, bytes, from, bytes, bytes, 1, stream);
}

// How the lists lie, which follows from lengths and the mask alone.
struct ListPlan {
  std::vector<ListCandidates> candidates;  // of all sequences' query blocks
  std::vector<std::int64_t> begins{0};     // of TileLists
  std::vector<std::int64_t> entries;       // of a head, of each sequence
  std::int64_t key_blocks = 0;             // of the longest sequence
};

ListPlan plan_lists(const FoldSpec& spec, std::span<const ListedSequence> sequences, int count) {
  ListPlan plan;
  for (const ListedSequence& of : sequences) {
    const TileRange blocks = query_blocks_of(of, spec.lists.query_block);
    const std::size_t own = plan.candidates.size();
    std::int64_t entries = 0;
    for (std::int64_t q = blocks.begin; q < blocks.end; ++q) {
      ListCandidates& candidates = plan.candidates.emplace_back(candidates_of(spec, of, q, count));
      candidates.first = entries;
      entries += candidates.count;
    }
    for (int head = 0; head < spec.lists.heads; ++head) {
      const std::int64_t before = plan.begins.back();
      for (std::size_t i = own; i < plan.candidates.size(); ++i) {
        plan.begins.push_back(before + plan.candidates[i].first + plan.candidates[i].count);
      }
    }
    plan.entries.push_back(entries);
    plan.key_blocks = std::max(plan.key_blocks, (of.keys + spec.lists.key_block - 1) / spec.lists.key_block);
  }
  return plan;
}

// Query blocks that are chosen for at a time: their scores and mean queries have room, and a device's grid does.
std::int64_t blocks_at_a_time(const FoldSpec& spec, std::int64_t key_blocks) {
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 16;
  const std::int64_t numbers = spec.lists.heads * key_blocks + std::int64_t{spec.heads} * spec.head_dim;
  return std::clamp<std::int64_t>(kTopKScratchBytes / static_cast<std::int64_t>(sizeof(float)) / numbers, 1,
                                  kMostBlocks);
}

}  // namespace

void check_top_k(const FoldSpec& spec, std::span<const ListedSequence> sequences, int count, const ListRoom& room) {
  check_count(count);
  const std::int64_t lists = count_lists(spec.lists, sequences, room);
  std::int64_t entries = 0;
  for (const ListedSequence& of : sequences) {
    const TileRange blocks = query_blocks_of(of, spec.lists.query_block);
    for (std::int64_t q = blocks.begin; q < blocks.end; ++q) {
      entries += std::int64_t{candidates_of(spec, of, q, count).count} * spec.lists.heads;
    }
    check_room(spec.lists, list_bytes(lists, entries), room);
  }
}

RowSource packed_rows(std::span<const ListedSequence> sequences, const TensorView& q, const TensorView& k) {
  std::vector<std::int64_t> queries{0}, keys{0};  // in front of each sequence
  for (const ListedSequence& of : sequences) {
    queries.push_back(queries.back() + of.queries);
    keys.push_back(keys.back() + of.keys);
  }
  return [=](SyntheticTensor tensor, std::size_t sequence, std::int64_t first, std::int64_t most) {
    const bool of_queries = tensor == SyntheticTensor::kQ;
    TensorView rows = of_queries ? q : k;
    rows.data = rows.at((of_queries ? queries : keys)[sequence] + first, 0);
    rows.tokens = most;
    return rows;
  };
}

TileLists top_k_lists(const FoldSpec& spec, std::vector<ListedSequence> sequences, int count, const RowSource& rows,
                      Backend& backend, Stream stream) {
  check_count(count);
  const ListShape& shape = spec.lists;
  if (!shape.any() || shape.key_block < 1 || shape.heads < 1 || spec.kv_heads < 1 || spec.heads % spec.kv_heads != 0 ||
      spec.heads % shape.heads != 0) {
    fail(ErrorCode::kUsage,
         fmt::format("lists of {} heads, of {} query heads and {} KV heads", shape.heads, spec.heads, spec.kv_heads),
         "each number divides the one of query heads, and blocks have at least a token",
         "Use lists for all heads, for each KV head, or for each query head.");
  }
  ListPlan plan = plan_lists(spec, sequences, count);
  const std::int64_t at_a_time = blocks_at_a_time(spec, plan.key_blocks);
  const Numbers<float> keys(backend, plan.key_blocks * spec.kv_heads * spec.head_dim);
  const Numbers<float> queries(backend, at_a_time * spec.heads * spec.head_dim);
  const Numbers<float> scores(backend, at_a_time * shape.heads * plan.key_blocks);
  const Numbers<ListCandidates> candidates(backend, static_cast<std::int64_t>(plan.candidates.size()));
  const Numbers<std::int32_t> listed(backend, plan.begins.back());
  copy(backend, candidates.data(), plan.candidates.data(), static_cast<std::int64_t>(plan.candidates.size()), stream);

  // The means of those blocks of a sequence's rows that `positions` are.
  const auto pool = [&](SyntheticTensor tensor, std::size_t s, std::int64_t origin, const KeyRange& all,
                        const KeyRange& positions, int block, float* means) {
    for (std::int64_t at = positions.begin; at < positions.end;) {
      beat();
      const TensorView piece = rows(tensor, s, at - origin, positions.end - at);
      backend.pool_rows({piece, at, all, block, query_block_of(positions.begin, block), means}, stream);
      at += piece.tokens;
    }
  };
  std::int64_t done = 0;  // query blocks of the sequences before
  std::int32_t* own = listed.data();
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    const ListedSequence& of = sequences[s];
    const TileRange blocks = query_blocks_of(of, shape.query_block);
    const std::int64_t entries = plan.entries[s];
    if (entries > 0) {
      const KeyRange all_keys{0, of.keys};
      pool(SyntheticTensor::kK, s, 0, all_keys, all_keys, shape.key_block, keys.data());
      const KeyRange all{of.position, of.position + of.queries};
      for (std::int64_t q = blocks.begin; q < blocks.end; q += at_a_time) {
        const std::int64_t end = std::min(blocks.end, q + at_a_time);
        const KeyRange positions{std::max(q * shape.query_block, all.begin),
                                 std::min(end * shape.query_block, all.end)};
        pool(SyntheticTensor::kQ, s, of.position, all, positions, shape.query_block, queries.data());
        backend.choose_lists(
            {spec, queries.data(), keys.data(), end - q, (of.keys + shape.key_block - 1) / shape.key_block,
             candidates.data() + done + q - blocks.begin, scores.data(), entries, own},
            stream);
      }
    }
    done += blocks.end - blocks.begin;
    own += shape.heads * entries;
  }
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(plan.begins.back()));
  copy(backend, numbers.data(), listed.data(), plan.begins.back(), stream);
  const Deadline deadline = DevicePatience::for_queue();
  backend.synchronize(stream, deadline, [&deadline] {
    DevicePatience::check(deadline, "it chooses blocks of keys");
    look();
  });
  return {shape, std::move(sequences), std::move(plan.begins), std::move(numbers)};
}

}  // namespace ringattn
