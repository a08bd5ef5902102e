// SPDX-License-Identifier: Apache-2.0
#include "tests/support/backward_runner.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <utility>

#include "kernels/attention/oracle.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/placed_keys.hpp"
#include "tests/support/placed_tensor.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

constexpr std::int64_t kNoToken = -1;  // a row that is NaN

template <class Value>
std::vector<std::byte> bytes_of(const std::vector<Value>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(Value));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::vector<float> floats_of(const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// The rows of `tokens` from a dense array of rows of `row_bytes`.
std::vector<std::byte> gather(const std::vector<std::byte>& dense, std::size_t row_bytes,
                              const std::vector<std::int64_t>& tokens) {
  std::vector<std::byte> rows(tokens.size() * row_bytes, kPoison);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == kNoToken) continue;
    std::memcpy(rows.data() + i * row_bytes, dense.data() + static_cast<std::size_t>(tokens[i]) * row_bytes, row_bytes);
  }
  return rows;
}

void scatter(const std::vector<std::byte>& rows, std::size_t row_bytes, const std::vector<std::int64_t>& tokens,
             std::vector<std::byte>& dense) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::memcpy(dense.data() + static_cast<std::size_t>(tokens[i]) * row_bytes, rows.data() + i * row_bytes, row_bytes);
  }
}

// One axis of a sequence: its queries, or its keys. Positions are key positions.
struct Axis {
  std::int64_t position = 0;  // of the first row
  std::int64_t length = 0;
  std::int64_t packed = 0;  // first packed token
};

std::vector<Axis> query_axes(const AttentionInputs& inputs) {
  std::vector<Axis> axes;
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    axes.push_back({inputs.sequences[s].q_offset, inputs.sequences[s].q_len, inputs.q_begin(s)});
  }
  return axes;
}

std::vector<Axis> key_axes(const AttentionInputs& inputs) {
  std::vector<Axis> axes;
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    axes.push_back({0, inputs.sequences[s].k_len, inputs.k_begin(s)});
  }
  return axes;
}

// A rank's rows: its runs, and the packed token of each row in memory.
struct RankRows {
  std::vector<QueryRun> runs;
  std::vector<std::int64_t> tokens;
};

std::vector<RankRows> deal_rows(const std::vector<Axis>& axes, const BackwardArrangement& arrangement) {
  std::mt19937_64 random(arrangement.deal);
  const auto ranks = static_cast<std::size_t>(arrangement.ranks);
  std::vector<RankRows> dealt(ranks);
  std::vector<std::vector<std::int64_t>> first_tokens(ranks);
  std::size_t next = 0;
  for (std::size_t s = 0; s < axes.size(); ++s) {
    const Axis& axis = axes[s];
    const std::int64_t longest = arrangement.run_rows == 0 ? axis.length : arrangement.run_rows;
    for (std::int64_t begin = 0; begin < axis.length;) {
      std::int64_t rows = longest;
      std::size_t rank = next++ % ranks;
      if (arrangement.deal != 0) {
        rows = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(longest));
        rank = random() % ranks;
      }
      rows = std::min(rows, axis.length - begin);
      dealt[rank].runs.push_back({static_cast<std::int32_t>(s), axis.position + begin, 0, rows});
      first_tokens[rank].push_back(axis.packed + begin);
      begin += rows;
    }
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    RankRows& mine = dealt[rank];
    for (const std::size_t i : shuffled(mine.runs.size(), arrangement.deal)) {
      mine.runs[i].row = static_cast<std::int64_t>(mine.tokens.size());
      for (std::int64_t j = 0; j < mine.runs[i].rows; ++j) mine.tokens.push_back(first_tokens[rank][i] + j);
    }
  }
  return dealt;
}

struct Tile {
  std::int32_t sequence = 0;
  std::int64_t tile = 0;
  std::int64_t position = 0;  // of the tile's first row, whether or not it exists
  std::int64_t packed = 0;    // the first token that exists
  std::int64_t tokens = 0;
  PageRun place{};
};

