// SPDX-License-Identifier: Apache-2.0
// A job in memory, before it runs.
#include "ops/attention_jobs/loaded_job.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "comm/self.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn {
namespace {

TEST(LoadedJob, HandsOutNanWhereNothingWasWritten) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    const Job job{make_spec(dtype, 4, 2, 64, {-1, 0}), uniform_batch(1, 300, 300)};
    const auto self = make_self_transport();
    Options options;
    options.kernel.backend = "cpu";
    Attention attention(job, *self, options);
    LoadedJob loaded(JobInput::synthetic(job, 1), attention, Collective(*self, Timeouts(10.0)));
    const RankResult result = loaded.fetch({});
    const TensorView out = result.out_view(job.spec);
    for (std::int64_t token = 0; token < 300; ++token) {
      for (std::int64_t head = 0; head < 4; ++head) {
        const auto* row = static_cast<const std::byte*>(out.at(token, head));
        for (std::size_t d = 0; d < 64; ++d) ASSERT_TRUE(std::isnan(load_element(row + d * size_of(dtype), dtype)));
        ASSERT_TRUE(std::isnan(result.lse_view(job.spec).data[token * 4 + head]));
      }
    }
  }
}

}  // namespace
}  // namespace ringattn
