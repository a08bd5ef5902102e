// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/block_size.hpp"

#include <limits>
#include <optional>

namespace ringattn {

std::vector<std::int64_t> block_sizes(const Options& options, std::int64_t keys, std::int64_t max_tokens,
                                      int key_tile) {
  std::vector<std::int64_t> sizes{options.block_tokens > 0 || max_tokens >= keys ? 0 : max_tokens};
  for (std::int64_t tokens = max_tokens / 2; options.block_tokens == 0 && tokens >= key_tile; tokens /= 2) {
    if (tokens < keys) sizes.push_back(tokens);
  }
  return sizes;
}

std::size_t choose_block_size(std::size_t candidates, const Options& options, int world,
                              const std::function<RingJob(std::size_t candidate)>& ring) {
  if (options.memory_budget == 0) return 0;
  std::optional<MinBudget> min_budget;
  std::size_t smallest = 0;
  std::size_t smallest_bytes = std::numeric_limits<std::size_t>::max();
  for (std::size_t candidate = 0; candidate < candidates; ++candidate) {
    const RingJob job = ring(candidate);
    if (!min_budget) {
      check_size(job, options, world);
      min_budget.emplace(job, options, world);
    }
    const std::size_t needed = min_budget->of(job);
    const std::int64_t block = job.max_block_tokens > 0 ? job.max_block_tokens : job.work.batch.k_tokens();
    // `needed` includes the buffers of blocks whose size the job states.
    const std::int64_t buffers = world == 1 || options.block_tokens > 0 ? 0 : 2 * block * token_bytes(job.work.streams);
    if (needed + static_cast<std::size_t>(buffers) <= options.memory_budget) return candidate;
    if (needed >= smallest_bytes) continue;
    smallest = candidate;
    smallest_bytes = needed;
  }
  return smallest;
}

}  // namespace ringattn
