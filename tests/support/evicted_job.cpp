// SPDX-License-Identifier: Apache-2.0
#include "tests/support/evicted_job.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "kernels/quant/eviction.hpp"

namespace ringattn::testing {

namespace {

bool sees(const Mask& mask, std::int64_t query, std::int64_t key) {
  return (mask.left < 0 || key >= query - mask.left) && (mask.right < 0 || key <= query + mask.right);
}

// The bytes of tokens' rows of some heads of a packed tensor.
std::vector<std::byte> heads_of(const std::vector<std::byte>& packed, std::int64_t token, std::int64_t tokens,
                                int heads, int first, int count, std::int64_t row_bytes) {
  std::vector<std::byte> rows;
  for (std::int64_t t = token; t < token + tokens; ++t) {
    const auto at = packed.begin() + (t * heads + first) * row_bytes;
    rows.insert(rows.end(), at, at + count * row_bytes);
  }
  return rows;
}

}  // namespace

Evicted::Evicted(Job the_whole, double ratio, int heads, std::uint64_t seed, std::int64_t recent)
    : whole(std::move(the_whole)), all(random_tensors(whole, seed)), job(whole), tensors(all) {
  std::mt19937_64 generator(seed);
  std::vector<KeptSequence> sequences;
  std::vector<std::int32_t> rows;
  std::vector<Sequence> kept;
  for (const Sequence& s : whole.batch.sequences) {
    const std::int64_t count = kept_tokens(s.k_len, ratio);
    std::vector<double> scores(static_cast<std::size_t>(s.k_len * heads));
    for (double& score : scores) score = static_cast<double>(generator() % 1000);
    const auto best = best_tokens("scores", scores, heads, count, {.last = recent});
    rows.insert(rows.end(), best.begin(), best.end());
    sequences.push_back({count, s.k_len});
    kept.push_back({s.q_len, count, s.q_offset});
  }
  positions = std::make_shared<const KeyPositions>("positions", heads, sequences, rows);
  job.batch = kept;
  tensors.k = compacted(all.k, whole.spec.head_dim, rows);
  tensors.v = compacted(all.v, whole.spec.head_dim_v, rows);
}

Job Evicted::placed() const {
  Job with = job;
  set_positions(with, positions);
  return with;
}

std::vector<std::byte> Evicted::compacted(std::vector<std::byte>& from, int dim,
                                          const std::vector<std::int32_t>& rows) const {
  const AttentionSpec& spec = whole.spec;
  const auto bytes = static_cast<std::int64_t>(size_of(spec.dtype)) * spec.kv_heads * dim;
  std::vector<std::byte> to(static_cast<std::size_t>(job_keys() * bytes));
  const std::vector<std::int64_t> cu = whole.batch.cu_k();
  std::int64_t row = 0;
  for (std::size_t s = 0; s < whole.batch.sequences.size(); ++s) {
    const std::int64_t count = positions->sequences()[s].keys;
    const auto view = [&](std::byte* data, std::int64_t tokens) {
      return dense_view(static_cast<void*>(data), spec.dtype, tokens, spec.kv_heads, dim);
    };
    const int heads = positions->heads();
    gather_tokens(
        view(from.data() + cu[s] * bytes, whole.batch.sequences[s].k_len),
        std::span(rows).subspan(static_cast<std::size_t>(row * heads), static_cast<std::size_t>(count * heads)),
        view(to.data() + row * bytes, count));
    row += count;
  }
  return to;
}

std::int64_t Evicted::job_keys() const {
  std::int64_t keys = 0;
  for (const KeptSequence& sequence : positions->sequences()) keys += sequence.keys;
  return keys;
}

JobResult by_definition(const Evicted& evicted,
                        const std::function<JobResult(const Job& job, const JobTensors& tensors)>& run) {
  const AttentionSpec& spec = evicted.job.spec;
  const int ratio = spec.heads / spec.kv_heads;
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  JobResult result = poisoned_result(evicted.job, 1);
  const std::vector<std::int64_t> cu_q = evicted.job.batch.cu_q(), cu_k = evicted.job.batch.cu_k();
  for (std::size_t s = 0; s < evicted.job.batch.sequences.size(); ++s) {
    const Sequence& sequence = evicted.job.batch.sequences[s];
    for (int kv_head = 0; kv_head < spec.kv_heads; ++kv_head) {
      const auto own = evicted.positions->of(s, evicted.positions->heads() == 1 ? 0 : kv_head);
      Job row;
      row.spec = spec;
      row.spec.heads = ratio;
      row.spec.kv_heads = 1;
      JobTensors tensors;
      tensors.k =
          heads_of(evicted.tensors.k, cu_k[s], sequence.k_len, spec.kv_heads, kv_head, 1, element * spec.head_dim);
      tensors.v =
          heads_of(evicted.tensors.v, cu_k[s], sequence.k_len, spec.kv_heads, kv_head, 1, element * spec.head_dim_v);
      if (spec.sinks)
        tensors.sinks.assign(evicted.tensors.sinks.begin() + kv_head * ratio,
                             evicted.tensors.sinks.begin() + (kv_head + 1) * ratio);
      for (std::int64_t q = 0; q < sequence.q_len; ++q) {
        std::int64_t begin = 0, end = 0;
        for (std::int64_t i = 0; i < sequence.k_len; ++i) {
          if (!sees(spec.mask, sequence.q_offset + q, own[static_cast<std::size_t>(i)])) continue;
          if (end == 0) begin = i;
          end = i + 1;
        }
        row.spec.mask = {end == 0 ? -1 : end - 1 - begin, 0};
        row.batch = std::vector<Sequence>{{1, sequence.k_len, end - 1}};
        tensors.q =
            heads_of(evicted.tensors.q, cu_q[s] + q, 1, spec.heads, kv_head * ratio, ratio, element * spec.head_dim);
        const JobResult one = run(row, tensors);
        const std::int64_t at = (cu_q[s] + q) * spec.heads + kv_head * ratio;
        std::ranges::copy(one.out, result.out.begin() + at * spec.head_dim_v * element);
        std::ranges::copy(one.lse, result.lse.begin() + at);
      }
    }
  }
  return result;
}

void expect_right(const Evicted& evicted, const JobResult& result) {
  const AttentionSpec& spec = evicted.whole.spec;
  const auto element = size_of(spec.dtype);
  const auto number = [&](const std::vector<std::byte>& rows, std::int64_t at) {
    return static_cast<double>(load_element(rows.data() + static_cast<std::size_t>(at) * element, spec.dtype));
  };
  const std::vector<std::int64_t> cu_q = evicted.whole.batch.cu_q(), cu_k = evicted.whole.batch.cu_k();
  const double tolerance = spec.dtype == Dtype::kF32 ? 1e-5 : 2e-2;
  std::int64_t compared = 0;
  for (std::size_t s = 0; s < cu_q.size() - 1; ++s) {
    const Sequence& sequence = evicted.whole.batch.sequences[s];
    for (std::int64_t q = 0; q < sequence.q_len; ++q) {
      for (int head = 0; head < spec.heads; ++head) {
        const int kv_head = head / (spec.heads / spec.kv_heads);
        const auto own = evicted.positions->of(s, evicted.positions->heads() == 1 ? 0 : kv_head);
        std::vector<double> out(static_cast<std::size_t>(spec.head_dim_v));
        const std::int64_t row = (cu_q[s] + q) * spec.heads + head;
        double sum =
            spec.sinks ? std::exp(static_cast<double>(evicted.all.sinks[static_cast<std::size_t>(head)])) : 0.0;
        for (const std::int32_t position : own) {
          if (!sees(spec.mask, sequence.q_offset + q, position)) continue;
          const std::int64_t key = (cu_k[s] + position) * spec.kv_heads + kv_head;
          double x = 0.0;
          for (int d = 0; d < spec.head_dim; ++d) {
            x += number(evicted.all.q, row * spec.head_dim + d) * number(evicted.all.k, key * spec.head_dim + d);
          }
          x *= static_cast<double>(spec.softmax_scale);
          if (spec.softcap > 0.0F) {
            x = static_cast<double>(spec.softcap) * std::tanh(x / static_cast<double>(spec.softcap));
          }
          sum += std::exp(x);
          for (int d = 0; d < spec.head_dim_v; ++d) {
            out[static_cast<std::size_t>(d)] += std::exp(x) * number(evicted.all.v, key * spec.head_dim_v + d);
          }
        }
        const double lse = static_cast<double>(result.lse[static_cast<std::size_t>(row)]);
        if (sum == 0.0) {
          EXPECT_EQ(lse, -std::numeric_limits<double>::infinity());
        } else {
          EXPECT_NEAR(lse, std::log(sum), tolerance);
        }
        for (int d = 0; d < spec.head_dim_v; ++d) {
          const double expected = sum == 0.0 ? 0.0 : out[static_cast<std::size_t>(d)] / sum;
          ASSERT_NEAR(number(result.out, row * spec.head_dim_v + d), expected, tolerance)
              << s << ", " << q << ", " << head;
          ++compared;
        }
      }
    }
  }
  EXPECT_GT(compared, 0);
}

}  // namespace ringattn::testing
