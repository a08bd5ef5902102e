// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/output_change.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "kernels/attention/key_positions.hpp"
#include "kernels/attention/oracle.hpp"
#include "ops/attention_jobs/accuracy.hpp"
#include "ops/attention_jobs/oracle_rows.hpp"
#include "ops/mla/mla_projections.hpp"

namespace ringattn {

namespace {

constexpr std::uint64_t kSampleSeed = 1;  // any; the same rows each time

std::map<std::size_t, std::vector<RowSample>> samples_by_sequence(const Job& job, std::int64_t count) {
  const std::vector<std::int64_t> cu_q = job.batch.cu_q();
  std::map<std::size_t, std::vector<RowSample>> samples;
  for (const RowSample& sample : sample_rows(job, count, kSampleSeed)) {
    samples[sequence_of(cu_q, sample.token)].push_back(sample);
  }
  return samples;
}

// A finished row.
struct ExactRow {
  std::vector<double> out;
  double lse = 0.0;
};

// The samples of a sequence over one of the caches. The second cache may have fewer keys, at other positions. `sinks`:
// [heads], or empty. `latents`: the matrices of an MLA job, which is computed in the absorbed form; otherwise null.
std::vector<ExactRow> compute(const JobInput& input, std::size_t sequence, std::span<const RowSample> samples,
                              const std::vector<std::vector<double>>& queries, std::span<const float> sinks,
                              const MlaProjections* latents, int threads) {
  const Job& job = input.job();
  const AttentionSpec spec = latents != nullptr ? absorbed_spec(latents->spec) : job.spec;
  const Sequence shape = job.batch.sequences[sequence];
  const std::int64_t first_query = job.batch.cu_q()[sequence];
  std::vector<OracleRow> rows;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const int head = samples[i].head;
    rows.emplace_back(spec, head, shape.q_offset + samples[i].token - first_query, shape.k_len, queries[i],
                      BlockMaskKeys{},
                      positions_of(job.positions.get(), sequence, head / (spec.heads / spec.kv_heads)));
  }
  feed_keys(input, sequence, {0, shape.k_len}, rows, threads);
  std::vector<ExactRow> results(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double sink = sinks.empty() ? 0.0 : static_cast<double>(sinks[static_cast<std::size_t>(rows[i].head())]);
    results[i].lse = rows[i].finish(sink, results[i].out);
    if (latents != nullptr) {
      results[i].out = output_from_latent<double>(*latents, rows[i].head(), std::span<const double>(results[i].out));
    }
  }
  return results;
}

// Sums of squares over the rows that were compared.
struct Squares {
  double of_change = 0.0;
  double of_out = 0.0;
};

// The greater of both; NaN if either is NaN.
double greater(double a, double b) { return b > a || std::isnan(b) ? b : a; }

void compare(const ExactRow& before, const ExactRow& after, OutputChange& change, Squares& squares) {
  ++change.rows;
  constexpr double kEmpty = -std::numeric_limits<double>::infinity();
  if (before.lse != kEmpty && after.lse != kEmpty) {
    change.greatest_lse = greater(change.greatest_lse, std::abs(after.lse - before.lse));
  }
  change.emptied += before.lse != kEmpty && after.lse == kEmpty ? 1 : 0;
  for (std::size_t i = 0; i < before.out.size(); ++i) {
    const double difference = after.out[i] - before.out[i];
    squares.of_change += difference * difference;
    squares.of_out += before.out[i] * before.out[i];
    change.greatest = greater(change.greatest, std::abs(difference));
  }
}

}  // namespace

OutputChange output_change(const JobInput& before, const JobInput& after, std::int64_t count, int threads) {
  OutputChange change;
  Squares squares;
  std::optional<LoadedMlaProjections> held;
  if (before.mla() != nullptr) held.emplace(before, threads);
  const MlaProjections* const latents = held ? &held->matrices : nullptr;
  for (const auto& [sequence, samples] : samples_by_sequence(before.job(), count)) {
    std::vector<std::vector<double>> queries;
    for (const RowSample& sample : samples) {
      const std::vector<float> q = query_of(before, sample, threads);
      queries.push_back(latents != nullptr ? query_to_latent<double>(*latents, sample.head, q)
                                           : std::vector<double>(q.begin(), q.end()));
    }
    // The names of a structured binding are captured by name: clang 14 captures none by default.
    const auto over = [&, number = sequence, &rows = samples](const JobInput& cache) {
      return compute(cache, number, rows, queries, before.sinks(), latents, threads);
    };
    const std::vector<ExactRow> exact = over(before);
    const std::vector<ExactRow> changed = over(after);
    for (std::size_t i = 0; i < samples.size(); ++i) compare(exact[i], changed[i], change, squares);
  }
  if (squares.of_out != 0.0) change.relative_error = std::sqrt(squares.of_change / squares.of_out);
  return change;
}

}  // namespace ringattn
