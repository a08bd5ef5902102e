// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/backward_accuracy.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/memory.hpp"
#include "base/rank_liveness.hpp"
#include "ops/attention_backward/same_precision_gradients.hpp"
#include "ops/attention_jobs/oracle_rows.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kStagedTokens = 1024;
constexpr std::uint64_t kQuerySampleSeed = 20;  // any; the same rows each time
constexpr std::uint64_t kKeySampleSeed = 21;

std::vector<double> widened(std::span<const float> row) { return {row.begin(), row.end()}; }

double norm(std::span<const float> row) {
  double sum = 0.0;
  for (const float value : row) sum += double{value} * double{value};
  return std::isfinite(sum) ? std::sqrt(sum) : 0.0;
}

bool is_finite(std::span<const float> row) {
  return std::ranges::all_of(row, [](float value) { return std::isfinite(value); });
}

// Dense rows in host memory.
struct StagedRows {
  StagedRows(Dtype dtype, std::int64_t tokens, std::int64_t heads, std::int64_t dim)
      : memory(allocate_host(static_cast<std::size_t>(tokens * heads * dim) * size_of(dtype))),
        view(dense_view(static_cast<void*>(memory.data()), dtype, tokens, heads, dim)) {}

  Buffer memory;
  MutableTensorView view;
};

// The tokens of the other side that share a tile with a query or key, so that their non-finite values may reach its
// row.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Keys of the tiles that the tile of the query at `position` processes.
TokenRange keys_of_query(const AttentionSpec& spec, const Sequence& sequence, std::int64_t position, int key_tile) {
  const TileRange tiles = Visibility(spec.mask, sequence.k_len).tiles(position, TileSizes{kBackwardTile, key_tile});
  return {tiles.begin * key_tile, std::min(tiles.end * key_tile, sequence.k_len)};
}

// Queries of the tiles that the tile of the key processes, counted from the sequence's first query.
TokenRange queries_of_key(const AttentionSpec& spec, const Sequence& sequence, std::int64_t key, int key_tile) {
  const std::int64_t first_key = key / key_tile * key_tile;
  const std::int64_t last_key = std::min(first_key + key_tile, sequence.k_len) - 1;
  const std::int64_t none = sequence.q_offset - kBackwardTile;
  std::int64_t begin = spec.mask.right < 0 ? none : first_key - spec.mask.right;
  std::int64_t end = spec.mask.left < 0 ? sequence.q_offset + sequence.q_len : last_key + spec.mask.left + 1;
  begin = query_tile_begin(begin, kBackwardTile);
  end = query_tile_begin(end - 1, kBackwardTile) + kBackwardTile;
  return {std::clamp<std::int64_t>(begin - sequence.q_offset, 0, sequence.q_len),
          std::clamp<std::int64_t>(end - sequence.q_offset, 0, sequence.q_len)};
}

bool sees(const AttentionSpec& spec, std::int64_t position, std::int64_t key) {
  return (spec.mask.left < 0 || key >= position - spec.mask.left) &&
         (spec.mask.right < 0 || key <= position + spec.mask.right);
}

void note_misplaced(AttentionGradientAccuracy& accuracy, const RowSample& sample) {
  if (accuracy.misplaced++ == 0) accuracy.first_misplaced = sample;
}

// `tainted`: a NaN or ∞ in a tile may have reached the row.
void judge_row(const RowSample& sample, const TensorView& rows, std::int64_t row, std::span<const double> exact,
               std::span<const float> same_precision, bool tainted, AttentionGradientAccuracy& accuracy) {
  std::vector<float> values;
  load_row(rows, row, sample.head, values);
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const float expected = rounded(rows.dtype, static_cast<float>(exact[i]));  // ∞ beyond the dtype's range
    if (!std::isfinite(values[i]) || !std::isfinite(expected)) {
      const bool same = std::isnan(expected) ? std::isnan(values[i]) : values[i] == expected;
      if (!same && !(tainted && !std::isfinite(values[i]))) note_misplaced(accuracy, sample);
      continue;
    }
    ++accuracy.compared;
    const double error = std::abs(double{values[i]} - exact[i]);
    if (error > accuracy.error) {
      accuracy.error = error;
      accuracy.worst = sample;
    }
    const float shifted = rounded(rows.dtype, rounded(rows.dtype, expected + 0.3F) - 0.3F);
    accuracy.rounding = std::max(accuracy.rounding, double{std::abs(shifted - expected)});
    const double simple = std::abs(double{same_precision[i]} - exact[i]);
    if (std::isfinite(simple)) accuracy.same_precision_error = std::max(accuracy.same_precision_error, simple);
  }
}

