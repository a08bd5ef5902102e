// SPDX-License-Identifier: Apache-2.0
// Jobs whose plans the tests know, and what a plan is refused with.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include "attention/ring/plan.hpp"
#include "attention/tokens/job.hpp"
#include "base/error.hpp"

namespace ringattn::testing {

inline constexpr KernelShape kKernel{128, 1};

inline Job causal_job(std::int64_t tokens, std::int64_t batch = 1) {
  Job job;
  job.spec.heads = 8;
  job.spec.kv_heads = 2;
  job.spec.mask = {-1, 0};
  job.batch = uniform_batch(batch, tokens, tokens);
  return job;
}

inline JobLayout layout_of(const Job& job, int world, LayoutKind kind = LayoutKind::kStriped, std::int64_t stripe = 0) {
  return make_layout(job, world, {kind, stripe}, kKernel.query_tile, kKernel.key_tile);
}

// What a call refuses with; empty: it doesn't.
inline std::string refusal(const std::function<void()>& call, ErrorCode code) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return {};
}

}  // namespace ringattn::testing
