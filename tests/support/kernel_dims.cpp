// SPDX-License-Identifier: Apache-2.0
#include "tests/support/kernel_dims.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "tests/support/attention_inputs.hpp"

namespace ringattn::testing {

namespace {

struct Pair {
  int head_dim;
  int head_dim_v;
};

// The first pair that a kernel can do is its usual one, and the first with two numbers its unequal one.
constexpr Pair kPairs[] = {{64, 64}, {128, 128}, {96, 96},  {256, 256}, {40, 24},  {72, 72},
                           {8, 8},   {192, 128}, {64, 136}, {576, 512}, {512, 512}};
constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kF16, Dtype::kF32};

// CPU kernels run the same code for every head dim, and the others have all of their columns: these are for kernels
// that are compiled for single head dims, and {512, 512} for sm80_simt's wide form.
bool is_for(const AttentionRow& row, const Pair& pair) {
  return row.backend != "cpu" || !(pair.head_dim == 96 || pair.head_dim == 192 || pair.head_dim == 512);
}

bool is_equal(const Dims& dims) { return dims.head_dim == dims.head_dim_v; }

// The first of each dtype for which `wanted` holds.
template <typename Wanted>
std::vector<Dims> first_of_each_dtype(const AttentionRow& row, Wanted wanted) {
  std::vector<Dims> chosen;
  for (const Dims& dims : all_dims(row)) {
    if (wanted(dims) && (chosen.empty() || chosen.back().dtype != dims.dtype)) chosen.push_back(dims);
  }
  return chosen;
}

}  // namespace

std::vector<Dims> all_dims(const AttentionRow& row) {
  std::vector<Dims> able;
  for (const Dtype dtype : kDtypes) {
    for (const Pair& pair : kPairs) {
      const Dims dims{dtype, pair.head_dim, pair.head_dim_v};
      if (is_for(row, pair) && row.missing(make_spec(dims, 4, 2, {-1, 0})).empty()) able.push_back(dims);
    }
  }
  if (able.empty()) throw std::logic_error(fmt::format("kernel {} can do none of the tests' head dims", row.name));
  return able;
}

std::vector<Dims> usual_dims(const AttentionRow& row) { return first_of_each_dtype(row, is_equal); }

std::optional<Dims> usual_dims(const AttentionRow& row, Dtype dtype) {
  for (const Dims& dims : usual_dims(row)) {
    if (dims.dtype == dtype) return dims;
  }
  return std::nullopt;
}

std::vector<Dims> unequal_dims(const AttentionRow& row) {
  return first_of_each_dtype(row, [](const Dims& dims) { return !is_equal(dims); });
}

std::vector<Dims> varied_dims(const AttentionRow& row) {
  std::vector<Dims> varied = usual_dims(row);
  const std::vector<Dims> unequal = unequal_dims(row);
  varied.insert(varied.end(), unequal.begin(), unequal.end());
  const Dtype first = all_dims(row).front().dtype;
  for (const Dims& dims : all_dims(row)) {
    if (dims.dtype == first && std::find(varied.begin(), varied.end(), dims) == varied.end()) varied.push_back(dims);
  }
  return varied;
}

AttentionSpec make_spec(const Dims& dims, int heads, int kv_heads, const Mask& mask) {
  return make_spec(dims.dtype, heads, kv_heads, dims.head_dim, mask, dims.head_dim_v);
}

}  // namespace ringattn::testing
