// SPDX-License-Identifier: Apache-2.0
// Steps over compressed caches by the op class on GPUs: rows are appended, and each step has the bits of one over the
// plain cache that decompression gives, on one rank and on several.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "tests/support/compressed_steps.hpp"
#include "tests/support/device_pool.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

std::vector<CacheFormat> formats() {
  std::vector<CacheFormat> all;
  for (const char* const text : {"fp8 tensor", "fp8 head", "fp8 token_head", "int8"}) {
    all.push_back({parse_row_format(text), parse_row_format(text)});
  }
  all.push_back({kKeys32, kValues});
  all.push_back({kKeys64, kValues});
  return all;
}

TEST(GpuCompressedDecode, StepsHaveTheBitsOfPlainCachesOnAnyNumberOfRanks) {
  constexpr int kSteps = 20;
  int decoded = 0;
  for (const CacheFormat& format : formats()) {
    const DecodeSpec spec = usual_compressed_spec(format);
    for (const DecodeRow* const row : rows_here(spec)) {
      const CompressedSteps cache(spec.attention, format, kSteps);
      DecodeOptions options;
      options.kernel = {std::string(row->backend), std::string(row->name)};
      // The first, around 8,192 keys, where the second rank's begin, and the last.
      std::map<int, std::vector<std::byte>> expected;
      for (const int step : {0, 5, 6, kSteps - 1}) expected[step] = cache.expected(step, options.kernel);
      for (const int world : {1, 2, 3, 5}) {
        CompressedSteps::Outputs steps = cache.no_outputs();
        run_gpu_world(world, [&](Transport& rank) { cache.run(rank, options, steps); });
        for (const auto& [step, out] : expected) {
          EXPECT_TRUE(steps[static_cast<std::size_t>(step)] == out)
              << row->name << ", " << describe(format) << ": " << world << " ranks, step " << step;
        }
      }
      ++decoded;
    }
  }
  if (decoded == 0) GTEST_SKIP() << "needs a GPU with a kernel that decodes such caches";
}

}  // namespace
}  // namespace ringattn::testing
