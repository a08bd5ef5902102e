// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/job.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kFar = std::int64_t{1} << 62;

// Sum of clamp(first + i, low, high) over i in [0, count): the number of keys that consecutive rows see on one side.
double clamped_sum(std::int64_t first, std::int64_t count, std::int64_t low, std::int64_t high) {
  if (count <= 0) return 0.0;
  const std::int64_t below = std::clamp(low - first, std::int64_t{0}, count);  // rows at `low`
  const std::int64_t until = std::clamp(high - first, below, count);           // rows before `high` is reached
  const auto ramp = static_cast<double>(until - below);
  const double ramp_sum = ramp * static_cast<double>(first + below) + ramp * (ramp - 1.0) / 2.0;
  return static_cast<double>(below) * static_cast<double>(low) + ramp_sum +
         static_cast<double>(count - until) * static_cast<double>(high);
}

}  // namespace

double visible_pairs(const Mask& mask, std::int64_t position, std::int64_t rows, KeyRange keys) {
  if (keys.empty() || rows <= 0) return 0.0;
  // Row at p sees [clamp(p − left), clamp(p + right + 1)) of the keys; where that is empty both clamp to the same
  // bound.
  const auto all = static_cast<double>(rows);
  const double ends = mask.right < 0 ? all * static_cast<double>(keys.end)
                                     : clamped_sum(position + mask.right + 1, rows, keys.begin, keys.end);
  const double begins = mask.left < 0 ? all * static_cast<double>(keys.begin)
                                      : clamped_sum(position - mask.left, rows, keys.begin, keys.end);
  return ends - begins;
}

double visible_pairs(const Job& job) {
  double pairs = 0.0;
  for (const Sequence& s : job.batch.sequences) {
    pairs += visible_pairs(job.spec.mask, s.q_offset, s.q_len, {0, s.k_len});
  }
  return pairs;
}

double job_flops(const Job& job) {
  return 2.0 * visible_pairs(job) * job.spec.heads * (job.spec.head_dim + job.spec.head_dim_v);
}

std::string describe(const Job& job) {
  const std::size_t count = job.batch.sequences.size();
  const std::int64_t queries = job.batch.q_tokens();
  const std::int64_t keys = job.batch.k_tokens();
  const std::string tokens =
      queries == keys ? fmt::format("{} tokens", queries) : fmt::format("{} queries, {} keys", queries, keys);
  return fmt::format("{}; {} sequence{}, {}", describe(job.spec), count, count == 1 ? "" : "s", tokens);
}

void check_job(const Job& job) {
  check_heads(job.spec);
  const Mask& mask = job.spec.mask;
  if (mask.left < -1 || mask.right < -1 || mask.left > kFar || mask.right > kFar) {
    fail(ErrorCode::kUsage, fmt::format("window {},{}", mask.left, mask.right),
         "each side is a number of tokens, or -1 for unlimited", "Use -1, or 0 to 2^62 tokens.");
  }
  check_batch(job.batch);
}

QueryWork query_work(const Job& job) {
  return [&job](const TokenRun& queries) {
    const Sequence& s = job.batch.sequences[static_cast<std::size_t>(queries.sequence)];
    return visible_pairs(job.spec.mask, s.q_offset + queries.begin, queries.tokens(), {0, s.k_len});
  };
}

JobLayout make_layout(const Job& job, int world, const LayoutRequest& request, int query_tile, int key_tile) {
  return make_layout(job.batch, query_work(job), world, request, query_tile, key_tile);
}

}  // namespace ringattn