void merge_gradient(const AttentionGradientAccuracy& part, AttentionGradientAccuracy& all) {
  all.compared += part.compared;
  if (part.error > all.error) {
    all.error = part.error;
    all.worst = part.worst;
  }
  all.same_precision_error = std::max(all.same_precision_error, part.same_precision_error);
  all.rounding = std::max(all.rounding, part.rounding);
  all.cancellation = std::max(all.cancellation, part.cancellation);
  if (all.misplaced == 0) all.first_misplaced = part.first_misplaced;
  all.misplaced += part.misplaced;
}

// This rank's row of the packed token; absent if another rank has it.
std::optional<std::int64_t> row_of(std::span<const PackedRun> runs, std::int64_t token) {
  std::int64_t row = 0;
  for (const PackedRun& run : runs) {
    if (token >= run.begin && token < run.end) return row + token - run.begin;
    row += run.tokens();
  }
  return std::nullopt;
}

// A sampled key of this rank, and the sums of its gradients.
struct KeyRow {
  // Adds queries. `first`: packed token of the first one, whose position is `position`.
  void feed(const AttentionSpec& spec, std::int64_t first, std::int64_t position, const TensorView& q,
            const TensorView& dout, std::span<const OracleRowStats> stats) {
    oracle.feed(position, q, dout, stats);
    const int group = spec.heads / spec.kv_heads;
    std::vector<float> q_row, dout_row;
    const std::int64_t begin = std::max(queries.begin, first);
    const std::int64_t end = std::min(queries.end, first + q.tokens);
    for (std::int64_t token = begin; token < end; ++token) {
      for (int head = sample.head * group; head < (sample.head + 1) * group; ++head) {
        load_row(q, token - first, head, q_row);
        load_row(dout, token - first, head, dout_row);
        tainted = tainted || !is_finite(q_row) || !is_finite(dout_row);
        if (!sees(spec, position + token - first, key)) continue;
        largest_q = std::max(largest_q, norm(q_row));
        largest_dout = std::max(largest_dout, norm(dout_row));
        const PairGradient pair = pair_gradient(spec, q_row, k, dout_row, v,
                                                stats[static_cast<std::size_t>((token - first) * spec.heads + head)]);
        dk.add(pair.ds, q_row);
        dv.add(pair.p, dout_row);
      }
    }
  }

  RowSample sample;
  std::int64_t row = 0;  // of this rank
  std::size_t sequence = 0;
  std::int64_t key = 0;  // of its sequence
  TokenRange queries;    // packed
  std::vector<float> k, v;
  OracleDkvRow oracle;
  RunSum dk, dv;
  double largest_q = 0.0, largest_dout = 0.0;
  bool tainted = false;
};

class GradientCheck {
 public:
  GradientCheck(const Collective& collective, const BackwardInput& input, int key_tile,
                const BackwardRankResult& result, int threads)
      : collective_(collective),
        input_(input),
        spec_(input.job().forward.spec),
        batch_(input.job().forward.batch),
        cu_q_(batch_.cu_q()),
        cu_k_(batch_.cu_k()),
        key_tile_(key_tile),
        result_(result),
        threads_(threads) {}

  void check_dq(std::span<const RowSample> samples, AttentionGradientAccuracy& accuracy) const;
  void check_dkv(std::span<const RowSample> samples, AttentionGradientAccuracy& dk,
                 AttentionGradientAccuracy& dv) const;
  SinkAccuracy check_dsinks() const;

 private:
  std::vector<float> dlse_of(const PackedRun& run) const;
  std::vector<OracleRowStats> own_stats(const PackedRun& run, std::int64_t row) const;
  std::vector<OracleRowStats> gathered_stats(const PackedRun& tokens) const;

