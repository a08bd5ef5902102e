// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/attention_backward/backward_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>

#include "kernels/common/registry.hpp"
#include "tests/support/attention_runner.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {

namespace {

constexpr std::byte kNan{0xff};  // in every dtype

template <class Spec>
const KernelRow<Spec>& row_of(std::string_view name) {
  for (const KernelRow<Spec>& row : kernel_table<Spec>()) {
    if (row.name == name) return row;
  }
  throw std::logic_error("no such kernel");
}

// A tensor that holds some tokens of a dense one, in any order, dense or strided.
class Rows {
 public:
  Rows(Dtype dtype, std::int64_t heads, std::int64_t dim, bool strided)
      : dtype_(dtype), heads_(heads), dim_(dim), head_stride_(dim + (strided ? 3 : 0)) {
    token_stride_ = heads * head_stride_ + (strided ? 5 : 0);
  }

  void resize(std::int64_t tokens) {
    tokens_ = tokens;
    bytes_.resize(static_cast<std::size_t>(tokens * token_stride_) * size_of(dtype_), kNan);
  }
  std::int64_t tokens() const { return tokens_; }
  MutableTensorView view() { return {bytes_.data(), dtype_, tokens_, heads_, dim_, token_stride_, head_stride_}; }
  // Copies `count` tokens from token `from` of `dense` to token `to`.
  void put(const std::vector<std::byte>& dense, std::int64_t from, std::int64_t count, std::int64_t to) {
    for_each_row(count, from, to, [&](std::size_t at, std::byte* row, std::size_t bytes) {
      std::memcpy(row, dense.data() + at, bytes);
    });
  }
  void get(std::vector<std::byte>& dense, std::int64_t to, std::int64_t count, std::int64_t from) {
    for_each_row(count, to, from, [&](std::size_t at, const std::byte* row, std::size_t bytes) {
      std::memcpy(dense.data() + at, row, bytes);
    });
  }

 private:
  template <typename Visit>
  void for_each_row(std::int64_t count, std::int64_t dense, std::int64_t own, Visit visit) {
    const std::size_t bytes = static_cast<std::size_t>(dim_) * size_of(dtype_);
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t h = 0; h < heads_; ++h) {
        visit(static_cast<std::size_t>((dense + i) * heads_ + h) * bytes, view().at(own + i, h), bytes);
      }
    }
  }

  Dtype dtype_;
  std::int64_t heads_, dim_, head_stride_, token_stride_ = 0, tokens_ = 0;
  std::vector<std::byte> bytes_;
};

// A run of a rank's rows and the packed token with which it begins.
struct DealtRun {
  QueryRun run;
  std::int64_t packed = 0;
};

// A tile of a sequence: `count` packed tokens from `packed` on.
struct Tile {
  std::int32_t sequence = 0;
  std::int64_t tile = 0;
  std::int64_t packed = 0;
  std::int64_t count = 0;
  PageRun place;
};

struct Span {
  std::int64_t packed = 0;
  std::int64_t position = 0;
  std::int64_t tokens = 0;
};

std::vector<std::vector<DealtRun>> deal(const std::vector<Span>& sequences, const BackwardArrangement& arrangement,
                                        std::mt19937_64& random) {
  std::vector<std::vector<DealtRun>> ranks(static_cast<std::size_t>(arrangement.ranks));
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    for (std::int64_t at = 0; at < sequences[s].tokens;) {
      const std::int64_t longest = arrangement.ranks == 1 ? sequences[s].tokens : arrangement.max_run;
      const std::int64_t rows = std::min(
          sequences[s].tokens - at,
          arrangement.ranks == 1 ? longest
                                 : 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(longest)));
      std::vector<DealtRun>& rank = ranks[random() % ranks.size()];
      rank.push_back({{static_cast<std::int32_t>(s), sequences[s].position + at, 0, rows}, sequences[s].packed + at});
      at += rows;
    }
  }
  // Runs lie in memory in reverse order.
  for (std::vector<DealtRun>& rank : ranks) {
    std::int64_t row = 0;
    for (auto run = rank.rbegin(); run != rank.rend(); ++run) {
      run->run.row = row;
      row += run->run.rows;
    }
  }
  return ranks;
}

