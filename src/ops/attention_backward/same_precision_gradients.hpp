// SPDX-License-Identifier: Apache-2.0
// The same-precision reference: rows of dQ, dK and dV as a straightforward fp32 program would compute them, with P and
// dS rounded to the dtype of the inputs. Its error bounds the allowed error of kernels.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "kernels/attention_backward/backward_oracle.hpp"
#include "ops/attention_jobs/same_precision_row.hpp"

namespace ringattn {

// P and dS of a pair that the mask lets through.
struct PairGradient {
  float p = 0.0F;
  float ds = 0.0F;
};

inline PairGradient pair_gradient(const AttentionSpec& spec, std::span<const float> q, std::span<const float> k,
                                  std::span<const float> dout, std::span<const float> v, const OracleRowStats& stats) {
  float s = 0.0F;
  for (std::size_t i = 0; i < q.size(); ++i) s += q[i] * k[i];
  s *= spec.softmax_scale;
  float slope = 1.0F;
  if (spec.softcap > 0.0F) {
    const float t = std::tanh(s / spec.softcap);
    s = spec.softcap * t;
    slope = 1.0F - t * t;
  }
  float dp = 0.0F;
  for (std::size_t i = 0; i < dout.size(); ++i) dp += dout[i] * v[i];
  // As in kernels: P is 0 if the LSE is −∞, which a row with a finite score never has.
  const bool none = stats.lse == -std::numeric_limits<double>::infinity();
  const float p = std::exp(s - (none ? 0.0F : static_cast<float>(stats.lse)));
  return {rounded(spec.dtype, p), rounded(spec.dtype, p * (dp - static_cast<float>(stats.delta)) * slope)};
}

// A sum of vectors. Runs of 128 are summed before they are added, so that the error doesn't grow with the length.
class RunSum {
 public:
  explicit RunSum(std::size_t dim) : sum_(dim, 0.0F), run_(dim, 0.0F) {}

  void add(float weight, std::span<const float> row) {
    for (std::size_t i = 0; i < run_.size(); ++i) run_[i] += weight * row[i];
    if (++rows_ == kRunRows) close();
  }
  // The sum times `scale`, rounded to the dtype.
  std::vector<float> finish(Dtype dtype, float scale) {
    close();
    std::vector<float> result;
    for (const float value : sum_) result.push_back(rounded(dtype, value * scale));
    return result;
  }

 private:
  static constexpr int kRunRows = 128;

  void close() {
    for (std::size_t i = 0; i < sum_.size(); ++i) sum_[i] += std::exchange(run_[i], 0.0F);
    rows_ = 0;
  }

  std::vector<float> sum_;
  std::vector<float> run_;
  int rows_ = 0;
};

}  // namespace ringattn
