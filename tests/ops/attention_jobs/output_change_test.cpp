// SPDX-License-Identifier: Apache-2.0
// What another cache does to O, against attention by its definition.
#include "ops/attention_jobs/output_change.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/attention/oracle.hpp"

namespace ringattn {
namespace {

constexpr std::int64_t kTokens = 37;

Job job() { return {make_spec(Dtype::kBf16, 4, 2, 16, {-1, 0}), uniform_batch(2, kTokens, kTokens)}; }

struct Rows {
  std::vector<std::byte> bytes;
  MutableTensorView view;
};

Rows rows_of(const JobInput& input, SyntheticTensor tensor, int heads, std::int64_t sequence) {
  Rows rows;
  rows.bytes.resize(static_cast<std::size_t>(kTokens * heads * 16) * 2);
  rows.view = dense_view(static_cast<void*>(rows.bytes.data()), Dtype::kBf16, kTokens, heads, 16);
  const PackedRun run{sequence * kTokens, (sequence + 1) * kTokens};
  input.read(tensor, {&run, 1}, rows.view, 1);
  return rows;
}

TEST(OutputChange, IsNoneOfTheSameCache) {
  const JobInput input = JobInput::synthetic(job(), 7);
  const OutputChange change = output_change(input, input, 11, 1);
  EXPECT_EQ(change.rows, 11);
  EXPECT_EQ(change.relative_error, 0.0);
  EXPECT_EQ(change.greatest, 0.0);
  EXPECT_EQ(change.greatest_lse, 0.0);
  EXPECT_EQ(change.emptied, 0);
}

TEST(OutputChange, IsThatOfTheDefinition) {
  const JobInput before = JobInput::synthetic(job(), 7);
  const JobInput after = JobInput::synthetic(job(), 8);
  const OutputChange change = output_change(before, after, 1'000'000, 1);
  EXPECT_EQ(change.rows, 2 * kTokens * 4);
  double greatest = 0.0, greatest_lse = 0.0, of_change = 0.0, of_out = 0.0;
  for (const std::int64_t sequence : {0, 1}) {
    const Rows q = rows_of(before, SyntheticTensor::kQ, 4, sequence);
    std::vector<double> out[2], lse[2];
    for (int i = 0; i < 2; ++i) {
      const JobInput& cache = i == 0 ? before : after;
      const Rows k = rows_of(cache, SyntheticTensor::kK, 2, sequence);
      const Rows v = rows_of(cache, SyntheticTensor::kV, 2, sequence);
      oracle_attention(job().spec, q.view, k.view, v.view, 0, nullptr, out[i], lse[i]);
    }
    for (std::size_t i = 0; i < out[0].size(); ++i) {
      greatest = std::max(greatest, std::abs(out[1][i] - out[0][i]));
      of_change += (out[1][i] - out[0][i]) * (out[1][i] - out[0][i]);
      of_out += out[0][i] * out[0][i];
    }
    for (std::size_t i = 0; i < lse[0].size(); ++i) {
      greatest_lse = std::max(greatest_lse, std::abs(lse[1][i] - lse[0][i]));
    }
  }
  EXPECT_GT(greatest, 0.0);
  EXPECT_DOUBLE_EQ(change.greatest, greatest);
  EXPECT_DOUBLE_EQ(change.greatest_lse, greatest_lse);
  // The sums run over the same numbers in another order.
  EXPECT_NEAR(change.relative_error, std::sqrt(of_change / of_out), 1e-12);
}

}  // namespace
}  // namespace ringattn
