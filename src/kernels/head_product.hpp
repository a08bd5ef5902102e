// SPDX-License-Identifier: Apache-2.0
// The products around a latent: the rows of each head times that head's matrix. Expanding a latent to keys or values,
// absorbing a matrix into queries, and taking outputs back from the latent are all this one op.
//
//   out[row, head, o] = round(Σ_i rows[row, head, i] · weights[head, o, i])
//
// The sum is fp32, in an order that the kernel fixes for (dtype, inner) alone, and is rounded once. So an element's
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

class HeadProductKernel;

struct HeadProductSpec {
  using Kernel = HeadProductKernel;  // what computes it (registry.hpp)

  Dtype dtype = Dtype::kBf16;  // of rows, weights and out; sums are fp32
  int inner = 512;             // numbers of a row that are summed over
  int outer = 128;             // numbers of a row of out

  bool operator==(const HeadProductSpec&) const = default;
};

// One line that says what a spec needs, e.g. "bf16, rows of 512 to 128".
std::string describe(const HeadProductSpec& spec);

// A matrix for each head, [heads, outer, inner] in the order that the strides say. Strides count elements; one of
// outer_stride and inner_stride is 1, so a matrix may be read either way round.
struct HeadMatrices {
  const void* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  std::int64_t heads = 0;
  std::int64_t outer = 0;
  std::int64_t inner = 0;
  std::int64_t head_stride = 0;
  std::int64_t outer_stride = 0;
  std::int64_t inner_stride = 0;

  const std::byte* at(std::int64_t head) const {
    return static_cast<const std::byte*>(data) + head * head_stride * static_cast<std::int64_t>(size_of(dtype));
  }
  // The matrices of heads [first, first + count).
  HeadMatrices slice(std::int64_t first, std::int64_t count) const {
    HeadMatrices some = *this;
    some.data = at(first);
    some.heads = count;
    return some;
  }
  // The same matrices the other way round, [heads, inner, outer].
  HeadMatrices transposed() const {
    return {data, dtype, heads, inner, outer, head_stride, inner_stride, outer_stride};
  }
};

// Memory behind the views lives until the stream has passed the task. `out` overlaps nothing else.
struct HeadProductTask {
  TensorView rows;  // [rows, heads, inner], or [rows, 1, inner]: all heads share a row
  HeadMatrices weights;
  MutableTensorView out;  // [rows, heads, outer]
};

// What every kernel checks of a task. Throws kInternal where views don't fit the spec or each other.
void check_head_product(const HeadProductSpec& spec, const HeadProductTask& task);

// One kernel for one HeadProductSpec on one backend.
class HeadProductKernel {
 public:
  virtual ~HeadProductKernel() = default;

  // Bytes that reserve() allocates for tasks of so many heads: all that the kernel needs.
  virtual std::size_t scratch_bytes(std::int64_t heads) const = 0;
  // Called before the first multiply(), so that nothing is allocated later.
  virtual void reserve(std::int64_t heads) = 0;
  // Enqueues the task on `stream` (device) or does it (host).
  virtual void multiply(const HeadProductTask& task, Stream stream, const Progress& progress) = 0;
};

}  // namespace ringattn
