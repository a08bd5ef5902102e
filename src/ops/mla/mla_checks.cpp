// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_checks.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/error.hpp"

namespace ringattn {

namespace {

// `callers`: MlaSpec says that the tensor to be multiplied is already in the latent space.
void check_matrices(std::string_view name, const GemmWeights& matrices, const MlaSpec& spec, int dim_n, bool callers) {
  if (matrices.data == nullptr) return;
  if (callers) {
    fail(ErrorCode::kUsage, fmt::format("{} is given", name),
         name == "w_uk" ? "the job's queries are in the latent space already" : "the job's O stays in the latent space",
         "Leave it out, or prepare a job with this GEMM.");
  }
  if (matrices.dtype != spec.dtype || matrices.heads != spec.heads || matrices.dim_n != dim_n ||
      matrices.dim_k != spec.latent_dim) {
    fail(ErrorCode::kUsage,
         fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(matrices.dtype), matrices.heads, matrices.dim_n,
                     matrices.dim_k),
         fmt::format("the job's is {} [{}, {}, {}]", dtype_name(spec.dtype), spec.heads, dim_n, spec.latent_dim),
         "A head's matrix maps latents to its keys or values.");
  }
  if (matrices.n_stride == 1 || matrices.k_stride == 1) return;
  fail(ErrorCode::kUsage,
       fmt::format("{} has strides {}, {} and {}", name, matrices.head_stride, matrices.n_stride, matrices.k_stride),
       "one of the last two is 1", "Give matrices with contiguous rows or columns.");
}

}  // namespace

void check_matrices(const GemmWeights& w_uk, const GemmWeights& w_uv, const MlaSpec& spec) {
  check_matrices("w_uk", w_uk, spec, spec.head_dim, spec.q_in_latent);
  check_matrices("w_uv", w_uv, spec, spec.head_dim_v, spec.out_in_latent);
}

}  // namespace ringattn
