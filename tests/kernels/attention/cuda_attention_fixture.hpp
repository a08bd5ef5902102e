// SPDX-License-Identifier: Apache-2.0
// A test fixture: the attention kernels of the cuda backend, and their inputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "tests/kernels/common/kernel_row_test.hpp"

namespace ringattn::testing {

inline std::vector<AttentionRow> cuda_rows() {
  std::vector<AttentionRow> rows;
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    if (row.backend == "cuda") rows.push_back(row);
  }
  return rows;
}

// Whether no element is as it was before the run: NaN, which finite inputs don't give.
inline bool all_written(const AttentionResult& result, Dtype dtype) {
  const auto nan = [](float x) { return std::isnan(x); };
  for (std::size_t at = 0; at < result.out.size(); at += size_of(dtype)) {
    if (nan(load_element(result.out.data() + at, dtype))) return false;
  }
  return std::ranges::none_of(result.lse, nan);
}

class CudaAttentionTest : public KernelRowTest {
 protected:
  // Calls check(spec) for all dims of a kernel that is compiled for few, and for varied ones of another.
  template <typename Check>
  void for_all_dims(const Mask& mask, Check check) {
    constexpr std::size_t kFew = 14;
    const std::vector<Dims> all = all_dims(row());
    for (const Dims& dims : all.size() <= kFew ? all : varied_dims(row())) {
      const AttentionSpec spec = make_spec(dims, 4, 2, mask);
      SCOPED_TRACE(describe(spec));
      check(spec);
    }
  }

  // In one dtype, those of 128 columns and more: kernels compute some of them with several CTAs.
  std::vector<Dims> wide_dims() const {
    std::vector<Dims> wide = all_dims(row());
    const Dtype dtype = wide.front().dtype;
    std::erase_if(wide, [&](const Dims& dims) {
      return dims.dtype != dtype || dims.head_dim < 128 || dims.head_dim_v != dims.head_dim;
    });
    return wide;
  }
};

}  // namespace ringattn::testing

// For every kernel of the cuda backend.
#define RINGATTN_FOR_EVERY_CUDA_KERNEL(fixture)                                                     \
  INSTANTIATE_TEST_SUITE_P(Kernels, fixture, ::testing::ValuesIn(::ringattn::testing::cuda_rows()), \
                           [](const auto& test) { return std::string(test.param.name); })