std::int64_t rows_in(const std::vector<DealtRun>& rank) {
  std::int64_t rows = 0;
  for (const DealtRun& run : rank) rows += run.run.rows;
  return rows;
}

// Calls task(first, last) for the tiles of each task in order, and says whether it is the first and the last.
template <typename Call>
void for_each_task(const std::vector<Tile>& tiles, const BackwardArrangement& arrangement, Call call) {
  const auto all = static_cast<std::int64_t>(tiles.size());
  const std::int64_t step =
      arrangement.tiles_per_task == 0 ? std::max<std::int64_t>(1, all) : arrangement.tiles_per_task;
  std::int64_t begin = 0;
  do {
    const std::int64_t end = std::min(all, begin + step);
    const bool last = end == all && !arrangement.separate_finish;
    call(std::span(tiles).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)), begin == 0,
         last);
    begin = end;
  } while (begin < all);
  if (arrangement.separate_finish) call(std::span<const Tile>(), false, true);
}

struct TaskTiles {
  std::vector<KeyRun> runs;
  std::vector<PageRun> tiles;

  explicit TaskTiles(std::span<const Tile> of) {
    for (const Tile& tile : of) {
      if (runs.empty() || runs.back().sequence != tile.sequence) {
        runs.push_back({tile.sequence, tile.tile, 0, static_cast<std::int64_t>(tiles.size())});
      }
      ++runs.back().tiles;
      tiles.push_back(tile.place);
    }
  }
};

// Places tiles at random in two sources, one token of NaN after each.
void place(std::vector<Tile>& tiles, std::int64_t (&tokens)[2], std::mt19937_64& random) {
  for (Tile& tile : tiles) {
    const std::size_t source = random() % 2;
    tile.place = {static_cast<std::int32_t>(source), tokens[source]};
    tokens[source] += tile.count + 1;
  }
}

double element(const std::vector<std::byte>& bytes, Dtype dtype, std::int64_t index) {
  return static_cast<double>(load_element(bytes.data() + static_cast<std::size_t>(index) * size_of(dtype), dtype));
}

double rounded(double value, Dtype dtype) {
  float element = 0.0F;
  store_element(&element, dtype, static_cast<float>(value));
  return static_cast<double>(load_element(&element, dtype));
}

struct Numbers64 {
  std::vector<double> dq, dk, dv, sink_terms;
};

