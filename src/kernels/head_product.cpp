// SPDX-License-Identifier: Apache-2.0
#include "kernels/head_product.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace ringattn {

std::string describe(const HeadProductSpec& spec) {
  return fmt::format("{}, rows of {} to {}", dtype_name(spec.dtype), spec.inner, spec.outer);
}

void check_head_product(const HeadProductSpec& spec, const HeadProductTask& task) {
  const HeadMatrices& weights = task.weights;
  const TensorView& rows = task.rows;
  const MutableTensorView& out = task.out;
  const auto refuse = [&](const std::string& what) {
    fail(ErrorCode::kInternal, what,
         fmt::format("the kernel was made for {}, and the task has matrices of {} heads", describe(spec),
                     weights.heads));
  };
  if (weights.dtype != spec.dtype || weights.outer != spec.outer || weights.inner != spec.inner ||
      (weights.inner_stride != 1 && weights.outer_stride != 1)) {
    refuse(fmt::format("matrices of a head product are {} [{}, {}, {}] with strides {} and {}",
                       dtype_name(weights.dtype), weights.heads, weights.outer, weights.inner, weights.outer_stride,
                       weights.inner_stride));
  }
  if (rows.dtype != spec.dtype || rows.dim != spec.inner || (rows.heads != weights.heads && rows.heads != 1)) {
    refuse(fmt::format("rows of a head product are {} [{}, {}, {}]", dtype_name(rows.dtype), rows.tokens, rows.heads,
                       rows.dim));
  }
  if (out.dtype != spec.dtype || out.dim != spec.outer || out.heads != weights.heads || out.tokens != rows.tokens) {
    refuse(fmt::format("out of a head product is {} [{}, {}, {}], of {} rows", dtype_name(out.dtype), out.tokens,
                       out.heads, out.dim, rows.tokens));
  }
}

}  // namespace ringattn
