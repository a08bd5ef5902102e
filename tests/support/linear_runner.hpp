// SPDX-License-Identifier: Apache-2.0
// Linear layers with random weights. Their kernels run whole, in blocks of rows, and in parts of K and N as several
// devices would run them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "kernels/linear/linear.hpp"

namespace ringattn::testing {

// Host memory of a layer and its input.
struct LinearData {
  struct Matrix {
    std::vector<std::byte> values;    // [N, K], as LinearMatrix::data
    std::vector<float> scales;        // [N], or [N, groups]
    std::vector<std::uint8_t> zeros;  // [N, groups]
    std::vector<std::byte> bias;      // [N]
  };

  LinearSpec spec;
  std::int64_t features = 0;  // K; of a part of the layer, fewer than the spec's
  std::int64_t rows = 0;
  std::vector<std::byte> x;  // [rows, K]
  Matrix matrices[2];

  std::int64_t groups() const { return features / kInt4Group; }
  std::int64_t weight_row_bytes() const;
  LinearWeights weights() const;
  TensorView x_view() const;
  void set_x(std::int64_t row, std::int64_t k, float value);
  void set_weight(int matrix, std::int64_t n, std::int64_t k, float value);  // kFloat
};

// About normal x, weights of size 1/√K.
LinearData linear_data(const LinearSpec& spec, std::int64_t rows, std::uint64_t seed);

// The columns [begin, end) of a layer.
LinearData columns_of(const LinearData& data, std::int64_t begin, std::int64_t end);

// The leaves' part of a row-parallel layer and of its input.
LinearData leaves_of(const LinearData& data, LeafRange leaves);

// Arrangements that must not change a bit.
struct LinearArrangement {
  int threads = 1;
  std::vector<std::int64_t> cuts;  // rows at which tasks begin, ascending
  std::int64_t gap = 0;            // elements between rows of x and of y
  std::int64_t y_gap = 0;          // more of them between rows of y
};

std::string describe(const LinearArrangement& arrangement);

// y: [rows, N]. Columns of y after the last are checked to be unchanged.
std::vector<std::byte> multiplied(const KernelRow<LinearSpec>& row, const LinearData& data,
                                  const LinearArrangement& arrangement = {});

// The same for a row-parallel layer on `devices` devices, each of which finishes a part of the rows.
std::vector<std::byte> multiplied_in_parts(const KernelRow<LinearSpec>& row, const LinearData& data, int devices);

// The first element that differs, or "".
std::string first_difference(const LinearData& data, const std::vector<std::byte>& y,
                             const std::vector<std::byte>& expected);
// Compares each row with the fp64 oracle. The first element whose error is too large, or "".
std::string first_inaccuracy(const LinearData& data, const std::vector<std::byte>& y);

}  // namespace ringattn::testing