// The gradients by their definition. With `round`, from the given O and LSE, with P, dS and gradients rounded as the
// kernels round them.
Numbers64 reference(const BackwardInputs& inputs, bool round) {
  const AttentionInputs& forward = inputs.forward;
  const AttentionSpec& spec = forward.spec;
  const auto dim = static_cast<std::int64_t>(spec.head_dim);
  const auto dim_v = static_cast<std::int64_t>(spec.head_dim_v);
  Numbers64 result;
  result.dq.resize(static_cast<std::size_t>(forward.q_tokens() * spec.heads * dim));
  result.dk.resize(static_cast<std::size_t>(forward.k_tokens() * spec.kv_heads * dim));
  result.dv.resize(static_cast<std::size_t>(forward.k_tokens() * spec.kv_heads * dim_v));
  result.sink_terms.resize(static_cast<std::size_t>(forward.q_tokens() * spec.heads));
  const auto widen = [&](const std::vector<std::byte>& bytes) {
    std::vector<double> wide(bytes.size() / size_of(spec.dtype));
    for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = element(bytes, spec.dtype, static_cast<std::int64_t>(i));
    return wide;
  };
  const std::vector<double> q = widen(forward.q), k = widen(forward.k), v = widen(forward.v), out = widen(inputs.out),
                            dout = widen(inputs.dout);
  const auto dot = [](const double* a, const double* b, std::int64_t count) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
    return sum;
  };
  const auto add = [](double factor, const double* a, std::int64_t count, double* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] += factor * a[i];
  };
  const auto scale = static_cast<double>(spec.softmax_scale);
  const auto cap = static_cast<double>(spec.softcap);
  for (std::size_t s = 0; s < forward.sequences.size(); ++s) {
    const SequenceShape& shape = forward.sequences[s];
    for (std::int64_t i = 0; i < shape.q_len; ++i) {
      const std::int64_t position = shape.q_offset + i;
      const std::int64_t begin = spec.mask.left < 0 ? 0 : std::max<std::int64_t>(0, position - spec.mask.left);
      const std::int64_t end =
          spec.mask.right < 0 ? shape.k_len : std::min(shape.k_len, position + spec.mask.right + 1);
      for (int h = 0; h < spec.heads; ++h) {
        const std::int64_t row = (forward.q_begin(s) + i) * spec.heads + h;
        const auto key_row = [&](std::int64_t key) {
          return (forward.k_begin(s) + key) * spec.kv_heads + h / (spec.heads / spec.kv_heads);
        };
        const double dlse = inputs.dlse.empty() ? 0.0 : static_cast<double>(inputs.dlse[static_cast<std::size_t>(row)]);
        const double sink = spec.sinks ? static_cast<double>(forward.sinks[static_cast<std::size_t>(h)])
                                       : -std::numeric_limits<double>::infinity();
        std::vector<double> x, p, dp;
        double greatest = sink;
        for (std::int64_t key = begin; key < end; ++key) {
          const double score =
              dot(&q[static_cast<std::size_t>(row * dim)], &k[static_cast<std::size_t>(key_row(key) * dim)], dim) *
              scale;
          x.push_back(cap > 0.0 ? cap * std::tanh(score / cap) : score);
          dp.push_back(dot(&dout[static_cast<std::size_t>(row * dim_v)],
                           &v[static_cast<std::size_t>(key_row(key) * dim_v)], dim_v));
          greatest = std::max(greatest, x.back());
        }
        double sum = std::exp(sink - greatest);
        for (const double score : x) sum += std::exp(score - greatest);
        double lse = greatest + std::log(sum);
        if (round) lse = static_cast<double>(inputs.lse[static_cast<std::size_t>(row)]);
        double delta = 0.0;
        for (std::size_t j = 0; j < x.size(); ++j) {
          p.push_back(std::exp(x[j] - lse));
          delta += p[j] * dp[j];
        }
        if (round) {
          delta = dot(&dout[static_cast<std::size_t>(row * dim_v)], &out[static_cast<std::size_t>(row * dim_v)], dim_v);
        }
        delta -= dlse;
        if (spec.sinks && std::isfinite(lse)) {
          result.sink_terms[static_cast<std::size_t>(row)] = -std::exp(sink - lse) * delta;
        }
        for (std::size_t j = 0; j < x.size(); ++j) {
          const auto key = static_cast<std::size_t>(key_row(begin + static_cast<std::int64_t>(j)));
          double ds = p[j] * (dp[j] - delta);
          if (cap > 0.0) ds *= 1.0 - (x[j] / cap) * (x[j] / cap);
          if (round) {
            ds = rounded(ds, spec.dtype);
            p[j] = rounded(p[j], spec.dtype);
          }
          const auto d = static_cast<std::size_t>(dim);
          add(ds * scale, &k[key * d], dim, &result.dq[static_cast<std::size_t>(row) * d]);
          add(ds * scale, &q[static_cast<std::size_t>(row) * d], dim, &result.dk[key * d]);
          add(p[j], &dout[static_cast<std::size_t>(row * dim_v)], dim_v,
              &result.dv[key * static_cast<std::size_t>(dim_v)]);
        }
      }
    }
  }
  if (round) {
    for (std::vector<double>* gradient : {&result.dq, &result.dk, &result.dv}) {
      for (double& value : *gradient) value = rounded(value, inputs.gradients);
    }
  }
  return result;
}

std::string compare(std::string_view name, const std::vector<double>& exact, const std::vector<double>& same_precision,
                    const std::vector<std::byte>& result, Dtype dtype) {
  if (result.size() != exact.size() * size_of(dtype)) return fmt::format("{} has another size", name);
  double greatest = 0.0;
  double own_error = 0.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    greatest = std::max(greatest, std::abs(exact[i]));
    own_error = std::max(own_error, std::abs(same_precision[i] - exact[i]));
  }
  const double allowed = 2.0 * own_error + 0x1p-18 * greatest + 1e-6;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double value = element(result, dtype, static_cast<std::int64_t>(i));
    if (std::abs(value - exact[i]) <= allowed) continue;
    return fmt::format("{}[{}] is {}, exactly {}; allowed {}", name, i, value, exact[i], allowed);
  }
  if (!exact.empty()) count_check();
  return {};
}

}  // namespace

