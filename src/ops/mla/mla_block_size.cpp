// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_block_size.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/error.hpp"
#include "ops/attention/block_size.hpp"
#include "ops/mla/mla_work.hpp"

namespace ringattn {

namespace {

// Limit for the expanded rows of a block, without a memory budget.
constexpr std::int64_t kMaxExpandedBytes = std::int64_t{256} << 20;
// In the absorbed form there are few queries, and the state of a query is four times as large.
constexpr std::int64_t kAbsorbedTokens = 4 * kBlockTokens;

int largest_divisor(int number, std::int64_t limit) {
  int divisor = static_cast<int>(std::clamp<std::int64_t>(limit, 1, number));
  while (number % divisor != 0) --divisor;
  return divisor;
}

// Candidates from the preferred to the smallest one.
std::vector<MlaBlockSize> block_size_candidates(const MlaJob& job, const Options& options, int heads_at_a_time,
                                                int key_tile) {
  const MlaSpec& spec = job.spec;
  const bool expanded = *job.form == MlaForm::kExpanded;
  const std::int64_t keys = std::max<std::int64_t>(1, job.batch.k_tokens());
  const std::int64_t max_tokens = options.block_tokens > 0 ? options.block_tokens
                                  : expanded               ? kBlockTokens
                                                           : kAbsorbedTokens;
  const std::vector<std::int64_t> sizes = block_sizes(options, keys, max_tokens, key_tile);
  MlaBlockSize block_size{spec.heads, sizes.front()};
  if (expanded && heads_at_a_time > 0) {
    block_size.heads = largest_divisor(spec.heads, heads_at_a_time);
  } else if (expanded) {
    const std::int64_t of_one_head = std::min(max_tokens, keys) * gathered_row_bytes(spec, *job.form, 1);
    block_size.heads = largest_divisor(spec.heads, kMaxExpandedBytes / of_one_head);
  }
  std::vector<MlaBlockSize> candidates{block_size};
  while (expanded && heads_at_a_time == 0 && block_size.heads > 1) {
    block_size.heads = largest_divisor(spec.heads, block_size.heads - 1);
    candidates.push_back(block_size);
  }
  for (std::size_t i = 1; i < sizes.size(); ++i) {
    block_size.max_block_tokens = sizes[i];
    candidates.push_back(block_size);
  }
  return candidates;
}

}  // namespace

MlaBlockSize choose_mla_block_size(const MlaJob& job, const Options& options, int heads_at_a_time, int world,
                                   const BlockSizeKernels& kernels) {
  if (heads_at_a_time < 0) {
    fail(ErrorCode::kUsage, fmt::format("{} heads at a time", heads_at_a_time), "at least one is expanded at a time",
         "0 chooses from the memory budget.");
  }
  std::unique_ptr<AttentionKernel> attention = kernels.attention(job.spec.heads);
  const std::vector<MlaBlockSize> candidates =
      block_size_candidates(job, options, heads_at_a_time, attention->key_tile());
  int heads = job.spec.heads;  // heads of the attention kernel
  return candidates[choose_block_size(candidates.size(), options, world, [&](std::size_t i) {
    if (candidates[i].heads != heads) attention = kernels.attention(heads = candidates[i].heads);
    return ring_job(job, options, candidates[i], {*attention, kernels.keys, kernels.values});
  })];
}

}  // namespace ringattn