  const Collective& collective_;
  const BackwardInput& input_;
  const AttentionSpec& spec_;
  const Batch& batch_;
  std::vector<std::int64_t> cu_q_, cu_k_;
  int key_tile_;
  const BackwardRankResult& result_;
  int threads_;
};

// [tokens, heads]; empty if the gradient of LSE is 0.
std::vector<float> GradientCheck::dlse_of(const PackedRun& run) const {
  if (!input_.has_dlse()) return {};
  std::vector<float> dlse(static_cast<std::size_t>(run.tokens() * spec_.heads));
  input_.read_dlse({&run, 1}, dlse, 1);
  return dlse;
}

// Row stats of consecutive queries of this rank, starting at its row `row`: [tokens, heads].
std::vector<OracleRowStats> GradientCheck::own_stats(const PackedRun& run, std::int64_t row) const {
  const StagedRows dout(spec_.dtype, run.tokens(), spec_.heads, spec_.head_dim_v);
  input_.read_dout({&run, 1}, dout.view, threads_);
  TensorView out = result_.out_view(spec_);
  out.data = out.at(row, 0);
  out.tokens = run.tokens();
  RowView lse = result_.lse_view(spec_);
  lse.data += row * lse.token_stride;
  std::vector<float> dlse = dlse_of(run);
  const RowView dlse_view = dlse.empty() ? RowView{} : RowView{dlse.data(), spec_.heads, 1};
  return oracle_row_stats(out, lse, dout.view, dlse_view);
}

// Collective. Row stats of consecutive queries of any ranks: [tokens, heads].
std::vector<OracleRowStats> GradientCheck::gathered_stats(const PackedRun& tokens) const {
  std::string mine;
  collective_.run_collectively([&] {
    std::int64_t row = 0;
    for (const PackedRun& run : result_.q_runs) {
      const PackedRun part{std::max(run.begin, tokens.begin), std::min(run.end, tokens.end)};
      if (part.begin < part.end) {
        const std::vector<OracleRowStats> stats = own_stats(part, row + part.begin - run.begin);
        mine.append(reinterpret_cast<const char*>(&part), sizeof part);
        mine.append(reinterpret_cast<const char*>(stats.data()), stats.size() * sizeof(OracleRowStats));
      }
      row += run.tokens();
    }
  });
  std::vector<OracleRowStats> all(static_cast<std::size_t>(tokens.tokens() * spec_.heads));
  for (const std::string& theirs : collective_.gather(mine)) {
    for (std::size_t at = 0; at < theirs.size();) {
      const auto part = gathered_value<PackedRun>(theirs, at);
      const auto bytes = static_cast<std::size_t>(part.tokens() * spec_.heads) * sizeof(OracleRowStats);
      std::memcpy(all.data() + (part.begin - tokens.begin) * spec_.heads, theirs.data() + at + sizeof part, bytes);
      at += sizeof part + bytes;
    }
  }
  return all;
}

