// SPDX-License-Identifier: Apache-2.0
// Batched GEMM over heads: each head's rows times that head's weight matrix. MLA uses it to expand a latent to keys or
// values, to absorb w_uk into queries, and to project outputs from the latent.
//
//   out[row, head, o] = round(Σ_i rows[row, head, i] · weights[head, o, i])
//
// The sum is fp32, in an order that the kernel fixes for (dtype, dim_k), and is rounded once. So an element's bits
// depend only on its row and its head's matrix, not on how many rows or heads are multiplied at a time, or where. NaN
// and ∞ propagate as in fp32 arithmetic. Output NaNs have one canonical bit pattern.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.hpp"
#include "base/tensor.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

class BatchedGemmKernel;

struct BatchedGemmSpec {
  using Kernel = BatchedGemmKernel;  // the interface that computes this spec (common/registry.hpp)

  Dtype dtype = Dtype::kBf16;  // dtype of rows, weights and out; sums are fp32
  int dim_k = 512;             // K: the dim that is summed over
  int dim_n = 128;             // N: the dim of a row of out

  bool operator==(const BatchedGemmSpec&) const = default;
};

// One line that says what a spec needs, e.g. "bf16, rows of 512 to 128".
std::string describe(const BatchedGemmSpec& spec);

// A weight matrix per head: [heads, dim_n, dim_k] with element strides. n_stride or k_stride is 1, so a matrix may be
// read transposed or not.
struct GemmWeights {
  const void* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  std::int64_t heads = 0;
  std::int64_t dim_n = 0;
  std::int64_t dim_k = 0;
  std::int64_t head_stride = 0;
  std::int64_t n_stride = 0;
  std::int64_t k_stride = 0;

  const std::byte* at(std::int64_t head) const {
    return static_cast<const std::byte*>(data) + head * head_stride * static_cast<std::int64_t>(size_of(dtype));
  }
  // The matrices of heads [first, first + count).
  GemmWeights slice(std::int64_t first, std::int64_t count) const {
    GemmWeights some = *this;
    some.data = at(first);
    some.heads = count;
    return some;
  }
  // The transposed matrices, [heads, dim_k, dim_n].
  GemmWeights transposed() const { return {data, dtype, heads, dim_k, dim_n, head_stride, k_stride, n_stride}; }
};

// The views' memory must live until the stream has completed the task. `out` must not overlap the inputs.
struct BatchedGemmTask {
  TensorView rows;  // [rows, heads, dim_k], or [rows, 1, dim_k]: one row for all heads
  GemmWeights weights;
  MutableTensorView out;  // [rows, heads, dim_n]
};

// Validation of a task, shared by all kernels. Throws kInternal if views do not match the spec or each other.
void check_batched_gemm(const BatchedGemmSpec& spec, const BatchedGemmTask& task);

// A batched GEMM kernel for one BatchedGemmSpec on one backend.
class BatchedGemmKernel {
 public:
  virtual ~BatchedGemmKernel() = default;

  // Bytes that reserve() allocates for tasks of up to `heads` heads: all memory that the kernel needs.
  virtual std::size_t scratch_bytes(std::int64_t heads) const = 0;
  // Called before the first multiply(), so that multiply() never allocates.
  virtual void reserve(std::int64_t heads) = 0;
  // Enqueues the task on `stream` (device) or runs it (host).
  virtual void multiply(const BatchedGemmTask& task, Stream stream, const Progress& progress) = 0;
};

}  // namespace ringattn
