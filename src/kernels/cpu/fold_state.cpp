// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/fold_state.hpp"

#include <cmath>
#include <limits>

namespace ringattn::cpu {

namespace {

// Which NaN an operation on two of them gives is the compiler's choice: every NaN that leaves is the same one.
float one_nan(float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; }

// out ← o · scale / l, one rounding to the element's type.
template <typename Element, typename Round>
void write_row(const float* o, int count, float scale, float l, std::byte* out, Round round) {
  auto* elements = reinterpret_cast<Element*>(out);
  for (int i = 0; i < count; ++i) elements[i] = round(one_nan(o[i] * scale / l));
}

}  // namespace

float finish_row(const FoldSpec& spec, float m, float l, const float* o, const float* sink, std::byte* out) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double reference = m;
  double sum = l;
  float scale = 1.0F;
  if (sink != nullptr) {
    // The sink is one more score, without a value.
    const double logit = *sink;
    reference = logit > reference || std::isnan(logit) ? logit : reference;
    const double finite = reference == -kInfinity ? 0.0 : reference;
    const double weight = std::exp(static_cast<double>(m) - finite);
    sum = sum * weight + std::exp(logit - finite);
    scale = static_cast<float>(weight);
  }
  // Nothing was seen: O is 0, and log 0 is −∞.
  const float divisor = sum == 0.0 ? 1.0F : static_cast<float>(sum);
  switch (spec.dtype) {
    case Dtype::kF32:
      write_row<float>(o, spec.head_dim_v, scale, divisor, out, [](float x) { return x; });
      break;
    case Dtype::kBf16:
      write_row<std::uint16_t>(o, spec.head_dim_v, scale, divisor, out, float_to_bf16);
      break;
    case Dtype::kF16:
      write_row<std::uint16_t>(o, spec.head_dim_v, scale, divisor, out, float_to_f16);
      break;
  }
  return one_nan(static_cast<float>(reference + std::log(sum)));
}

}  // namespace ringattn::cpu