bool Gradients::same_bits(const Gradients& other) const {
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
  };
  count_check();
  return dq == other.dq && dk == other.dk && dv == other.dv && same(stats, other.stats) &&
         same(sink_terms, other.sink_terms);
}

void BackwardInputs::set_dout(std::int64_t token, int head, int dim, float value) {
  const AttentionSpec& spec = forward.spec;
  const std::int64_t index = (token * spec.heads + head) * spec.head_dim_v + dim;
  store_element(dout.data() + static_cast<std::size_t>(index) * size_of(spec.dtype), spec.dtype, value);
}

void run_forward(BackwardInputs& inputs) {
  const AttentionResult result = attend_with(row_of<AttentionSpec>("cpu_attention"), inputs.forward);
  inputs.out = result.out;
  inputs.lse = result.lse;
}

BackwardInputs random_backward_inputs(const AttentionSpec& spec, const std::vector<SequenceShape>& sequences,
                                      std::uint64_t seed, bool with_dlse) {
  BackwardInputs inputs{random_inputs(spec, sequences, seed), spec.dtype, {}, {}, {}, {}};
  std::mt19937_64 random(seed + 1);
  const std::int64_t rows = inputs.forward.q_tokens() * spec.heads;
  inputs.dout = random_elements(rows * spec.head_dim_v, spec.dtype, random);
  if (with_dlse) {
    inputs.dlse.resize(static_cast<std::size_t>(rows));
    const Normal normal;
    for (float& value : inputs.dlse) value = normal(random);
  }
  run_forward(inputs);
  return inputs;
}

