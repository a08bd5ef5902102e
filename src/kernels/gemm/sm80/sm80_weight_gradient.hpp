// SPDX-License-Identifier: Apache-2.0
// The kernels `sm80_weight_gradient`, by mma.sync, and `sm80_weight_gradient_simt`, fp32, sm_80 and later. A CTA
// computes a tile of one head's matrix over all units. Tokens are K of the product.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.hpp"
#include "kernels/common/token_units.hpp"
#include "kernels/gemm/cuda/gemm_params.hpp"
#include "kernels/gemm/weight_gradient.hpp"

namespace ringattn::sm80 {

std::vector<std::string> weight_gradient_missing(const WeightGradientSpec& spec);
std::vector<std::string> weight_gradient_simt_missing(const WeightGradientSpec& spec);

// The kernel of the spec's dtype. `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<WeightGradientKernel> make_weight_gradient(const WeightGradientSpec& spec, Backend& backend);

// The compiled kernels (weight_gradient.cu, weight_gradient_simt.cu).

inline constexpr int kUnitsPerLaunch = 64;  // passed as kernel arguments

struct WeightGradientParams {
  TokenUnit units[kUnitsPerLaunch];
  std::int32_t unit_count;
  bool continues;                      // adds to dw; else the first unit is stored
  cuda::GemmOperand<const char> dout;  // [tokens, heads, dim_n]
  cuda::GemmOperand<const char> rows;  // [tokens, dim_k]
  std::int32_t dim_n;
  std::int32_t dim_k;
  float* dw;  // [heads, dim_n, dim_k]
};

// Loads the kernel on the current device.
void load_weight_gradient(Dtype dtype);
void launch_weight_gradient(const WeightGradientParams& params, Dtype dtype, Stream stream);
// fp32
void load_weight_gradient_simt();
void launch_weight_gradient_simt(const WeightGradientParams& params, Stream stream);

}  // namespace ringattn::sm80