void GradientCheck::check_dq(std::span<const RowSample> samples, AttentionGradientAccuracy& accuracy) const {
  struct Row {
    RowSample sample;
    std::int64_t row = 0;  // of this rank
    std::size_t sequence = 0;
    std::int64_t position = 0;
    TokenRange keys;
    std::vector<float> q, dout;
    OracleRowStats stats;
    OracleDqRow oracle;
    RunSum sum;
    double largest_k = 0.0, largest_v = 0.0;
    bool tainted = false;
  };
  std::vector<Row> rows;
  for (const RowSample& sample : samples) {
    const auto own = row_of(result_.q_runs, sample.token);
    if (!own) continue;
    const std::size_t s = sequence_of(cu_q_, sample.token);
    const Sequence sequence = batch_.sequences[s];
    const PackedRun run{sample.token, sample.token + 1};
    const StagedRows dout_row(spec_.dtype, 1, spec_.heads, spec_.head_dim_v);
    input_.read_dout({&run, 1}, dout_row.view, threads_);
    std::vector<float> dout;
    load_row(dout_row.view, 0, sample.head, dout);
    std::vector<float> q = query_of(input_.forward(), sample, threads_);
    const OracleRowStats stats = own_stats(run, *own)[static_cast<std::size_t>(sample.head)];
    const std::int64_t position = sample.token - cu_q_[s] + sequence.q_offset;
    OracleDqRow oracle(spec_, sample.head, position, sequence.k_len, widened(q), widened(dout), stats);
    rows.push_back({sample, *own, s, position, keys_of_query(spec_, sequence, position, key_tile_), std::move(q),
                    std::move(dout), stats, std::move(oracle), RunSum(static_cast<std::size_t>(spec_.head_dim))});
  }
  const int group = spec_.heads / spec_.kv_heads;
  const auto feed = [&](Row& row, std::int64_t first_key, const TensorView& k, const TensorView& v) {
    row.oracle.feed(first_key, k, v);
    std::vector<float> k_row, v_row;
    const std::int64_t begin = std::max(row.keys.begin, first_key);
    const std::int64_t end = std::min(row.keys.end, first_key + k.tokens);
    for (std::int64_t key = begin; key < end; ++key) {
      load_row(k, key - first_key, row.sample.head / group, k_row);
      load_row(v, key - first_key, row.sample.head / group, v_row);
      row.tainted = row.tainted || !is_finite(k_row);
      if (!sees(spec_, row.position, key)) continue;
      row.largest_k = std::max(row.largest_k, norm(k_row));
      row.largest_v = std::max(row.largest_v, norm(v_row));
      row.sum.add(pair_gradient(spec_, row.q, k_row, row.dout, v_row, row.stats).ds, k_row);
    }
  };
  for (std::size_t first = 0; first < rows.size();) {
    std::size_t last = first;
    TokenRange range = rows[first].keys;
    for (; last < rows.size() && rows[last].sequence == rows[first].sequence; ++last) {
      if (rows[last].keys.begin >= rows[last].keys.end) continue;
      const bool none = range.begin >= range.end;
      range.begin = none ? rows[last].keys.begin : std::min(range.begin, rows[last].keys.begin);
      range.end = std::max(range.end, rows[last].keys.end);
    }
    const std::int64_t origin = cu_k_[rows[first].sequence];
    for (std::int64_t key = range.begin; key < range.end; key += kStagedTokens) {
      heartbeat();
      const PackedRun run{origin + key, origin + std::min(range.end, key + kStagedTokens)};
      const StagedRows k(spec_.dtype, run.tokens(), spec_.kv_heads, spec_.head_dim);
      const StagedRows v(spec_.dtype, run.tokens(), spec_.kv_heads, spec_.head_dim_v);
      input_.forward().read(SyntheticTensor::kK, {&run, 1}, k.view, threads_);
      input_.forward().read(SyntheticTensor::kV, {&run, 1}, v.view, threads_);
#pragma omp parallel for schedule(dynamic) num_threads(threads_)
      for (std::size_t i = first; i < last; ++i) feed(rows[i], key, k.view, v.view);
    }
    first = last;
  }
  for (Row& row : rows) {
    const double scale = std::abs(double{spec_.softmax_scale});
    accuracy.cancellation =
        std::max(accuracy.cancellation, 0x1p-20 * scale * norm(row.dout) * row.largest_v * row.largest_k);
    judge_row(row.sample, result_.dq_view(input_.job()), row.row, row.oracle.finish(),
              row.sum.finish(input_.job().gradients, spec_.softmax_scale), row.tainted, accuracy);
  }
}

