// SPDX-License-Identifier: Apache-2.0
// The products around a latent: the rows of each head times that head's matrix. Expanding a latent to keys or values,
// absorbing a matrix into queries, and taking outputs back from the latent are all this one op.
//
//   out[row, head, o] = round(Σ_i rows[row, head, i] · weights[head, o, i])
//
// The sum is fp32, in an order that the kernel fixes for (dtype, dim_k) alone, and is rounded once. So an element's
// bits depend on its row and on its head's matrix, never on how many rows or heads are multiplied at a time, or where.
// NaN and ∞ come out where fp32 arithmetic makes them; a NaN that leaves a kernel is always the same one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.hpp"
#include "base/tensor.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

class BatchedGemmKernel;

struct BatchedGemmSpec {
  using Kernel = BatchedGemmKernel;  // what computes it (registry.hpp)

  Dtype dtype = Dtype::kBf16;  // of rows, weights and out; sums are fp32
  int dim_k = 512;             // numbers of a row that are summed over
  int dim_n = 128;             // numbers of a row of out

  bool operator==(const BatchedGemmSpec&) const = default;
};

// One line that says what a spec needs, e.g. "bf16, rows of 512 to 128".
std::string describe(const BatchedGemmSpec& spec);

// A matrix for each head, [heads, dim_n, dim_k] in the order that the strides say. Strides count elements; one of
// n_stride and k_stride is 1, so a matrix may be read either way round.
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
  // The same matrices the other way round, [heads, dim_k, dim_n].
  GemmWeights transposed() const { return {data, dtype, heads, dim_k, dim_n, head_stride, k_stride, n_stride}; }
};

// Memory behind the views lives until the stream has passed the task. `out` overlaps nothing else.
struct BatchedGemmTask {
  TensorView rows;  // [rows, heads, dim_k], or [rows, 1, dim_k]: all heads share a row
  GemmWeights weights;
  MutableTensorView out;  // [rows, heads, dim_n]
};

// What every kernel checks of a task. Throws kInternal where views don't fit the spec or each other.
void check_batched_gemm(const BatchedGemmSpec& spec, const BatchedGemmTask& task);

// One kernel for one BatchedGemmSpec on one backend.
class BatchedGemmKernel {
 public:
  virtual ~BatchedGemmKernel() = default;

  // Bytes that reserve() allocates for tasks of so many heads: all that the kernel needs.
  virtual std::size_t scratch_bytes(std::int64_t heads) const = 0;
  // Called before the first multiply(), so that nothing is allocated later.
  virtual void reserve(std::int64_t heads) = 0;
  // Enqueues the task on `stream` (device) or does it (host).
  virtual void multiply(const BatchedGemmTask& task, Stream stream, const Progress& progress) = 0;
};

}  // namespace ringattn
