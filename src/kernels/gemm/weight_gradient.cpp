// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/weight_gradient.hpp"

#include <fmt/format.h>

#include <numeric>
#include <string_view>

#include "base/error.hpp"

namespace ringattn {

namespace {

void check_view(std::string_view name, const TensorView& view, Dtype dtype, std::int64_t tokens, std::int64_t heads,
                std::int64_t dim) {
  if (view.dtype == dtype && view.tokens == tokens && view.heads == heads && view.dim == dim) return;
  fail(ErrorCode::kInternal,
       fmt::format("{} of a weight gradient is {} [{}, {}, {}]", name, dtype_name(view.dtype), view.tokens, view.heads,
                   view.dim),
       fmt::format("{} [{}, {}, {}] was expected", dtype_name(dtype), tokens, heads, dim));
}

}  // namespace

std::string describe(const WeightGradientSpec& spec) {
  return fmt::format("gradient of {} matrices {} x {}", dtype_name(spec.dtype), spec.dim_n, spec.dim_k);
}

std::vector<std::string> vectorized_weight_gradient_missing(const WeightGradientSpec& spec) {
  std::vector<std::string> missing;
  const auto require = [&](std::string_view name, int dim) {
    if (dim < 8 || dim % 8 != 0) missing.push_back(fmt::format("{} {} (supported: multiples of 8)", name, dim));
  };
  require("n", spec.dim_n);
  require("k", spec.dim_k);
  return missing;
}

void check_weight_gradient(const WeightGradientSpec& spec, const WeightGradientTask& task) {
  const std::int64_t tokens = std::accumulate(task.lengths.begin(), task.lengths.end(), std::int64_t{0});
  check_view("dout", task.dout, spec.dtype, tokens, task.dout.heads, spec.dim_n);
  check_view("rows", task.rows, spec.dtype, tokens, 1, spec.dim_k);
}

}  // namespace ringattn