// Each rank checks its own keys. The queries that they need are read from the input, and the ranks that own the queries
// send their row stats.
void GradientCheck::check_dkv(std::span<const RowSample> samples, AttentionGradientAccuracy& dk,
                              AttentionGradientAccuracy& dv) const {
  std::vector<KeyRow> rows;
  std::vector<TokenRange> wanted;  // packed queries that the samples of all ranks need
  collective_.run_collectively([&] {
    for (const RowSample& sample : samples) {
      const std::size_t s = sequence_of(cu_k_, sample.token);
      const Sequence sequence = batch_.sequences[s];
      const std::int64_t key = sample.token - cu_k_[s];
      TokenRange queries = queries_of_key(spec_, sequence, key, key_tile_);
      queries = {queries.begin + cu_q_[s], queries.end + cu_q_[s]};
      if (queries.begin < queries.end) wanted.push_back(queries);
      const auto own = row_of(result_.k_runs, sample.token);
      if (!own) continue;
      const PackedRun run{sample.token, sample.token + 1};
      const StagedRows k_row(spec_.dtype, 1, spec_.kv_heads, spec_.head_dim);
      const StagedRows v_row(spec_.dtype, 1, spec_.kv_heads, spec_.head_dim_v);
      input_.forward().read(SyntheticTensor::kK, {&run, 1}, k_row.view, threads_);
      input_.forward().read(SyntheticTensor::kV, {&run, 1}, v_row.view, threads_);
      std::vector<float> k, v;
      load_row(k_row.view, 0, sample.head, k);
      load_row(v_row.view, 0, sample.head, v);
      OracleDkvRow oracle(spec_, sample.head, key, widened(k), widened(v));
      rows.push_back({sample, *own, s, key, queries, std::move(k), std::move(v), std::move(oracle),
                      RunSum(static_cast<std::size_t>(spec_.head_dim)),
                      RunSum(static_cast<std::size_t>(spec_.head_dim_v))});
    }
  });
  for (std::size_t s = 0; s < batch_.sequences.size(); ++s) {
    const Sequence sequence = batch_.sequences[s];
    for (std::int64_t token = cu_q_[s]; token < cu_q_[s + 1]; token += kStagedTokens) {
      const PackedRun run{token, std::min(cu_q_[s + 1], token + kStagedTokens)};
      const bool any = std::ranges::any_of(
          wanted, [&](const TokenRange& range) { return range.begin < run.end && run.begin < range.end; });
      if (!any) continue;
      const std::vector<OracleRowStats> stats = gathered_stats(run);
      collective_.run_collectively([&] {
        heartbeat();
        if (std::ranges::none_of(rows, [&](const KeyRow& row) { return row.sequence == s; })) return;
        const StagedRows q(spec_.dtype, run.tokens(), spec_.heads, spec_.head_dim);
        const StagedRows dout(spec_.dtype, run.tokens(), spec_.heads, spec_.head_dim_v);
        input_.forward().read(SyntheticTensor::kQ, {&run, 1}, q.view, threads_);
        input_.read_dout({&run, 1}, dout.view, threads_);
        const std::int64_t position = token - cu_q_[s] + sequence.q_offset;
#pragma omp parallel for schedule(dynamic) num_threads(threads_)
        for (std::size_t i = 0; i < rows.size(); ++i) {
          if (rows[i].sequence == s) rows[i].feed(spec_, token, position, q.view, dout.view, stats);
        }
      });
    }
  }
  for (KeyRow& row : rows) {
    const double scale = std::abs(double{spec_.softmax_scale});
    dk.cancellation = std::max(dk.cancellation, 0x1p-20 * scale * norm(row.v) * row.largest_dout * row.largest_q);
    std::vector<double> exact_dk, exact_dv;
    row.oracle.finish(exact_dk, exact_dv);
    const Dtype dtype = input_.job().gradients;
    judge_row(row.sample, result_.dk_view(input_.job()), row.row, exact_dk, row.dk.finish(dtype, spec_.softmax_scale),
              row.tainted, dk);
    judge_row(row.sample, result_.dv_view(input_.job()), row.row, exact_dv, row.dv.finish(dtype, 1.0F), row.tainted,
              dv);
  }
}