// Tiles of `size` positions, the first of which begins at a multiple of `size`.
std::vector<Tile> tiles_of_axes(const std::vector<Axis>& axes, std::int64_t size) {
  std::vector<Tile> tiles;
  for (std::size_t s = 0; s < axes.size(); ++s) {
    const Axis& axis = axes[s];
    const std::int64_t first = floor_quotient(axis.position, size) * size;
    const std::int64_t end = axis.position + axis.length;
    for (std::int64_t begin = first; axis.length > 0 && begin < end; begin += size) {
      const std::int64_t from = std::max(begin, axis.position);
      tiles.push_back({static_cast<std::int32_t>(s),
                       (begin - first) / size,
                       begin,
                       axis.packed + from - axis.position,
                       std::min(begin + size, end) - from,
                       {}});
    }
  }
  return tiles;
}

// Gives every tile its place. Returns the packed token of each row of each source.
std::vector<std::vector<std::int64_t>> place_tiles(std::vector<Tile>& tiles, const BackwardArrangement& arrangement,
                                                   std::int64_t tile_size) {
  const std::size_t count = arrangement.shuffle == 0 ? 1 : arrangement.sources;
  std::vector<std::vector<std::int64_t>> sources(count);
  std::size_t next = 0;
  for (const std::size_t i : shuffled(tiles.size(), arrangement.shuffle)) {
    Tile& tile = tiles[i];
    const std::size_t at = next++ % count;
    std::vector<std::int64_t>& source = sources[at];
    tile.place = {static_cast<std::int32_t>(at), static_cast<std::int64_t>(source.size())};
    for (std::int64_t j = 0; j < tile.tokens; ++j) source.push_back(tile.packed + j);
    if (arrangement.shuffle != 0) source.insert(source.end(), static_cast<std::size_t>(tile_size + 3), kNoToken);
  }
  return sources;
}

// Whether some of the `queries` positions from `position` on sees some of the `keys` keys from `key` on.
bool any_sees(const Mask& mask, std::int64_t position, std::int64_t queries, std::int64_t key, std::int64_t keys) {
  if (mask.left >= 0 && key + keys - 1 < position - mask.left) return false;
  return mask.right < 0 || key <= position + queries - 1 + mask.right;
}

// The tiles for which `needs(row position, tile)` holds for some row of `rows`.
template <class Needs>
std::vector<Tile> needed_by(const std::vector<Tile>& tiles, const RankRows& rows, const Needs& needs) {
  std::vector<Tile> chosen;
  for (const Tile& tile : tiles) {
    const bool any = std::any_of(rows.runs.begin(), rows.runs.end(), [&](const QueryRun& run) {
      if (run.sequence != tile.sequence) return false;
      for (std::int64_t i = 0; i < run.rows; ++i) {
        if (needs(run.position + i, tile)) return true;
      }
      return false;
    });
    if (any) chosen.push_back(tile);
  }
  return chosen;
}

// The ends of tasks, as counts of tiles.
std::vector<std::size_t> task_ends(std::size_t tiles, const BackwardArrangement& arrangement) {
  std::mt19937_64 random(arrangement.cuts);
  std::vector<std::size_t> ends;
  const std::size_t most = arrangement.tiles_per_task == 0 ? std::max<std::size_t>(tiles, 1)
                                                           : static_cast<std::size_t>(arrangement.tiles_per_task);
  for (std::size_t end = 0; end < tiles;) {
    end = std::min(tiles, end + (arrangement.cuts == 0 ? most : 1 + random() % 5));
    ends.push_back(end);
  }
  if (ends.empty() || arrangement.separate_finish) ends.push_back(tiles);
  return ends;
}

// The runs and the table of one task.
struct TaskTiles {
  std::vector<KeyRun> runs;
  std::vector<PageRun> tiles;
};
TaskTiles map_tiles(std::span<const Tile> tiles) {
  TaskTiles task;
  for (const Tile& tile : tiles) {
    const bool follows = !task.runs.empty() && task.runs.back().sequence == tile.sequence &&
                         task.runs.back().first_tile + task.runs.back().tiles == tile.tile;
    if (!follows) {
      task.runs.push_back({tile.sequence, tile.tile, 0, static_cast<std::int64_t>(task.tiles.size())});
    }
    ++task.runs.back().tiles;
    task.tiles.push_back(tile.place);
  }
  return task;
}

