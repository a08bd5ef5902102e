// SPDX-License-Identifier: Apache-2.0
#include "tests/support/attention_runner.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>

#include "tests/support/checks.hpp"
#include "tests/support/placed_keys.hpp"
#include "tests/support/placed_tensor.hpp"

namespace ringattn::testing {

namespace {

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A run of query rows and the packed token that it begins with.
struct PlacedRun {
  QueryRun run;
  std::int64_t packed = 0;
};

// Runs ascending by (sequence, position); their rows lie in an order of the seed.
std::vector<PlacedRun> place_runs(const AttentionInputs& inputs, const Arrangement& arrangement) {
  std::vector<PlacedRun> runs;
  for (std::size_t s = 0; s < inputs.sequences.size(); ++s) {
    const SequenceShape& shape = inputs.sequences[s];
    const std::int64_t most = arrangement.run_rows == 0 ? shape.q_len : arrangement.run_rows;
    for (std::int64_t begin = 0; begin < shape.q_len; begin += most) {
      const std::int64_t rows = std::min(most, shape.q_len - begin);
      runs.push_back({{static_cast<std::int32_t>(s), shape.q_offset + begin, 0, rows}, inputs.q_begin(s) + begin});
    }
  }
  std::int64_t row = 0;
  for (const std::size_t i : shuffled(runs.size(), arrangement.shuffle)) {
    runs[i].run.row = row;
    row += runs[i].run.rows;
  }
  return runs;
}

// The first `dim` columns of another tensor.
template <class View>
View columns_in(View view, std::int64_t dim) {
  view.dim = dim;
  return view;
}

// Keys and values in the backend's memory.
struct PlacedSources {
  std::vector<PlacedTensor> tensors;
  std::vector<KeySource> sources;
};
PlacedSources place_sources(Backend& backend, const AttentionSpec& spec, const CachedKeyRun& keys, bool odd_keys,
                            bool values_in_keys) {
  const std::size_t element = size_of(spec.dtype);
  PlacedSources placed;
  if (keys.pool) {
    const auto place_pool = [&](const std::vector<std::byte>& host, int dim) {
      PlacedTensor& tensor = placed.tensors.emplace_back(PlacedTensor{Bytes(backend, host), {}});
      return keys.pool->view(tensor.bytes.data(), spec, dim);
    };
    const CacheView k = place_pool(keys.k[0], spec.head_dim);
    const CacheView v = values_in_keys ? columns_in(k, spec.head_dim_v) : place_pool(keys.v[0], spec.head_dim_v);
    placed.sources.push_back(pool_source(k, v).source);
    return placed;
  }
  for (std::size_t i = 0; i < keys.k.size(); ++i) {
    const bool odd = odd_keys && i % 2 == 0;
    const auto tokens = static_cast<std::int64_t>(keys.k[i].size() / element) / (spec.kv_heads * spec.head_dim);
    const auto place_rows = [&](const std::vector<std::byte>& dense, std::int64_t dim) {
      const Lattice lattice = lattice_of(false, odd, spec.kv_heads, dim);
      const auto place_at = [&](const std::vector<std::byte>& host) {
        placed.tensors.push_back(place(backend, host, lattice, spec.dtype, tokens, spec.kv_heads, dim));
      };
      if (odd) {
        place_at(spread(dense, lattice, element, tokens, spec.kv_heads, dim));
      } else {
        place_at(dense);
      }
      return placed.tensors.back().view;
    };
    const TensorView k = place_rows(keys.k[i], spec.head_dim);
    const TensorView v = values_in_keys ? columns_in(k, spec.head_dim_v) : place_rows(keys.v[i], spec.head_dim_v);
    placed.sources.push_back({k, v});
  }
  return placed;
}

// Tiles as the runs and the map of one task.
void map_tiles(std::span<const PlacedTile> placed, std::vector<KeyRun>& runs, std::vector<PageRun>& tiles) {
  runs.clear();
  tiles.clear();
  std::int64_t mapped = 0;
  for (const PlacedTile& tile : placed) {
    if (runs.empty() || runs.back().sequence != tile.sequence) {
      runs.push_back({tile.sequence, tile.tile, 0, mapped});
    }
    ++runs.back().tiles;
    ++mapped;
    tiles.push_back(tile.place);
    tiles.insert(tiles.end(), tile.more_pieces.begin(), tile.more_pieces.end());
  }
}

// The state as numbers: m, l and O of each row and head, in the order of packed tokens.
std::vector<float> exported(Backend& backend, AttentionKernel& kernel, const Bytes& state, const AttentionSpec& spec,
                            const std::vector<PlacedRun>& runs, std::int64_t rows) {
  const std::int64_t dim = spec.head_dim_v;
  const auto all = static_cast<std::size_t>(rows * spec.heads);
  const Bytes numbers(backend, all * static_cast<std::size_t>(dim + 2) * sizeof(float));
  auto* const m = reinterpret_cast<float*>(numbers.data());
  float* const l = m + all;
  float* const o = l + all;
  kernel.export_state(
      state.data(), rows,
      {{m, spec.heads, 1}, {l, spec.heads, 1}, {o, Dtype::kF32, rows, spec.heads, dim, spec.heads * dim, dim}}, {});
  wait_for(backend);
  const std::vector<std::byte> host = numbers.read();
  std::vector<float> packed(host.size() / sizeof(float));
  const auto copy = [&](std::size_t from, std::size_t to, std::size_t count) {
    std::memcpy(&packed[to], host.data() + from * sizeof(float), count * sizeof(float));
  };
  const auto width = static_cast<std::size_t>(dim);
  for (const PlacedRun& piece : runs) {
    for (std::int64_t i = 0; i < piece.run.rows * spec.heads; ++i) {
      const auto from = static_cast<std::size_t>(piece.run.row * spec.heads + i);
      const std::size_t to = static_cast<std::size_t>(piece.packed * spec.heads + i) * (width + 2);
      copy(from, to, 1);
      copy(all + from, to + 1, 1);
      copy(2 * all + from * width, to + 2, width);
    }
  }
  return packed;
}

}  // namespace

bool AttentionResult::same_bits(const AttentionResult& other) const {
  if (!lse.empty()) count_check();
  return out == other.out && same(lse, other.lse) && same(state, other.state);
}

AttentionRunner::AttentionRunner(const AttentionRow& row, const AttentionSpec& spec, int threads)
    : backend_(row.make_backend({threads, 0})), kernel_(row.make_kernel(spec, *backend_)) {}

AttentionResult AttentionRunner::run(const AttentionInputs& inputs, const Arrangement& arrangement,
                                     const Progress& progress) {
  const AttentionSpec& spec = inputs.spec;
  const std::size_t element = size_of(spec.dtype);
  const std::int64_t rows = inputs.q_tokens();
  const std::vector<PlacedRun> placed = place_runs(inputs, arrangement);

  const auto q_row = static_cast<std::size_t>(spec.head_dim) * element;
  std::vector<PlacedTensor> q;  // that tasks read in turn
  for (const bool odd : arrangement.odd_q ? std::vector<bool>{true, false} : std::vector<bool>{false}) {
    const Lattice lattice = lattice_of(arrangement.strided, odd, spec.heads, spec.head_dim);
    std::vector<std::byte> host(lattice.size(rows) * element, kPoison);
    for (const PlacedRun& piece : placed) {
      for (std::int64_t i = 0; i < piece.run.rows * spec.heads; ++i) {
        std::memcpy(host.data() + lattice.at(piece.run.row + i / spec.heads, i % spec.heads) * element,
                    inputs.q.data() + static_cast<std::size_t>(piece.packed * spec.heads + i) * q_row, q_row);
      }
    }
    q.push_back(place(*backend_, host, lattice, spec.dtype, rows, spec.heads, spec.head_dim));
  }

  const CachedKeyRun keys = place_keys(inputs, arrangement, kernel_->key_tile());
  const PlacedSources placed_keys =
      place_sources(*backend_, spec, keys, arrangement.odd_keys, arrangement.values_in_keys);

  std::vector<std::byte> sinks_host(inputs.sinks.size() * sizeof(float));
  if (!inputs.sinks.empty()) std::memcpy(sinks_host.data(), inputs.sinks.data(), sinks_host.size());
  Bytes sinks(*backend_, sinks_host.size());
  sinks.write(sinks_host);

  const Lattice out_lattice = lattice_of(arrangement.strided, arrangement.odd_out, spec.heads, spec.head_dim_v);
  Bytes out(*backend_, out_lattice.size(rows) * element);
  Bytes lse(*backend_, static_cast<std::size_t>(rows * spec.heads) * sizeof(float));
  Bytes state(*backend_, kernel_->state_bytes(rows));

  std::vector<std::int64_t> key_lengths;
  for (const SequenceShape& shape : inputs.sequences) key_lengths.push_back(shape.k_len);
  std::vector<QueryRun> queries;
  for (const PlacedRun& piece : placed) queries.push_back(piece.run);
  // LSE head by head, as it stands in files.
  const AttentionOutput output{{out.data() + static_cast<std::size_t>(out_lattice.shift) * element, spec.dtype, rows,
                                spec.heads, spec.head_dim_v, out_lattice.token, out_lattice.head},
                               {reinterpret_cast<float*>(lse.data()), 1, rows},
                               spec.sinks ? reinterpret_cast<const float*>(sinks.data()) : nullptr};

  const std::size_t per_task =
      arrangement.tiles_per_task == 0 ? keys.tiles.size() : static_cast<std::size_t>(arrangement.tiles_per_task);
  const auto count = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
  const std::int64_t sources = std::max(kMaxSourcesApart, count(placed_keys.sources));
  AttentionLimits limits{rows,    count(queries),    count(keys.tiles), count(keys.tiles) * keys.pieces,
                         sources, count(key_lengths)};
  for (const QueryRun& run : queries) {
    if (inputs.block_mask == nullptr) break;
    limits.mask_tile_runs += inputs.block_mask->runs(static_cast<std::size_t>(run.sequence), run.position, run.rows);
  }
  kernel_->reserve(limits);
  std::vector<KeyRun> key_runs;
  std::vector<PageRun> tiles;
  std::size_t task_number = 0;
  const auto fold = [&](const Bytes& into, const PlacedSources& from, bool resume, bool save, bool finish) {
    AttentionTask task;
    task.q = q[task_number++ % q.size()].view;
    task.queries = queries;
    task.key_lengths = key_lengths;
    task.key_runs = key_runs;
    task.tiles = tiles;
    task.page_runs = keys.pieces;
    task.sources = from.sources;
    task.block_mask = inputs.block_mask.get();
    task.positions = inputs.positions.get();
    task.state = into.data();
    task.resume = resume;
    task.save = save;
    task.finish = finish ? &output : nullptr;
    kernel_->attend(task, {}, progress);
    wait_for(*backend_);
  };
  const bool keeps = arrangement.keep_state || arrangement.export_state;
  // Folds all tiles of `from` into a state, which goes on or is new.
  const auto attend_all = [&](const Bytes& into, const CachedKeyRun& from, const PlacedSources& memory, bool resume,
                              bool finish) {
    bool finished = false;
    for (std::size_t begin = 0; !finished;) {
      const std::size_t end = std::min(begin + per_task, from.tiles.size());
      const bool folds = begin < end || begin == 0;
      map_tiles(std::span(from.tiles).subspan(begin, end - begin), key_runs, tiles);
      finished = end == from.tiles.size() && (!arrangement.separate_finish || !folds || from.tiles.empty());
      fold(into, memory, resume || begin > 0, !finished || keeps || !finish, finished && finish);
      begin = end;
    }
  };
  if (arrangement.apart == 0) {
    attend_all(state, keys, placed_keys, false, true);
  } else {
    const CachedKeyRun none;  // leaves the identity
    const std::vector<CachedKeyRun> kv_splits = place_kv_splits(inputs, arrangement, kernel_->key_tile());
    const std::size_t first = arrangement.apart % 3 == 0 ? 1 : 0;
    const std::size_t last = kv_splits.size() - (arrangement.apart % 2 == 0 ? 1 : 0);
    const auto attend_kv_split = [&](const Bytes& into, const CachedKeyRun& group, bool odd, bool resume, bool finish) {
      attend_all(into, group, place_sources(*backend_, spec, group, odd, arrangement.values_in_keys), resume, finish);
    };
    attend_kv_split(state, first == 1 ? kv_splits[0] : none, false, false, false);
    std::vector<std::optional<Bytes>> partials(kv_splits.size());
    for (const std::size_t g : shuffled(kv_splits.size(), arrangement.apart)) {
      if (g < first || g >= last) continue;
      partials[g].emplace(*backend_, kernel_->state_bytes(rows));
      attend_kv_split(*partials[g], kv_splits[g], g % 2 == 1, false, false);
    }
    for (std::size_t g = first; g < last; ++g) {
      kernel_->merge_state(state.data(), partials[g]->data(), rows, {});
      wait_for(*backend_);
    }
    attend_kv_split(state, last < kv_splits.size() ? kv_splits.back() : none, false, true, true);
  }

  const std::vector<std::byte> out_host = out.read();
  const std::vector<std::byte> lse_host = lse.read();
  AttentionResult result;
  if (arrangement.export_state) result.state = exported(*backend_, *kernel_, state, spec, placed, rows);
  if (arrangement.keep_state) {
    out.write(std::vector<std::byte>(out_host.size(), kPoison));
    lse.write(std::vector<std::byte>(lse_host.size(), kPoison));
    key_runs.clear();
    tiles.clear();
    fold(state, placed_keys, true, false, true);
    if (out.read() != out_host || lse.read() != lse_host) return result;  // equals no other
  }
  const auto out_row = static_cast<std::size_t>(spec.head_dim_v) * element;
  result.out.resize(static_cast<std::size_t>(rows * spec.heads) * out_row);
  result.lse.resize(static_cast<std::size_t>(rows * spec.heads));
  for (const PlacedRun& piece : placed) {
    for (std::int64_t i = 0; i < piece.run.rows * spec.heads; ++i) {
      const std::int64_t row = piece.run.row + i / spec.heads;
      const std::int64_t head = i % spec.heads;
      const auto packed = static_cast<std::size_t>(piece.packed * spec.heads + i);
      std::memcpy(result.out.data() + packed * out_row, out_host.data() + out_lattice.at(row, head) * element, out_row);
      std::memcpy(&result.lse[packed], lse_host.data() + static_cast<std::size_t>(head * rows + row) * sizeof(float),
                  sizeof(float));
    }
  }
  return result;
}

AttentionResult attend_with(const AttentionRow& row, const AttentionInputs& inputs, const Arrangement& arrangement) {
  return AttentionRunner(row, inputs.spec, arrangement.threads).run(inputs, arrangement);
}

std::string cannot_run(const AttentionRow& row, const AttentionSpec& spec) {
  const std::string unavailable = row.unavailable();
  if (!unavailable.empty()) return fmt::format("{}: {}", row.name, unavailable);
  const std::vector<std::string> missing = row.missing(spec);
  return missing.empty() ? std::string() : fmt::format("{}: {}", row.name, fmt::join(missing, ", "));
}

}  // namespace ringattn::testing
