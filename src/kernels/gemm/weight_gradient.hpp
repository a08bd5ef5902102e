// SPDX-License-Identifier: Apache-2.0
// Gradients of the matrices of a batched GEMM (batched_gemm.hpp) whose rows all heads share, such as the expansion of a
// latent to keys or values:
//
//   dw[head, n, k] = Σ_tokens dout[token, head, n] · rows[token, k]
//
// in fp32, in units of tokens (kernels/common/token_units.hpp). An element's bits depend on the batch's rows and its
// head's dout alone. NaN and ∞ propagate as in fp32 arithmetic.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/tensor.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

class WeightGradientKernel;

struct WeightGradientSpec {
  using Kernel = WeightGradientKernel;

  Dtype dtype = Dtype::kBf16;  // of dout and rows
  int dim_n = 128;             // dims of a row of dout
  int dim_k = 512;             // dims of a row

  bool operator==(const WeightGradientSpec&) const = default;
};

// One line that says what a spec needs, e.g. "gradient of bf16 matrices 128 x 512".
std::string describe(const WeightGradientSpec& spec);

// Memory behind views must live until the stream has completed the task.
struct WeightGradientTask {
  TensorView dout;                        // [tokens, heads, dim_n]
  TensorView rows;                        // [tokens, 1, dim_k]
  std::span<const std::int64_t> lengths;  // of the packed sequences, together `tokens`; read before the call returns
  float* dw = nullptr;                    // [heads, dim_n, dim_k] in the kernel's memory kind, written
};

// A kernel for one spec on one backend.
class WeightGradientKernel {
 public:
  virtual ~WeightGradientKernel() = default;

  // Enqueues the task on `stream` (device) or runs it (host).
  virtual void compute(const WeightGradientTask& task, Stream stream, const Progress& progress) = 0;
};

// Dims that kernels with vectors of eight elements do not support, one string each (KernelRow::missing).
std::vector<std::string> vectorized_weight_gradient_missing(const WeightGradientSpec& spec);

// Throws kInternal if a task does not match the spec.
void check_weight_gradient(const WeightGradientSpec& spec, const WeightGradientTask& task);

}  // namespace ringattn
