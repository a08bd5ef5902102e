// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "base/error.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kFar = std::int64_t{1} << 62;
constexpr std::int64_t kLeastPage = 16;
constexpr std::int64_t kMostPage = 256;

}  // namespace

double visible_pairs(const Job& job) {
  double pairs = 0.0;
  for (const Sequence& s : job.batch.sequences) {
    pairs += Visibility(job.spec.mask, s.k_len).pairs(s.q_offset, s.q_len);
  }
  return pairs;
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
  const std::int64_t page = job.page_size;
  if (page != 0 && (page < kLeastPage || page > kMostPage || !std::has_single_bit(static_cast<std::uint64_t>(page)))) {
    fail(ErrorCode::kUsage, fmt::format("pages of {} tokens", page), "16, 32, 64, 128 and 256 are supported",
         "Choose one of them.");
  }
  check_batch(job.batch);
}

QueryWork query_work(const Job& job) {
  return [&job](const TokenRun& queries) {
    const Sequence& s = job.batch.sequences[static_cast<std::size_t>(queries.sequence)];
    return Visibility(job.spec.mask, s.k_len).pairs(s.q_offset + queries.begin, queries.tokens());
  };
}

JobLayout make_layout(const Job& job, int world, const LayoutRequest& request, int query_tile, int key_tile) {
  return make_layout(job.batch, query_work(job), world, request, query_tile, key_tile);
}

}  // namespace ringattn
