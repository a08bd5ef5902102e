// SPDX-License-Identifier: Apache-2.0
#include "attention/check/kept_share.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "attention/tokens/cost.hpp"
#include "base/memory.hpp"
#include "base/pulse.hpp"
#include "kernels/oracle.hpp"

namespace ringattn {

namespace {

constexpr std::uint64_t kSampleSeed = 21;  // any; the same rows each time
constexpr std::int64_t kPieceTokens = 1024;

// The share that one row keeps; NaN where it sees no key.
double share_of(const JobInput& input, const RowSample& sample, int threads) {
  const Job& job = input.job();
  FoldSpec spec = job.spec;
  spec.sinks = false;
  const std::vector<std::int64_t> cu_q = job.batch.cu_q();
  const auto sequence =
      static_cast<std::size_t>(std::upper_bound(cu_q.begin(), cu_q.end() - 1, sample.token) - cu_q.begin() - 1);
  const Sequence& of = job.batch.sequences[sequence];
  const std::int64_t position = sample.token - cu_q[sequence] + of.q_offset;
  const auto bytes = [&](std::int64_t tokens, int heads, int dim) {
    return allocate_host(static_cast<std::size_t>(tokens * heads * dim) * size_of(spec.dtype));
  };
  const auto view = [&](const Buffer& buffer, std::int64_t tokens, int heads, int dim) {
    return dense_view(static_cast<void*>(buffer.data()), spec.dtype, tokens, heads, dim);
  };
  const Buffer q_bytes = bytes(1, spec.heads, spec.head_dim);
  const MutableTensorView q_rows = view(q_bytes, 1, spec.heads, spec.head_dim);
  const PackedRun own{sample.token, sample.token + 1};
  input.read(SyntheticTensor::kQ, {&own, 1}, q_rows, threads);
  std::vector<double> q;
  const TensorView q_view = q_rows;
  for (std::int64_t d = 0; d < spec.head_dim; ++d) {
    q.push_back(static_cast<double>(
        load_element(q_view.at(0, sample.head) + static_cast<std::size_t>(d) * size_of(spec.dtype), spec.dtype)));
  }
  OracleRow rows[] = {OracleRow(spec, sample.head, position, of.k_len, q),
                      OracleRow(spec, sample.head, position, of.k_len, q,
                                listed_keys(job.lists.get(), spec.heads, sequence, sample.head, position))};
  const KeyRange keys = Visibility(spec.mask, of.k_len).keys(position);
  const std::int64_t origin = job.batch.cu_k()[sequence];
  const Buffer k_bytes = bytes(kPieceTokens, spec.kv_heads, spec.head_dim);
  const Buffer v_bytes = bytes(kPieceTokens, spec.kv_heads, spec.head_dim_v);
  for (std::int64_t key = keys.begin; key < keys.end; key += kPieceTokens) {
    beat();
    const std::int64_t tokens = std::min(kPieceTokens, keys.end - key);
    const PackedRun run{origin + key, origin + key + tokens};
    const MutableTensorView k = view(k_bytes, tokens, spec.kv_heads, spec.head_dim);
    const MutableTensorView v = view(v_bytes, tokens, spec.kv_heads, spec.head_dim_v);
    input.read(SyntheticTensor::kK, {&run, 1}, k, threads);
    input.read(SyntheticTensor::kV, {&run, 1}, v, threads);
    feed_rows(rows, key, k, v);
  }
  std::vector<double> out;
  const double all = rows[0].finish(0.0, out);
  const double kept = rows[1].finish(0.0, out);
  return std::isinf(all) ? std::nan("") : std::exp(kept - all);
}

}  // namespace

KeptShare kept_share(const Meeting& meeting, const JobInput& input, std::int64_t count, int threads) {
  const std::vector<RowSample> samples = sample_rows(input.job(), count, kSampleSeed);
  double rows = 0.0;
  double sum = 0.0;
  double least = 1.0;
  const double products = static_cast<double>(samples.size()) * static_cast<double>(input.job().batch.k_tokens()) *
                          pair_flops(input.job().spec) / input.job().spec.heads;
  meeting.together(
      [&] {
        for (auto i = static_cast<std::size_t>(meeting.rank()); i < samples.size();
             i += static_cast<std::size_t>(meeting.size())) {
          const double share = share_of(input, samples[i], threads);
          if (std::isnan(share)) continue;
          rows += 1.0;
          sum += share;
          least = std::min(least, share);
        }
      },
      products * 1e-9);
  KeptShare all;
  double total = 0.0;
  const std::vector<double> counts = meeting.gather_values(rows);
  const std::vector<double> sums = meeting.gather_values(sum);
  for (const double one : meeting.gather_values(least)) all.least = std::min(all.least, one);
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    all.rows += static_cast<std::int64_t>(counts[rank]);
    total += sums[rank];
  }
  if (all.rows > 0) all.mean = total / static_cast<double>(all.rows);
  return all;
}

}  // namespace ringattn