SinkAccuracy GradientCheck::check_dsinks() const {
  const auto heads = static_cast<std::size_t>(spec_.heads);
  // For each head: the sum of this rank's terms, and the error that an fp32 sum of them may have.
  std::vector<double> mine(2 * heads);
  collective_.run_collectively([&] {
    std::int64_t row = 0;
    for (const PackedRun& whole : result_.q_runs) {
      for (std::int64_t token = whole.begin; token < whole.end; token += kStagedTokens) {
        heartbeat();
        const PackedRun run{token, std::min(whole.end, token + kStagedTokens)};
        const std::vector<OracleRowStats> stats = own_stats(run, row);
        const StagedRows dout(spec_.dtype, run.tokens(), spec_.heads, spec_.head_dim_v);
        input_.read_dout({&run, 1}, dout.view, threads_);
        std::vector<float> out_row, dout_row;
        for (std::size_t i = 0; i < stats.size(); ++i) {
          const auto at = static_cast<std::int64_t>(i / heads);
          const std::size_t head = i % heads;
          if (std::isinf(stats[i].lse) && stats[i].lse < 0.0) continue;
          const double weight = std::exp(double{input_.forward().sinks()[head]} - stats[i].lse);
          load_row(result_.out_view(spec_), row + at, static_cast<std::int64_t>(head), out_row);
          load_row(dout.view, at, static_cast<std::int64_t>(head), dout_row);
          const double term = -weight * stats[i].delta;
          mine[head] += term;
          mine[heads + head] += 1e-5 * std::abs(term) + weight * 0x1p-20 * norm(out_row) * norm(dout_row);
        }
        row += run.tokens();
      }
    }
  });
  std::vector<double> all(2 * heads);
  for (const std::string& theirs :
       collective_.gather(std::string_view(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(double)))) {
    for (std::size_t i = 0; i < all.size(); ++i) all[i] += gathered_value<double>(theirs, i * sizeof(double));
  }
  SinkAccuracy accuracy;
  double worst = -1.0;
  for (std::size_t head = 0; head < heads; ++head) {
    const double value = result_.dsinks[head];
    if (!std::isfinite(value) || !std::isfinite(all[head])) {
      const bool same = std::isnan(value) ? std::isnan(all[head]) : value == all[head];
      accuracy.misplaced = accuracy.misplaced || !same;
      continue;
    }
    const double error = std::abs(value - all[head]);
    const double part = error == 0.0 ? 0.0 : error / all[heads + head];
    if (part <= worst) continue;
    worst = part;
    accuracy.error = error;
    accuracy.allowed = all[heads + head];
    accuracy.head = static_cast<int>(head);
  }
  return accuracy;
}

// A job whose queries are the keys, to sample rows of keys.
Job keys_job(const Job& job) {
  Job keys = job;
  keys.spec.heads = job.spec.kv_heads;
  std::vector<Sequence> sequences;
  for (const Sequence& sequence : job.batch.sequences) sequences.push_back({sequence.k_len, sequence.k_len, 0});
  keys.batch = Batch(std::move(sequences));
  return keys;
}

}  // namespace

BackwardAccuracy check_gradients(const Collective& collective, const BackwardInput& input, int key_tile,
                                 std::int64_t count, const BackwardRankResult& result, int threads) {
  const Job& job = input.job().forward;
  const std::vector<RowSample> q_samples = sample_rows(job, count, kQuerySampleSeed);
  const std::vector<RowSample> k_samples = sample_rows(keys_job(job), count, kKeySampleSeed);
  const GradientCheck check(collective, input, key_tile, result, threads);
  BackwardAccuracy mine;
  // Estimated for the case that one rank has all sampled rows. A processor core computes about 1e9 products per second
  // in fp64.
  const double products = static_cast<double>(q_samples.size()) * static_cast<double>(job.batch.k_tokens()) *
                          (2 * job.spec.head_dim + job.spec.head_dim_v);
  collective.run_collectively([&] { check.check_dq(q_samples, mine.dq); }, products * 1e-9);
  check.check_dkv(k_samples, mine.dk, mine.dv);
  BackwardAccuracy all;
  for (const BackwardAccuracy& theirs : collective.gather_values(mine)) {
    merge_gradient(theirs.dq, all.dq);
    merge_gradient(theirs.dk, all.dk);
    merge_gradient(theirs.dv, all.dv);
  }
  all.q_rows = std::ssize(q_samples);
  all.k_rows = std::ssize(k_samples);
  all.has_sinks = job.spec.sinks;
  if (all.has_sinks) all.dsinks = check.check_dsinks();
  return all;
}

}  // namespace ringattn
