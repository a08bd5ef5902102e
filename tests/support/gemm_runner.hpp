// SPDX-License-Identifier: Apache-2.0
// Runs a batched GEMM kernel over random inputs in arrangements that must not change a bit, and checks the result.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"

namespace ringattn::testing {

struct GemmInputs {
  BatchedGemmSpec spec;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  bool shared = false;           // all heads share a row
  std::vector<std::byte> left;   // [rows, heads or 1, dim_k]
  std::vector<std::byte> right;  // [heads, dim_n, dim_k]

  std::int64_t row_heads() const { return shared ? 1 : heads; }
  float left_at(std::int64_t row, std::int64_t head, std::int64_t i) const {
    return load(left, (row * row_heads() + (shared ? 0 : head)) * spec.dim_k + i);
  }
  float right_at(std::int64_t head, std::int64_t o, std::int64_t i) const {
    return load(right, (head * spec.dim_n + o) * spec.dim_k + i);
  }
  void set_left(std::int64_t row, std::int64_t head, std::int64_t i, float value) {
    store(left, (row * row_heads() + (shared ? 0 : head)) * spec.dim_k + i, value);
  }
  void set_right(std::int64_t head, std::int64_t o, std::int64_t i, float value) {
    store(right, (head * spec.dim_n + o) * spec.dim_k + i, value);
  }

 private:
  float load(const std::vector<std::byte>& from, std::int64_t index) const {
    return load_element(from.data() + static_cast<std::size_t>(index) * size_of(spec.dtype), spec.dtype);
  }
  void store(std::vector<std::byte>& to, std::int64_t index, float value) const {
    store_element(to.data() + static_cast<std::size_t>(index) * size_of(spec.dtype), spec.dtype, value);
  }
};

// `next()` makes the elements.
template <typename Next>
GemmInputs gemm_inputs(const BatchedGemmSpec& spec, std::int64_t rows, std::int64_t heads, bool shared, Next next) {
  GemmInputs inputs{spec, rows, heads, shared, {}, {}};
  inputs.left.resize(static_cast<std::size_t>(rows * inputs.row_heads() * spec.dim_k) * size_of(spec.dtype));
  inputs.right.resize(static_cast<std::size_t>(heads * spec.dim_n * spec.dim_k) * size_of(spec.dtype));
  for (std::vector<std::byte>* elements : {&inputs.left, &inputs.right}) {
    for (std::size_t at = 0; at < elements->size(); at += size_of(spec.dtype)) {
      store_element(elements->data() + at, spec.dtype, next());
    }
  }
  return inputs;
}

// Standard normal elements, the same for the same seed.
GemmInputs normal_gemm_inputs(const BatchedGemmSpec& spec, std::int64_t rows, std::int64_t heads, bool shared,
                              std::uint64_t seed);

// Arrangements that must not change a bit.
struct GemmLayout {
  int threads = 1;
  std::vector<std::int64_t> cuts{};  // rows at which a new task begins, ascending
  bool head_by_head = false;         // each in a task of its own
  bool transposed = false;           // matrices lie [heads, dim_k, dim_n]
  std::int64_t gap = 0;              // elements after each head of rows, matrices and out
  std::int64_t shift = 0;            // elements before all of rows, matrices and out: what isn't aligned
  std::int64_t weight_gap = 0;       // elements after each row of a matrix
};

std::string describe(const GemmLayout& layout);

// out, [rows, heads, dim_n] of the dtype, dense. The test fails if anything is written outside it.
std::vector<std::byte> multiplied(const BatchedGemmRow& row, const GemmInputs& inputs, const GemmLayout& layout = {});

// The same by `multiply`, on the backend's own stream. It sets the number of threads itself.
using Multiply = std::function<void(const BatchedGemmTask& task)>;
std::vector<std::byte> multiplied_by(const Multiply& multiply, Backend& backend, const GemmInputs& inputs,
                                     const GemmLayout& layout = {});

// The first element of out that differs, and the number of such elements; empty if there are none.
std::string first_difference(const GemmInputs& inputs, const std::vector<std::byte>& out,
                             const std::vector<std::byte>& expected);

// The error is at most one rounding to the dtype plus the rounding error of an fp32 sum of that many terms. NaN and ∞
// are where fp64 has them. Counts as a check.
void expect_accurate_gemm(const GemmInputs& inputs, const std::vector<std::byte>& out);

}  // namespace ringattn::testing
