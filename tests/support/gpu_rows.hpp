// SPDX-License-Identifier: Apache-2.0
// A test fixture of op classes that runs once for every attention kernel of the cuda backend.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "attention/options.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {
inline void PrintTo(const AttentionRow& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {

class GpuRowTest : public ::testing::TestWithParam<AttentionRow> {
 protected:
  // The tiles of a kernel, for a spec that it supports.
  struct Tiles {
    int query = 0;
    int key = 0;
  };

  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs a GPU: " << reason;
  }

  Options options(std::int64_t block_tokens = 0) const {
    Options options;
    options.kernel = {std::string(GetParam().backend), std::string(GetParam().name)};
    options.block_tokens = block_tokens;
    return options;
  }
  bool able(const AttentionSpec& spec) const { return GetParam().missing(spec).empty(); }
  Tiles tiles_of(const AttentionSpec& spec) const {
    const std::unique_ptr<Backend> backend = GetParam().make_backend({1, 0});
    const std::unique_ptr<AttentionKernel> kernel = GetParam().make_kernel(spec, *backend);
    return {kernel->query_tile(), kernel->key_tile()};
  }
};

inline std::vector<AttentionRow> cuda_kernels() {
  std::vector<AttentionRow> rows;
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    if (row.backend == "cuda") rows.push_back(row);
  }
  return rows;
}

inline std::string row_name(const ::testing::TestParamInfo<AttentionRow>& test) { return std::string(test.param.name); }

}  // namespace ringattn::testing

// For every kernel of the cuda backend; a build without CUDA has none.
#define RINGATTN_FOR_EVERY_CUDA_KERNEL(fixture)                                                        \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(fixture);                                              \
  INSTANTIATE_TEST_SUITE_P(Kernels, fixture, ::testing::ValuesIn(::ringattn::testing::cuda_kernels()), \
                           ::ringattn::testing::row_name)