// One run of a kernel over inputs.
class Pass {
 public:
  Pass(Backend& backend, AttentionBackwardKernel& kernel, const BackwardInputs& inputs,
       const BackwardArrangement& arrangement)
      : backend_(backend),
        kernel_(kernel),
        inputs_(inputs),
        arrangement_(arrangement),
        spec_(inputs.attention.spec),
        q_axes_(query_axes(inputs.attention)),
        k_axes_(key_axes(inputs.attention)),
        query_rows_(deal_rows(q_axes_, arrangement)),
        key_rows_(deal_rows(k_axes_, arrangement)),
        key_tiles_(tiles_of_axes(k_axes_, kernel.key_tile())),
        query_tiles_(tiles_of_axes(q_axes_, kBackwardTile)) {
    for (const SequenceShape& shape : inputs.attention.sequences) {
      sequences_.push_back({shape.q_len, shape.k_len, shape.q_offset});
    }
    const auto q_elements = static_cast<std::size_t>(inputs.attention.q_tokens() * spec_.heads);
    const auto k_elements = static_cast<std::size_t>(inputs.attention.k_tokens() * spec_.kv_heads);
    const std::size_t element = size_of(inputs.gradients);
    result_.dq.resize(q_elements * static_cast<std::size_t>(spec_.head_dim) * element);
    result_.dk.resize(k_elements * static_cast<std::size_t>(spec_.head_dim) * element);
    result_.dv.resize(k_elements * static_cast<std::size_t>(spec_.head_dim_v) * element);
    stats_.resize(q_elements * kRowStats * sizeof(float));
    if (spec_.sinks) sink_terms_.resize(q_elements * sizeof(float));
  }

  BackwardResult run() {
    reserve();
    for (const RankRows& rows : query_rows_) compute_stats(rows);
    if (has_same_pairs()) {
      add_all_dq(
          [&](const DqTask& dq) { add_all_dkv([&](const DkvTask& dkv) { kernel_.add_dq_and_dkv(dq, dkv, {}, {}); }); });
    } else {
      add_all_dq([&](const DqTask& task) { kernel_.add_dq(task, {}, {}); });
      add_all_dkv([&](const DkvTask& task) { kernel_.add_dkv(task, {}, {}); });
    }
    result_.stats = floats_of(stats_);
    result_.sink_terms = floats_of(sink_terms_);
    return std::move(result_);
  }

 private:
  // Whether one rank has all rows, and one task each has all tiles.
  bool has_same_pairs() const {
    const BackwardArrangement& a = arrangement_;
    return a.ranks == 1 && a.run_rows == 0 && a.tiles_per_task == 0 && a.cuts == 0 && !a.separate_finish &&
           !a.keep_state;
  }

  void reserve() {
    const auto count = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
    BackwardLimits limits;
    limits.sequences = count(sequences_);
    limits.tiles = std::max(count(key_tiles_), count(query_tiles_));
    limits.tile_runs = limits.tiles;
    if (has_same_pairs()) limits.sharing = ScoreSharing::kIfPossible;
    for (const std::vector<RankRows>* ranks : {&query_rows_, &key_rows_}) {
      for (const RankRows& rows : *ranks) {
        limits.rows = std::max(limits.rows, count(rows.tokens));
        limits.row_runs = std::max(limits.row_runs, count(rows.runs));
      }
    }
    kernel_.reserve(limits);
  }

  // Rows of a dense [tokens, heads, dim] array, in the backend's memory.
  PlacedTensor place_rows(const std::vector<std::byte>& dense, const std::vector<std::int64_t>& tokens,
                          std::int64_t heads, std::int64_t dim) {
    const std::size_t element = size_of(spec_.dtype);
    const auto count = static_cast<std::int64_t>(tokens.size());
    const Lattice lattice = lattice_of(arrangement_.strided, arrangement_.odd, heads, dim);
    const std::vector<std::byte> rows = gather(dense, static_cast<std::size_t>(heads * dim) * element, tokens);
    return place(backend_, spread(rows, lattice, element, count, heads, dim), lattice, spec_.dtype, count, heads, dim);
  }
  PlacedTensor place_q(const std::vector<std::int64_t>& tokens) {
    return place_rows(inputs_.attention.q, tokens, spec_.heads, spec_.head_dim);
  }
  PlacedTensor place_dout(const std::vector<std::int64_t>& tokens) {
    return place_rows(inputs_.dout, tokens, spec_.heads, spec_.head_dim_v);
  }
  PlacedTensor place_k(const std::vector<std::int64_t>& tokens) {
    return place_rows(inputs_.attention.k, tokens, spec_.kv_heads, spec_.head_dim);
  }
  PlacedTensor place_v(const std::vector<std::int64_t>& tokens) {
    return place_rows(inputs_.attention.v, tokens, spec_.kv_heads, spec_.head_dim_v);
  }
  // Dense rows of floats.
  Bytes place_dense(const std::vector<std::byte>& dense, const std::vector<std::int64_t>& tokens,
                    std::size_t row_bytes) {
    const std::vector<std::byte> rows = gather(dense, row_bytes, tokens);
    Bytes placed(backend_, rows.size());
    placed.write(rows);
    return placed;
  }

