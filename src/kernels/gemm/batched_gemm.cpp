// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/batched_gemm.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace ringattn {

std::string describe(const BatchedGemmSpec& spec) {
  return fmt::format("{}, k {}, n {}", dtype_name(spec.dtype), spec.dim_k, spec.dim_n);
}

void check_batched_gemm(const BatchedGemmSpec& spec, const BatchedGemmTask& task) {
  const GemmWeights& weights = task.weights;
  const TensorView& rows = task.rows;
  const MutableTensorView& out = task.out;
  const auto refuse = [&](const std::string& what) {
    fail(ErrorCode::kInternal, what,
         fmt::format("the kernel was made for {}, and the task has matrices of {} heads", describe(spec),
                     weights.heads));
  };
  if (weights.dtype != spec.dtype || weights.dim_n != spec.dim_n || weights.dim_k != spec.dim_k ||
      (weights.k_stride != 1 && weights.n_stride != 1)) {
    refuse(fmt::format("weights of a batched GEMM are {} [{}, {}, {}] with strides {} and {}",
                       dtype_name(weights.dtype), weights.heads, weights.dim_n, weights.dim_k, weights.n_stride,
                       weights.k_stride));
  }
  if (rows.dtype != spec.dtype || rows.dim != spec.dim_k || (rows.heads != weights.heads && rows.heads != 1)) {
    refuse(fmt::format("rows of a batched GEMM are {} [{}, {}, {}]", dtype_name(rows.dtype), rows.tokens, rows.heads,
                       rows.dim));
  }
  if (out.dtype != spec.dtype || out.dim != spec.dim_n || out.heads != weights.heads || out.tokens != rows.tokens) {
    refuse(fmt::format("out of a batched GEMM is {} [{}, {}, {}], of {} rows", dtype_name(out.dtype), out.tokens,
                       out.heads, out.dim, rows.tokens));
  }
}

}  // namespace ringattn
