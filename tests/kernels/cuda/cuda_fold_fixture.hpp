// SPDX-License-Identifier: Apache-2.0
// The kernels of the cuda backend, and what they fold: a test fixture.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "tests/kernels/kernel_row_test.hpp"

namespace ringattn::testing {

inline constexpr Dims kDims[] = {{Dtype::kBf16, 64, 64},   {Dtype::kBf16, 96, 96},   {Dtype::kBf16, 128, 128},
                                 {Dtype::kBf16, 192, 128}, {Dtype::kBf16, 256, 256}, {Dtype::kF16, 64, 64},
                                 {Dtype::kF16, 96, 96},    {Dtype::kF16, 128, 128},  {Dtype::kF16, 192, 128},
                                 {Dtype::kF16, 256, 256},  {Dtype::kF32, 72, 40}};

inline std::vector<FoldRow> cuda_rows() {
  std::vector<FoldRow> rows;
  for (const FoldRow& row : kernel_table<FoldSpec>()) {
    if (row.backend == "cuda") rows.push_back(row);
  }
  return rows;
}

// Whether no element is as it was before the fold: NaN, which finite inputs don't give.
inline bool all_written(const FoldResult& result, Dtype dtype) {
  const auto nan = [](float x) { return std::isnan(x); };
  for (std::size_t at = 0; at < result.out.size(); at += size_of(dtype)) {
    if (nan(load_element(result.out.data() + at, dtype))) return false;
  }
  return std::ranges::none_of(result.lse, nan);
}

class CudaFoldTest : public KernelRowTest {
 protected:
  // Calls check(spec) for all dims that the row can do.
  template <typename Check>
  void for_all_dims(const Mask& mask, Check check) {
    for (const Dims& dims : kDims) {
      FoldSpec spec = make_spec(dims.dtype, 4, 2, dims.head_dim, mask, dims.head_dim_v);
      if (!cannot_run(row(), spec).empty()) continue;
      SCOPED_TRACE(describe(spec));
      check(spec);
    }
  }
};

}  // namespace ringattn::testing

// For every kernel of the cuda backend.
#define RINGATTN_FOR_EVERY_CUDA_KERNEL(fixture)                                                     \
  INSTANTIATE_TEST_SUITE_P(Kernels, fixture, ::testing::ValuesIn(::ringattn::testing::cuda_rows()), \
                           [](const auto& test) { return std::string(test.param.name); })