  // Values of [tokens, heads], head by head where views are strided, as they stand in files.
  struct PlacedRowValues {
    Bytes bytes;
    RowView view;
  };
  PlacedRowValues place_row_values(const std::vector<float>& packed, const std::vector<std::int64_t>& tokens) {
    const auto heads = static_cast<std::size_t>(spec_.heads);
    std::vector<float> values(tokens.size() * heads);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t token = arrangement_.strided ? i % tokens.size() : i / heads;
      const std::size_t head = arrangement_.strided ? i / tokens.size() : i % heads;
      values[i] = packed[static_cast<std::size_t>(tokens[token]) * heads + head];
    }
    PlacedRowValues placed{Bytes(backend_, values.size() * sizeof(float)), {}};
    placed.bytes.write(bytes_of(values));
    auto* const data = reinterpret_cast<float*>(placed.bytes.data());
    placed.view = arrangement_.strided ? RowView{data, 1, static_cast<std::int64_t>(tokens.size())}
                                       : RowView{data, spec_.heads, 1};
    return placed;
  }

  // A gradient's rows, NaN until they are written.
  struct PlacedGradient {
    Bytes bytes;
    Lattice lattice;
    MutableTensorView view;
  };
  PlacedGradient place_gradient(std::size_t rows, std::int64_t heads, std::int64_t dim) {
    const Lattice lattice = lattice_of(arrangement_.strided, arrangement_.odd, heads, dim);
    const auto tokens = static_cast<std::int64_t>(rows);
    const std::size_t element = size_of(inputs_.gradients);
    PlacedGradient placed{Bytes(backend_, lattice.size(tokens) * element), lattice, {}};
    placed.view = {placed.bytes.data() + static_cast<std::size_t>(lattice.shift) * element,
                   inputs_.gradients,
                   tokens,
                   heads,
                   dim,
                   lattice.token,
                   lattice.head};
    return placed;
  }

  // Reads a gradient into the dense result.
  void read_gradient(const PlacedGradient& placed, const std::vector<std::int64_t>& tokens,
                     std::vector<std::byte>& dense) {
    const MutableTensorView& view = placed.view;
    const std::size_t element = size_of(view.dtype);
    const auto row = static_cast<std::size_t>(view.dim) * element;
    const std::vector<std::byte> host = placed.bytes.read();
    std::vector<std::byte> rows(static_cast<std::size_t>(view.tokens * view.heads) * row);
    for (std::int64_t i = 0; i < view.tokens * view.heads; ++i) {
      std::memcpy(rows.data() + static_cast<std::size_t>(i) * row,
                  host.data() + placed.lattice.at(i / view.heads, i % view.heads) * element, row);
    }
    if (spread(rows, placed.lattice, element, view.tokens, view.heads, view.dim) != host) {
      result_.error = "the kernel wrote between the rows of a gradient";
    }
    scatter(rows, static_cast<std::size_t>(view.heads) * row, tokens, dense);
  }

  std::size_t stats_row_bytes() const { return static_cast<std::size_t>(spec_.heads) * kRowStats * sizeof(float); }

  void compute_stats(const RankRows& rows) {
    const PlacedTensor out = place_rows(inputs_.out, rows.tokens, spec_.heads, spec_.head_dim_v);
    const PlacedTensor dout = place_dout(rows.tokens);
    const PlacedRowValues lse = place_row_values(inputs_.lse, rows.tokens);
    const bool has_dlse = !inputs_.dlse.empty();
    const PlacedRowValues dlse = place_row_values(has_dlse ? inputs_.dlse : inputs_.lse, rows.tokens);
    const Bytes stats(backend_, rows.tokens.size() * stats_row_bytes());
    Bytes sinks(backend_, static_cast<std::size_t>(spec_.heads) * sizeof(float));
    const std::size_t term_bytes = static_cast<std::size_t>(spec_.heads) * sizeof(float);
    const Bytes terms(backend_, rows.tokens.size() * term_bytes);
    RowStatsTask task;
    task.out = out.view;
    task.dout = dout.view;
    task.lse = lse.view;
    if (has_dlse) task.dlse = dlse.view;
    task.stats = reinterpret_cast<float*>(stats.data());
    if (spec_.sinks) {
      sinks.write(bytes_of(inputs_.attention.sinks));
      task.sinks = reinterpret_cast<const float*>(sinks.data());
      task.sink_terms = reinterpret_cast<float*>(terms.data());
    }
    kernel_.row_stats(task, {}, {});
    wait_for(backend_);
    scatter(stats.read(), stats_row_bytes(), rows.tokens, stats_);
    if (spec_.sinks) scatter(terms.read(), term_bytes, rows.tokens, sink_terms_);
  }

  // Calls `submit(task)` for each task over `tiles`, with the fields set that both kinds of task have, and
  // `finish(task)` before the one that writes the gradients.
  template <class Task, class Finish, class Submit>
  void run_tasks(Task task, const RankRows& rows, const std::vector<Tile>& tiles, const Bytes& state,
                 const Finish& finish, const Submit& submit) {
    task.sequences = sequences_;
    task.rows = rows.runs;
    task.state = state.data();
    std::size_t begin = 0;
    const std::vector<std::size_t> ends = task_ends(tiles.size(), arrangement_);
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const TaskTiles mapped = map_tiles(std::span(tiles).subspan(begin, ends[i] - begin));
      const bool last = i + 1 == ends.size();
      task.runs = mapped.runs;
      task.tiles = mapped.tiles;
      task.resume = i > 0;
      task.save = !last || arrangement_.keep_state;
      if (last) finish(task);
      submit(task);
      wait_for(backend_);
      begin = ends[i];
    }
  }

  template <class Submit>
  void add_all_dq(const Submit& submit) {
    const std::vector<std::vector<std::int64_t>> sources = place_tiles(key_tiles_, arrangement_, kernel_.key_tile());
    std::vector<PlacedTensor> tensors;
    std::vector<BackwardKeySource> views;
    for (const std::vector<std::int64_t>& tokens : sources) {
      const TensorView k = tensors.emplace_back(place_k(tokens)).view;
      views.push_back({k, tensors.emplace_back(place_v(tokens)).view});
    }
    const auto needs = [&](std::int64_t position, const Tile& tile) {
      const std::int64_t first = query_tile_begin(position, kBackwardTile);
      return any_sees(spec_.mask, first, kBackwardTile, tile.position, tile.tokens);
    };
    for (const RankRows& rows : query_rows_) {
      const PlacedTensor q = place_q(rows.tokens);
      const PlacedTensor dout = place_dout(rows.tokens);
      const Bytes stats = place_dense(stats_, rows.tokens, stats_row_bytes());
      const Bytes state(backend_, kernel_.dq_state_bytes(static_cast<std::int64_t>(rows.tokens.size())));
      PlacedGradient dq = place_gradient(rows.tokens.size(), spec_.heads, spec_.head_dim);
      DqTask task;
      task.q = q.view;
      task.dout = dout.view;
      task.stats = reinterpret_cast<const float*>(stats.data());
      task.sources = views;
      run_tasks(
          task, rows, arrangement_.needed_tiles ? needed_by(key_tiles_, rows, needs) : key_tiles_, state,
          [&](DqTask& last) { last.dq = &dq.view; }, submit);
      read_gradient(dq, rows.tokens, result_.dq);
      if (!arrangement_.keep_state) continue;
      PlacedGradient again = place_gradient(rows.tokens.size(), spec_.heads, spec_.head_dim);
      finish_saved(task, rows, state);
      task.dq = &again.view;
      submit(task);
      wait_for(backend_);
      if (again.bytes.read() != dq.bytes.read()) result_.error = "the saved state gives another dQ";
    }
  }

  template <class Submit>
  void add_all_dkv(const Submit& submit) {
    const std::vector<std::vector<std::int64_t>> sources = place_tiles(query_tiles_, arrangement_, kBackwardTile);
    std::vector<PlacedTensor> tensors;
    std::vector<Bytes> stats;
    std::vector<BackwardQuerySource> views;
    for (const std::vector<std::int64_t>& tokens : sources) {
      const TensorView q = tensors.emplace_back(place_q(tokens)).view;
      const TensorView dout = tensors.emplace_back(place_dout(tokens)).view;
      stats.push_back(place_dense(stats_, tokens, stats_row_bytes()));
      views.push_back({q, dout, reinterpret_cast<const float*>(stats.back().data())});
    }
    const int key_tile = kernel_.key_tile();
    const auto needs = [&](std::int64_t key, const Tile& tile) {
      return any_sees(spec_.mask, tile.position, kBackwardTile, key / key_tile * key_tile, key_tile);
    };
    for (const RankRows& rows : key_rows_) {
      const PlacedTensor k = place_k(rows.tokens);
      const PlacedTensor v = place_v(rows.tokens);
      const Bytes state(backend_, kernel_.dkv_state_bytes(static_cast<std::int64_t>(rows.tokens.size())));
      PlacedGradient dk = place_gradient(rows.tokens.size(), spec_.kv_heads, spec_.head_dim);
      PlacedGradient dv = place_gradient(rows.tokens.size(), spec_.kv_heads, spec_.head_dim_v);
      DkvTask task;
      task.k = k.view;
      task.v = v.view;
      task.sources = views;
      run_tasks(
          task, rows, arrangement_.needed_tiles ? needed_by(query_tiles_, rows, needs) : query_tiles_, state,
          [&](DkvTask& last) {
            last.dk = &dk.view;
            last.dv = &dv.view;
          },
          submit);
      read_gradient(dk, rows.tokens, result_.dk);
      read_gradient(dv, rows.tokens, result_.dv);
      if (!arrangement_.keep_state) continue;
      PlacedGradient dk_again = place_gradient(rows.tokens.size(), spec_.kv_heads, spec_.head_dim);
      PlacedGradient dv_again = place_gradient(rows.tokens.size(), spec_.kv_heads, spec_.head_dim_v);
      finish_saved(task, rows, state);
      task.dk = &dk_again.view;
      task.dv = &dv_again.view;
      submit(task);
      wait_for(backend_);
      if (dk_again.bytes.read() != dk.bytes.read()) result_.error = "the saved state gives another dK";
      if (dv_again.bytes.read() != dv.bytes.read()) result_.error = "the saved state gives another dV";
    }
  }

  // Makes a task that only finishes what a state holds.
  void finish_saved(BackwardTask& task, const RankRows& rows, const Bytes& state) const {
    task.sequences = sequences_;
    task.rows = rows.runs;
    task.runs = {};
    task.tiles = {};
    task.state = state.data();
    task.resume = true;
    task.save = false;
  }

  Backend& backend_;
  AttentionBackwardKernel& kernel_;
  const BackwardInputs& inputs_;
  const BackwardArrangement& arrangement_;
  const AttentionSpec& spec_;
  std::vector<Axis> q_axes_;
  std::vector<Axis> k_axes_;
  std::vector<RankRows> query_rows_;  // per rank
  std::vector<RankRows> key_rows_;    // per rank
  std::vector<Tile> key_tiles_;
  std::vector<Tile> query_tiles_;
  std::vector<BackwardSequence> sequences_;
  std::vector<std::byte> stats_;
  std::vector<std::byte> sink_terms_;
  BackwardResult result_;
};

