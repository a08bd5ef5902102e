// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/kept_mass.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/tokens/cost.hpp"
#include "kernels/attention/oracle.hpp"
#include "ops/attention_jobs/oracle_rows.hpp"

namespace ringattn {

namespace {

constexpr std::uint64_t kSampleSeed = 21;  // any; the same rows each time

// The share that one row keeps; NaN if it sees no key.
double mass_of(const JobInput& input, const RowSample& sample, int threads) {
  const Job& job = input.job();
  AttentionSpec spec = job.spec;
  spec.sinks = false;
  const std::vector<std::int64_t> cu_q = job.batch.cu_q();
  const std::size_t sequence = sequence_of(cu_q, sample.token);
  const Sequence& of = job.batch.sequences[sequence];
  const std::int64_t position = sample.token - cu_q[sequence] + of.q_offset;
  const std::vector<float> row = query_of(input, sample, threads);
  const std::vector<double> q(row.begin(), row.end());
  OracleRow rows[] = {OracleRow(spec, sample.head, position, of.k_len, q),
                      OracleRow(spec, sample.head, position, of.k_len, q,
                                block_mask_keys(job.block_mask.get(), spec.heads, sequence, sample.head, position))};
  feed_keys(input, sequence, Visibility(spec.mask, of.k_len).keys(position), rows, threads);
  std::vector<double> out;
  const double all = rows[0].finish(0.0, out);
  const double kept = rows[1].finish(0.0, out);
  return std::isinf(all) ? std::nan("") : std::exp(kept - all);
}

}  // namespace

KeptMass kept_mass(const Collective& collective, const JobInput& input, std::int64_t count, int threads) {
  const std::vector<RowSample> samples = sample_rows(input.job(), count, kSampleSeed);
  double rows = 0.0;
  double sum = 0.0;
  double minimum = 1.0;
  const double products = static_cast<double>(samples.size()) * static_cast<double>(input.job().batch.k_tokens()) *
                          pair_flops(input.job().spec) / input.job().spec.heads;
  collective.run_collectively(
      [&] {
        for (auto i = static_cast<std::size_t>(collective.rank()); i < samples.size();
             i += static_cast<std::size_t>(collective.size())) {
          const double share = mass_of(input, samples[i], threads);
          if (std::isnan(share)) continue;
          rows += 1.0;
          sum += share;
          minimum = std::min(minimum, share);
        }
      },
      products * 1e-9);
  KeptMass all;
  double total = 0.0;
  const std::vector<double> counts = collective.gather_values(rows);
  const std::vector<double> sums = collective.gather_values(sum);
  for (const double one : collective.gather_values(minimum)) all.minimum = std::min(all.minimum, one);
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    all.rows += static_cast<std::int64_t>(counts[rank]);
    total += sums[rank];
  }
  if (all.rows > 0) all.mean = total / static_cast<double>(all.rows);
  return all;
}

}  // namespace ringattn
