// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_checks.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace ringattn {

void check_matrices(std::string_view name, const HeadMatrices& matrices, const LatentSpec& spec, int outer) {
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

}  // namespace ringattn
