// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_checks.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/error.hpp"

namespace ringattn {

namespace {

// `callers`: what the matrix multiplies is in the latent, by LatentSpec.
void check_matrices(std::string_view name, const HeadMatrices& matrices, const LatentSpec& spec, int outer,
                    bool callers) {
  if (matrices.data == nullptr) return;
  if (callers) {
    fail(ErrorCode::kUsage, fmt::format("{} is given", name),
         name == "w_uk" ? "the job's queries are in the latent already" : "the job's O stays in the latent",
         "Leave it out, or prepare a job that has the product.");
  }
  if (matrices.dtype != spec.dtype || matrices.heads != spec.heads || matrices.outer != outer ||
      matrices.inner != spec.latent_dim) {
    fail(ErrorCode::kUsage,
         fmt::format("{} is {} [{}, {}, {}]", name, dtype_name(matrices.dtype), matrices.heads, matrices.outer,
                     matrices.inner),
         fmt::format("the job's is {} [{}, {}, {}]", dtype_name(spec.dtype), spec.heads, outer, spec.latent_dim),
         "A head's matrix takes its latents to its keys or values.");
  }
  if (matrices.outer_stride == 1 || matrices.inner_stride == 1) return;
  fail(ErrorCode::kUsage,
       fmt::format("{} has strides {}, {} and {}", name, matrices.head_stride, matrices.outer_stride,
                   matrices.inner_stride),
       "one of the last two is 1", "Give matrices whose rows or columns lie without gaps.");
}

}  // namespace

void check_matrices(const HeadMatrices& w_uk, const HeadMatrices& w_uv, const LatentSpec& spec) {
  check_matrices("w_uk", w_uk, spec, spec.head_dim, spec.q_in_latent);
  check_matrices("w_uv", w_uv, spec, spec.head_dim_v, spec.out_in_latent);
}

}  // namespace ringattn