TensorView rows_view(const BackwardInputs& inputs, const std::vector<std::byte>& rows, std::size_t sequence) {
  const AttentionSpec& spec = inputs.attention.spec;
  const auto skipped = static_cast<std::size_t>(inputs.attention.q_begin(sequence) * spec.heads * spec.head_dim_v);
  return dense_view(rows.data() + skipped * size_of(spec.dtype), spec.dtype, inputs.attention.sequences[sequence].q_len,
                    spec.heads, spec.head_dim_v);
}

bool same_floats(const std::vector<float>& a, const std::vector<float>& b) { return bytes_of(a) == bytes_of(b); }

}  // namespace

TensorView BackwardInputs::out_view(std::size_t sequence) const { return rows_view(*this, out, sequence); }
TensorView BackwardInputs::dout_view(std::size_t sequence) const { return rows_view(*this, dout, sequence); }

void BackwardInputs::set_dout(std::int64_t token, int head, int dim, float value) {
  const std::int64_t index = (token * attention.spec.heads + head) * attention.spec.head_dim_v + dim;
  const Dtype dtype = attention.spec.dtype;
  store_element(dout.data() + static_cast<std::size_t>(index) * size_of(dtype), dtype, value);
}

void compute_forward(BackwardInputs& inputs) {
  const AttentionInputs& attention = inputs.attention;
  const Dtype dtype = attention.spec.dtype;
  inputs.out.clear();
  inputs.lse.clear();
  for (std::size_t s = 0; s < attention.sequences.size(); ++s) {
    std::vector<double> out;
    std::vector<double> lse;
    oracle_attention(attention.spec, attention.q_view(s), attention.k_view(s), attention.v_view(s),
                     attention.sequences[s].q_offset, attention.spec.sinks ? attention.sinks.data() : nullptr, out,
                     lse);
    const std::size_t begin = inputs.out.size();
    inputs.out.resize(begin + out.size() * size_of(dtype));
    for (std::size_t i = 0; i < out.size(); ++i) {
      store_element(inputs.out.data() + begin + i * size_of(dtype), dtype, static_cast<float>(out[i]));
    }
    for (const double value : lse) inputs.lse.push_back(static_cast<float>(value));
  }
}