Gradients differentiate(const BackwardInputs& inputs, const BackwardArrangement& arrangement) {
  const AttentionBackwardSpec spec = inputs.spec();
  const AttentionSpec& of = spec.forward;
  const auto& row = row_of<AttentionBackwardSpec>("cpu_attention_backward");
  const std::unique_ptr<Backend> backend = row.make_backend({arrangement.threads, 0});
  const std::unique_ptr<AttentionBackwardKernel> kernel = row.make_kernel(spec, *backend);
  std::mt19937_64 random(arrangement.seed);
  const std::int64_t q_tokens = inputs.forward.q_tokens();
  const std::int64_t k_tokens = inputs.forward.k_tokens();

  std::vector<BackwardSequence> sequences;
  std::vector<Span> queries;
  std::vector<Span> keys;
  std::vector<Tile> query_tiles;
  std::vector<Tile> key_tiles;
  for (std::size_t s = 0; s < inputs.forward.sequences.size(); ++s) {
    const SequenceShape& shape = inputs.forward.sequences[s];
    sequences.push_back({shape.q_len, shape.k_len, shape.q_offset});
    queries.push_back({inputs.forward.q_begin(s), shape.q_offset, shape.q_len});
    keys.push_back({inputs.forward.k_begin(s), 0, shape.k_len});
    const auto sequence = static_cast<std::int32_t>(s);
    const std::int64_t key_tile = kernel->key_tile();
    for (std::int64_t begin = 0; begin < shape.k_len; begin += key_tile) {
      key_tiles.push_back(
          {sequence, begin / key_tile, keys[s].packed + begin, std::min(key_tile, shape.k_len - begin), {}});
    }
    const std::int64_t end = shape.q_offset + shape.q_len;
    std::int64_t tile = 0;
    for (std::int64_t begin = first_query_tile(sequences[s]); begin < end; begin += kBackwardTile, ++tile) {
      const std::int64_t first = std::max(begin, shape.q_offset);
      const std::int64_t count = std::min(end, begin + kBackwardTile) - first;
      if (shape.q_len > 0) {
        query_tiles.push_back({sequence, tile, queries[s].packed + first - shape.q_offset, count, {}});
      }
    }
  }
  kernel->reserve({.rows = std::max(q_tokens, k_tokens),
                   .row_runs = q_tokens + k_tokens,
                   .tile_runs = static_cast<std::int64_t>(sequences.size()),
                   .tiles = static_cast<std::int64_t>(query_tiles.size() + key_tiles.size()),
                   .sequences = static_cast<std::int64_t>(sequences.size())});

  Gradients result;
  const std::size_t element_size = size_of(spec.gradients);
  result.dq.resize(static_cast<std::size_t>(q_tokens * of.heads * of.head_dim) * element_size);
  result.dk.resize(static_cast<std::size_t>(k_tokens * of.kv_heads * of.head_dim) * element_size);
  result.dv.resize(static_cast<std::size_t>(k_tokens * of.kv_heads * of.head_dim_v) * element_size);
  result.stats.resize(static_cast<std::size_t>(q_tokens * of.heads * kRowStats));
  if (of.sinks) result.sink_terms.resize(static_cast<std::size_t>(q_tokens * of.heads));
  {
    Rows out(of.dtype, of.heads, of.head_dim_v, arrangement.strided);
    Rows dout(of.dtype, of.heads, of.head_dim_v, arrangement.strided);
    for (auto [rows, bytes] : {std::pair{&out, &inputs.out}, {&dout, &inputs.dout}}) {
      rows->resize(q_tokens);
      rows->put(*bytes, 0, q_tokens, 0);
    }
    std::vector<float> dlse = inputs.dlse;
    kernel->row_stats({out.view(),
                       dout.view(),
                       {const_cast<float*>(inputs.lse.data()), of.heads, 1},
                       {dlse.empty() ? nullptr : dlse.data(), of.heads, 1},
                       result.stats.data(),
                       of.sinks ? inputs.forward.sinks.data() : nullptr,
                       of.sinks ? result.sink_terms.data() : nullptr},
                      {}, {});
  }
  const std::int64_t stats_row = of.heads * kRowStats;
  const auto copy_stats = [&](std::int64_t packed, std::int64_t count, std::vector<float>& to, std::int64_t token) {
    std::copy_n(result.stats.begin() + packed * stats_row, count * stats_row, to.begin() + token * stats_row);
  };
  const auto state_of = [](std::size_t bytes) {
    return std::vector<float>(bytes / sizeof(float), std::numeric_limits<float>::quiet_NaN());
  };

  {  // dQ
    std::int64_t tokens[2] = {};
    place(key_tiles, tokens, random);
    std::vector<Rows> k(2, Rows(of.dtype, of.kv_heads, of.head_dim, arrangement.strided));
    std::vector<Rows> v(2, Rows(of.dtype, of.kv_heads, of.head_dim_v, false));
    std::vector<BackwardKeySource> sources;
    for (std::size_t i = 0; i < 2; ++i) {
      k[i].resize(tokens[i]);
      v[i].resize(tokens[i]);
      sources.push_back({k[i].view(), v[i].view()});
    }
    for (const Tile& tile : key_tiles) {
      const auto source = static_cast<std::size_t>(tile.place.source);
      k[source].put(inputs.forward.k, tile.packed, tile.count, tile.place.row);
      v[source].put(inputs.forward.v, tile.packed, tile.count, tile.place.row);
    }
    for (const std::vector<DealtRun>& rank : deal(queries, arrangement, random)) {
      const std::int64_t rows = rows_in(rank);
      Rows q(of.dtype, of.heads, of.head_dim, arrangement.strided);
      Rows dout(of.dtype, of.heads, of.head_dim_v, arrangement.strided);
      Rows dq(spec.gradients, of.heads, of.head_dim, arrangement.strided);
      for (Rows* tensor : {&q, &dout, &dq}) tensor->resize(rows);
      std::vector<float> stats(static_cast<std::size_t>(rows * stats_row));
      std::vector<QueryRun> runs;
      for (const DealtRun& run : rank) {
        runs.push_back(run.run);
        q.put(inputs.forward.q, run.packed, run.run.rows, run.run.row);
        dout.put(inputs.dout, run.packed, run.run.rows, run.run.row);
        copy_stats(run.packed, run.run.rows, stats, run.run.row);
      }
      std::vector<float> state = state_of(kernel->dq_state_bytes(rows));
      const MutableTensorView dq_view = dq.view();
      for_each_task(key_tiles, arrangement, [&](std::span<const Tile> tiles, bool first, bool last) {
        const TaskTiles of_task(tiles);
        DqTask task;
        task.sequences = sequences;
        task.rows = runs;
        task.runs = of_task.runs;
        task.tiles = of_task.tiles;
        task.state = state.data();
        task.resume = !first;
        task.save = !last;
        task.q = q.view();
        task.dout = dout.view();
        task.stats = stats.data();
        task.sources = sources;
        task.dq = last ? &dq_view : nullptr;
        kernel->add_dq(task, {}, {});
      });
      for (const DealtRun& run : rank) dq.get(result.dq, run.packed, run.run.rows, run.run.row);
    }
  }
  {  // dK and dV
    std::int64_t tokens[2] = {};
    place(query_tiles, tokens, random);
    std::vector<Rows> q(2, Rows(of.dtype, of.heads, of.head_dim, arrangement.strided));
    std::vector<Rows> dout(2, Rows(of.dtype, of.heads, of.head_dim_v, false));
    std::vector<float> stats[2];
    std::vector<BackwardQuerySource> sources;
    for (std::size_t i = 0; i < 2; ++i) {
      q[i].resize(tokens[i]);
      dout[i].resize(tokens[i]);
      stats[i].assign(static_cast<std::size_t>(tokens[i] * stats_row), std::numeric_limits<float>::quiet_NaN());
      sources.push_back({q[i].view(), dout[i].view(), stats[i].data()});
    }
    for (const Tile& tile : query_tiles) {
      const auto source = static_cast<std::size_t>(tile.place.source);
      q[source].put(inputs.forward.q, tile.packed, tile.count, tile.place.row);
      dout[source].put(inputs.dout, tile.packed, tile.count, tile.place.row);
      copy_stats(tile.packed, tile.count, stats[source], tile.place.row);
    }
    for (const std::vector<DealtRun>& rank : deal(keys, arrangement, random)) {
      const std::int64_t rows = rows_in(rank);
      Rows k(of.dtype, of.kv_heads, of.head_dim, arrangement.strided);
      Rows v(of.dtype, of.kv_heads, of.head_dim_v, arrangement.strided);
      Rows dk(spec.gradients, of.kv_heads, of.head_dim, arrangement.strided);
      Rows dv(spec.gradients, of.kv_heads, of.head_dim_v, arrangement.strided);
      for (Rows* tensor : {&k, &v, &dk, &dv}) tensor->resize(rows);
      std::vector<QueryRun> runs;
      for (const DealtRun& run : rank) {
        runs.push_back(run.run);
        k.put(inputs.forward.k, run.packed, run.run.rows, run.run.row);
        v.put(inputs.forward.v, run.packed, run.run.rows, run.run.row);
      }
      std::vector<float> state = state_of(kernel->dkv_state_bytes(rows));
      const MutableTensorView dk_view = dk.view();
      const MutableTensorView dv_view = dv.view();
      for_each_task(query_tiles, arrangement, [&](std::span<const Tile> tiles, bool first, bool last) {
        const TaskTiles of_task(tiles);
        DkvTask task;
        task.sequences = sequences;
        task.rows = runs;
        task.runs = of_task.runs;
        task.tiles = of_task.tiles;
        task.state = state.data();
        task.resume = !first;
        task.save = !last;
        task.k = k.view();
        task.v = v.view();
        task.sources = sources;
        task.dk = last ? &dk_view : nullptr;
        task.dv = last ? &dv_view : nullptr;
        kernel->add_dkv(task, {}, {});
      });
      for (const DealtRun& run : rank) {
        dk.get(result.dk, run.packed, run.run.rows, run.run.row);
        dv.get(result.dv, run.packed, run.run.rows, run.run.row);
      }
    }
  }
  return result;
}

std::string check_gradients(const BackwardInputs& inputs, const Gradients& result) {
  const Numbers64 exact = reference(inputs, false);
  const Numbers64 same_precision = reference(inputs, true);
  for (const std::string& difference : {compare("dq", exact.dq, same_precision.dq, result.dq, inputs.gradients),
                                        compare("dk", exact.dk, same_precision.dk, result.dk, inputs.gradients),
                                        compare("dv", exact.dv, same_precision.dv, result.dv, inputs.gradients)}) {
    if (!difference.empty()) return difference;
  }
  if (!inputs.forward.spec.sinks) return {};
  std::vector<std::byte> terms(result.sink_terms.size() * sizeof(float));
  std::memcpy(terms.data(), result.sink_terms.data(), terms.size());
  return compare("sink term", exact.sink_terms, same_precision.sink_terms, terms, Dtype::kF32);
}

}  // namespace ringattn::testing
