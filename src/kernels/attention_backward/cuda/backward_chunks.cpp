// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention_backward/cuda/backward_chunks.hpp"

#include <algorithm>
#include <limits>

#include "kernels/attention/visibility.hpp"

namespace ringattn::cuda {

namespace {

// Limit for the dS of a chunk: 2.25 GiB, of which kChunkRows and one KV split take 2 GiB. 16 heads of 16k causal tokens
// take two chunks.
constexpr std::int64_t kMaxDsTiles = std::int64_t{9} << 15;
constexpr std::int64_t kChunkRows = std::int64_t{1} << 17;
// With one KV split, four heads are 256 work tiles of dK and dV, and on the diagonal the longest of them is as long as
// a multiprocessor's share.
constexpr int kMinChunkHeads = 4;
// Sums of dK and dV that are kept for all keys of a sequence: 512 MiB.
constexpr std::int64_t kMaxDkvSumFloats = std::int64_t{1} << 27;
// Storing dS is faster from this many work tiles of dK and dV per multiprocessor on, counted in quarters.
constexpr std::int64_t kMinWorkQuarters = 7;
// For tests.
constexpr std::int64_t kSmallMaxDsTiles = std::int64_t{9} << 11;
constexpr std::int64_t kSmallChunkRows = std::int64_t{1} << 13;

constexpr std::int64_t kKeyTilesOfSplit = kBackwardKvSplit / kBackwardTile;

std::int64_t group_of(const AttentionSpec& spec) { return spec.heads / spec.kv_heads; }
std::int64_t split_rows(const AttentionSpec& spec) { return backward_query_split(spec) * group_of(spec); }
std::int64_t dkv_width(const AttentionSpec& spec) { return spec.head_dim + spec.head_dim_v; }
std::int64_t tiles_in(std::int64_t rows) { return (rows + kBackwardTile - 1) / kBackwardTile; }

// KV heads of the chunks of a sequence that does not fit into one; 0: it can't be cut. The fewer the heads, the longer
// are the ranges of queries, and the less often are sums resumed.
int chunk_heads(const AttentionSpec& spec, std::int64_t keys, const ChunkLimits& limits) {
  int heads = 0;
  for (int n = limits.kv_heads; n <= spec.kv_heads; ++n) {
    if (spec.kv_heads % n != 0 || n * keys * dkv_width(spec) > limits.dkv_sum_floats ||
        n * split_rows(spec) > limits.rows) {
      continue;
    }
    if (heads == 0 || n * group_of(spec) * kBackwardKvSplit <= limits.rows) heads = n;
  }
  return heads;
}

// The tensor from a token and a head on.
template <class View>
View part_of(View view, std::int64_t first_token, std::int64_t first_head, std::int64_t heads) {
  view.data = view.at(first_token, first_head);
  view.tokens -= first_token;
  view.heads = heads;
  return view;
}

}  // namespace

ChunkLimits chunk_limits(const AttentionSpec& spec, const BackwardLimits& limits, int multiprocessors) {
  const bool if_faster = limits.sharing == ScoreSharing::kIfFaster;
  // With larger groups, the dS of few keys fills a chunk, which then has few work tiles.
  const bool many_heads = spec.kv_heads >= kMinChunkHeads && group_of(spec) <= 2 * spec.kv_heads;
  if (limits.sharing == ScoreSharing::kNever || (if_faster && !many_heads)) return {};
  ChunkLimits chunks;
  chunks.rows = if_faster ? kChunkRows : kSmallChunkRows;
  chunks.kv_heads = if_faster ? kMinChunkHeads : 1;
  chunks.key_tiles = if_faster ? kRowTilesOfPair * (kMinWorkQuarters * multiprocessors + 3) / 4 : 0;
  if (limits.rows / kBackwardTile * spec.kv_heads < chunks.key_tiles) return {};
  const std::int64_t tiles = limits.rows / kBackwardTile + 2 * limits.row_runs;
  const std::int64_t all = tiles * tiles * spec.heads;
  chunks.ds_tiles = std::min(all, if_faster ? kMaxDsTiles : kSmallMaxDsTiles);
  if (all == chunks.ds_tiles) return chunks;
  chunks.dq_sum_floats = chunks.rows * spec.head_dim;
  chunks.dkv_sum_floats = std::min(limits.rows * spec.kv_heads * dkv_width(spec), kMaxDkvSumFloats);
  const bool can_cut = chunk_heads(spec, limits.sequences == 1 ? limits.rows : 1, chunks) > 0;
  return can_cut ? chunks : ChunkLimits{};
}

// The tasks that are cut.
struct BackwardChunker::Tasks {
  const DqTask& dq;
  const DkvTask& dkv;
  const ChunkLimits& limits;
  float* dq_sums;
  float* dkv_sums;
  const std::function<void(const BackwardChunk&)>& run;
};

void BackwardChunker::reserve(const BackwardLimits& limits) {
  const auto sequences = static_cast<std::size_t>(limits.sequences);
  parts_.reserve(sequences);
  for (std::vector<QueryRun>* const runs : {&queries_, &keys_}) runs->reserve(sequences);
  for (std::vector<KeyRun>* const runs : {&key_runs_, &query_runs_}) runs->reserve(sequences);
  for (std::vector<PageRun>* const tiles : {&key_tiles_, &query_tiles_}) {
    tiles->reserve(static_cast<std::size_t>(limits.tiles));
  }
}

bool BackwardChunker::cut(const DqTask& dq, const DkvTask& dkv, const ChunkLimits& limits, float* dq_sums,
                          float* dkv_sums, const std::function<void(const BackwardChunk&)>& run) {
  if (limits.ds_tiles == 0 || !find_parts(dq, dkv) || !can_cut(dq, limits)) return false;
  const Tasks tasks{dq, dkv, limits, dq_sums, dkv_sums, run};
  std::int64_t used = 0;  // of limits.ds_tiles, by the sequences of the current chunk
  for (std::size_t s = 0; s < parts_.size(); ++s) {
    const Part& part = parts_[s];
    const BackwardSequence& sequence = dq.sequences[s];
    const std::int64_t tiles = spec_.heads * count_pairs(part, sequence);
    if (used + tiles > limits.ds_tiles) {
      run_whole(tasks);
      used = 0;
    }
    if (tiles > limits.ds_tiles) {
      cut_sequence(tasks, part, sequence);
    } else {
      add_whole(tasks, part);
      used += tiles;
    }
  }
  run_whole(tasks);
  return true;
}

// False: the tasks can't be cut.
bool BackwardChunker::find_parts(const DqTask& dq, const DkvTask& dkv) {
  if (dq.resume || dq.save || dkv.resume || dkv.save || dq.dq == nullptr || dkv.dk == nullptr) return false;
  parts_.assign(dq.sequences.size(), {});
  // Returns whether each sequence has at most one of the runs.
  const auto find = [this](const auto& runs, auto member) {
    return std::all_of(runs.begin(), runs.end(), [&](const auto& run) {
      auto& found = parts_[static_cast<std::size_t>(run.sequence)].*member;
      const bool is_first = found == nullptr;
      found = &run;
      return is_first;
    });
  };
  if (!find(dq.rows, &Part::queries) || !find(dkv.rows, &Part::keys) || !find(dq.runs, &Part::key_tiles) ||
      !find(dkv.runs, &Part::query_tiles)) {
    return false;
  }
  const auto is_whole = [](const QueryRun* run, std::int64_t position, std::int64_t rows) {
    return run == nullptr ? rows == 0 : run->position == position && run->rows == rows;
  };
  for (std::size_t s = 0; s < parts_.size(); ++s) {
    const BackwardSequence& sequence = dq.sequences[s];
    if (!is_whole(parts_[s].queries, sequence.q_offset, sequence.q_len) ||
        !is_whole(parts_[s].keys, 0, sequence.k_len)) {
      return false;
    }
  }
  return true;
}

// Returns whether every sequence can be cut and the chunks would have enough work tiles.
bool BackwardChunker::can_cut(const DqTask& dq, const ChunkLimits& limits) const {
  std::int64_t key_tiles = 0;
  for (std::size_t s = 0; s < parts_.size(); ++s) {
    const BackwardSequence& sequence = dq.sequences[s];
    key_tiles += tiles_in(sequence.k_len) * spec_.kv_heads;
    if (spec_.heads * count_pairs(parts_[s], sequence) > limits.ds_tiles &&
        chunk_heads(spec_, sequence.k_len, limits) == 0) {
      return false;
    }
  }
  return key_tiles >= limits.key_tiles;
}

// The tiles of keys that a query of the tile sees.
BackwardChunker::Interval BackwardChunker::seen_keys(const BackwardSequence& sequence, std::int64_t query_tile) const {
  const std::int64_t begin = first_query_tile(sequence) + query_tile * kBackwardTile;
  const std::int64_t first = std::max(begin, sequence.q_offset);
  const std::int64_t last = std::min(begin + kBackwardTile, sequence.q_offset + sequence.q_len) - 1;
  const TileRange seen = tiles_of(Visibility(spec_.mask, sequence.k_len).keys(first, last), kBackwardTile);
  return {seen.begin, seen.end};
}

// Pairs of a tile of queries and a tile of the keys that they see, of one head.
std::int64_t BackwardChunker::count_pairs(const BackwardSequence& sequence, const Interval& queries,
                                          const Interval& keys) const {
  std::int64_t pairs = 0;
  for (std::int64_t t = queries.begin; t < queries.end; ++t) {
    const Interval seen = seen_keys(sequence, t);
    pairs += std::max(std::min(seen.end, keys.end) - std::max(seen.begin, keys.begin), std::int64_t{0});
  }
  return pairs;
}

// Counts all pairs of a sequence.
std::int64_t BackwardChunker::count_pairs(const Part& part, const BackwardSequence& sequence) const {
  if (part.query_tiles == nullptr) return 0;
  const Interval queries{part.query_tiles->first_tile, part.query_tiles->first_tile + part.query_tiles->tiles};
  return count_pairs(sequence, queries, {0, tiles_in(sequence.k_len)});
}

namespace {

// Adds tiles [begin, end) of a task, of those that `run` has.
void add_tiles(const KeyRun* run, std::span<const PageRun> table, std::int64_t begin, std::int64_t end,
               std::vector<KeyRun>& runs, std::vector<PageRun>& tiles) {
  if (run == nullptr) return;
  begin = std::max(begin, run->first_tile);
  end = std::min(end, run->first_tile + run->tiles);
  if (begin >= end) return;
  runs.push_back({run->sequence, begin, end - begin, static_cast<std::int64_t>(tiles.size())});
  const auto first = table.begin() + (run->table + begin - run->first_tile);
  tiles.insert(tiles.end(), first, first + (end - begin));
}

}  // namespace

void BackwardChunker::add_whole(const Tasks& tasks, const Part& part) {
  constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();
  if (part.queries != nullptr) queries_.push_back(*part.queries);
  if (part.keys != nullptr) keys_.push_back(*part.keys);
  add_tiles(part.key_tiles, tasks.dq.tiles, 0, kAll, key_runs_, key_tiles_);
  add_tiles(part.query_tiles, tasks.dkv.tiles, 0, kAll, query_runs_, query_tiles_);
}

void BackwardChunker::run_whole(const Tasks& tasks) {
  if (queries_.empty() && keys_.empty()) return;
  take(tasks, 0, spec_.kv_heads, 0, 0);
  run(tasks);
}

void BackwardChunker::cut_sequence(const Tasks& tasks, const Part& part, const BackwardSequence& sequence) {
  const std::int64_t first_tile = floor_quotient(first_query_tile(sequence), kBackwardTile);
  const std::int64_t end = tiles_in(sequence.q_offset + sequence.q_len - first_query_tile(sequence));
  const std::int64_t split = backward_query_split(spec_) / kBackwardTile;
  const int kv_heads = chunk_heads(spec_, sequence.k_len, tasks.limits);
  const std::int64_t heads = kv_heads * group_of(spec_);
  const std::int64_t least =
      tasks.limits.rows / (heads * backward_query_split(spec_)) * split;  // tiles, in whole splits
  const Interval all_keys{0, tiles_in(sequence.k_len)};
  for (int head = 0; head < spec_.kv_heads; head += kv_heads) {
    for (Interval queries{0, 0}; queries.end < end; queries.begin = queries.end) {
      const std::int64_t split_begin = floor_quotient(first_tile + queries.begin, split) * split - first_tile;
      queries.end = std::min(split_begin + least, end);
      std::int64_t tiles = heads * count_pairs(sequence, queries, all_keys);
      while (queries.end < end) {
        const Interval more{queries.end, std::min(queries.end + split, end)};
        tiles += heads * count_pairs(sequence, more, all_keys);
        if (tiles > tasks.limits.ds_tiles) break;
        queries.end = more.end;
      }
      const std::int64_t first_row =
          std::max(first_query_tile(sequence) + queries.begin * kBackwardTile - sequence.q_offset, std::int64_t{0});
      take(tasks, head, kv_heads, part.queries->row + first_row, part.keys->row);
      cut_keys(tasks, part, sequence, queries, queries.end == end);
    }
  }
}

// The chunks of a range of queries. The last range finishes all keys.
void BackwardChunker::cut_keys(const Tasks& tasks, const Part& part, const BackwardSequence& sequence,
                               const Interval& queries, bool is_last) {
  const std::int64_t heads = chunk_.kv_heads * group_of(spec_);
  const std::int64_t tile_zero = first_query_tile(sequence);
  const std::int64_t first_query = std::max(tile_zero + queries.begin * kBackwardTile, sequence.q_offset);
  const std::int64_t end_query = std::min(tile_zero + queries.end * kBackwardTile, sequence.q_offset + sequence.q_len);
  const std::int64_t key_tiles = tiles_in(sequence.k_len);
  Interval keys{key_tiles, 0};
  for (std::int64_t t = queries.begin; t < queries.end; ++t) {
    const Interval seen = seen_keys(sequence, t);
    if (seen.begin >= seen.end) continue;
    keys = {std::min(keys.begin, seen.begin), std::max(keys.end, seen.end)};
  }
  if (is_last) keys = {0, key_tiles};
  keys.begin = keys.begin / kKeyTilesOfSplit * kKeyTilesOfSplit;
  const std::int64_t all = heads * count_pairs(sequence, queries, keys);
  const std::int64_t chunks = (all + tasks.limits.ds_tiles - 1) / tasks.limits.ds_tiles;
  const std::int64_t wanted = all / std::max(chunks, std::int64_t{1});
  std::int64_t at = keys.begin;
  do {
    std::int64_t end = at;
    for (std::int64_t tiles = 0; end < keys.end;) {
      const std::int64_t next = std::min(end + kKeyTilesOfSplit, keys.end);
      const std::int64_t more = heads * count_pairs(sequence, queries, {end, next});
      // keys that no query sees are no chunk of their own
      if (end > at && more > 0 && (tiles >= wanted || tiles + more > tasks.limits.ds_tiles)) break;
      tiles += more;
      end = next;
    }
    queries_.push_back({part.queries->sequence, first_query, 0, end_query - first_query});
    const std::int64_t first_key = at * kBackwardTile;
    const std::int64_t end_key = std::min(end * kBackwardTile, sequence.k_len);
    if (first_key < end_key) keys_.push_back({part.keys->sequence, first_key, first_key, end_key - first_key});
    const std::int64_t halves = key_tile_ / kBackwardTile;
    add_tiles(part.key_tiles, tasks.dq.tiles, at / halves, (end + halves - 1) / halves, key_runs_, key_tiles_);
    add_tiles(part.query_tiles, tasks.dkv.tiles, queries.begin, queries.end, query_runs_, query_tiles_);
    const bool is_end = end >= keys.end;
    chunk_.dq.state = tasks.dq_sums;
    chunk_.dq.resume = at > keys.begin;
    chunk_.dq.save = !is_end;
    chunk_.dq.dq = is_end ? &dq_ : nullptr;
    chunk_.dkv.state = tasks.dkv_sums;
    chunk_.dkv.resume = queries.begin > 0;
    chunk_.dkv.save = !is_last;
    chunk_.dkv.dk = is_last ? &dk_ : nullptr;
    chunk_.dkv.dv = is_last ? &dv_ : nullptr;
    run(tasks);
    at = end;
  } while (at < keys.end);
}

// Begins chunks of some KV heads, whose tensors of rows begin at a query and a key.
void BackwardChunker::take(const Tasks& tasks, int first_kv_head, int kv_heads, std::int64_t first_query,
                           std::int64_t first_key) {
  const std::int64_t first_head = first_kv_head * group_of(spec_);
  const std::int64_t heads = kv_heads * group_of(spec_);
  chunk_ = {first_kv_head, kv_heads, tasks.dq, tasks.dkv};
  DqTask& dq = chunk_.dq;
  dq.q = part_of(dq.q, first_query, first_head, heads);
  dq.dout = part_of(dq.dout, first_query, first_head, heads);
  dq.stats = nullptr;
  key_sources_.clear();
  for (const BackwardKeySource& source : dq.sources) {
    key_sources_.push_back(
        {part_of(source.k, 0, first_kv_head, kv_heads), part_of(source.v, 0, first_kv_head, kv_heads)});
  }
  dq.sources = key_sources_;
  dq_ = part_of(*dq.dq, first_query, first_head, heads);
  dq.dq = &dq_;
  DkvTask& dkv = chunk_.dkv;
  dkv.k = part_of(dkv.k, first_key, first_kv_head, kv_heads);
  dkv.v = part_of(dkv.v, first_key, first_kv_head, kv_heads);
  query_sources_.clear();
  for (const BackwardQuerySource& source : dkv.sources) {
    query_sources_.push_back(
        {part_of(source.q, 0, first_head, heads), part_of(source.dout, 0, first_head, heads), source.stats});
  }
  dkv.sources = query_sources_;
  dk_ = part_of(*dkv.dk, first_key, first_kv_head, kv_heads);
  dv_ = part_of(*dkv.dv, first_key, first_kv_head, kv_heads);
  dkv.dk = &dk_;
  dkv.dv = &dv_;
}

void BackwardChunker::run(const Tasks& tasks) {
  chunk_.dq.rows = queries_;
  chunk_.dq.runs = key_runs_;
  chunk_.dq.tiles = key_tiles_;
  chunk_.dkv.rows = keys_;
  chunk_.dkv.runs = query_runs_;
  chunk_.dkv.tiles = query_tiles_;
  tasks.run(chunk_);
  for (std::vector<QueryRun>* const runs : {&queries_, &keys_}) runs->clear();
  for (std::vector<KeyRun>* const runs : {&key_runs_, &query_runs_}) runs->clear();
  for (std::vector<PageRun>* const tiles : {&key_tiles_, &query_tiles_}) tiles->clear();
}

}  // namespace ringattn::cuda