namespace {

// Without the forward's results.
BackwardInputs random_gradients(const AttentionBackwardSpec& spec, std::vector<SequenceShape> sequences,
                                std::uint64_t seed) {
  BackwardInputs inputs;
  inputs.attention = random_inputs(spec.forward, std::move(sequences), seed);
  inputs.gradients = spec.gradients;
  std::mt19937_64 random(seed + 1'000'000);
  const std::int64_t rows = inputs.attention.q_tokens() * spec.forward.heads;
  inputs.dout = random_elements(rows * spec.forward.head_dim_v, spec.forward.dtype, random);
  const Normal normal;
  for (std::int64_t i = 0; i < rows; ++i) inputs.dlse.push_back(normal(random));
  return inputs;
}

}  // namespace

BackwardInputs random_backward_inputs(const AttentionBackwardSpec& spec, std::vector<SequenceShape> sequences,
                                      std::uint64_t seed) {
  BackwardInputs inputs = random_gradients(spec, std::move(sequences), seed);
  compute_forward(inputs);
  return inputs;
}

BackwardInputs unrelated_backward_inputs(const AttentionBackwardSpec& spec, std::vector<SequenceShape> sequences,
                                         std::uint64_t seed) {
  BackwardInputs inputs = random_gradients(spec, std::move(sequences), seed);
  std::mt19937_64 random(seed + 2'000'000);
  inputs.out = random_elements(static_cast<std::int64_t>(inputs.dlse.size()) * spec.forward.head_dim_v,
                               spec.forward.dtype, random);
  for (const SequenceShape& sequence : inputs.attention.sequences) {
    const float lse = 0.5F + std::log(static_cast<float>(std::max(sequence.k_len, std::int64_t{1})));
    inputs.lse.insert(inputs.lse.end(), static_cast<std::size_t>(sequence.q_len * spec.forward.heads), lse);
  }
  return inputs;
}

bool BackwardResult::same_bits(const BackwardResult& other) const {
  if (!dq.empty() || !dk.empty()) count_check();
  return error == other.error && dq == other.dq && dk == other.dk && dv == other.dv &&
         same_floats(stats, other.stats) && same_floats(sink_terms, other.sink_terms);
}

BackwardRunner::BackwardRunner(const AttentionBackwardRow& row, const AttentionBackwardSpec& spec, int threads)
    : backend_(row.make_backend({threads, 0})), kernel_(row.make_kernel(spec, *backend_)) {}

BackwardResult differentiate_with(const AttentionBackwardRow& row, const BackwardInputs& inputs,
                                  const BackwardArrangement& arrangement) {
  return BackwardRunner(row, inputs.spec(), arrangement.threads).run(inputs, arrangement);
}

BackwardResult BackwardRunner::run(const BackwardInputs& inputs, const BackwardArrangement& arrangement) {
  return Pass(*backend_, *kernel_, inputs, arrangement).run();
}

}  // namespace ringattn::testing
