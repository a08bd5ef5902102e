// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_room.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "attention/forecast.hpp"
#include "attention/latent_work.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

// Of expanded rows.
constexpr std::int64_t kMostExpandedBytes = std::int64_t{256} << 20;
// At 32,768 keys a block, reading and writing the state is about one percent of its fold. Absorbed, queries are few and
// a state is four times as large.
constexpr std::int64_t kExpandedTokens = std::int64_t{1} << 15;
constexpr std::int64_t kAbsorbedTokens = std::int64_t{1} << 17;

int largest_divisor(int number, std::int64_t limit) {
  int divisor = static_cast<int>(std::clamp<std::int64_t>(limit, 1, number));
  while (number % divisor != 0) --divisor;
  return divisor;
}

// Rooms from the one that is wanted to the smallest one.
std::vector<LatentRoom> rooms_of(const LatentJob& job, const Options& options, int heads_at_a_time, int key_tile) {
  const LatentSpec& spec = job.spec;
  const bool expanded = *job.form == LatentForm::kExpanded;
  const std::int64_t keys = std::max<std::int64_t>(1, job.batch.k_tokens());
  const std::int64_t most = options.block_tokens > 0 ? options.block_tokens
                            : expanded               ? kExpandedTokens
                                                     : kAbsorbedTokens;
  const auto limit = [&](std::int64_t tokens) { return options.block_tokens > 0 || tokens >= keys ? 0 : tokens; };
  LatentRoom room{spec.heads, limit(most)};
  if (expanded && heads_at_a_time > 0) {
    room.heads = largest_divisor(spec.heads, heads_at_a_time);
  } else if (expanded) {
    const std::int64_t of_one_head = std::min(most, keys) * gathered_row_bytes(spec, *job.form, 1);
    room.heads = largest_divisor(spec.heads, kMostExpandedBytes / of_one_head);
  }
  std::vector<LatentRoom> rooms{room};
  while (expanded && heads_at_a_time == 0 && room.heads > 1) {
    room.heads = largest_divisor(spec.heads, room.heads - 1);
    rooms.push_back(room);
  }
  for (std::int64_t tokens = most / 2; options.block_tokens == 0 && tokens >= key_tile; tokens /= 2) {
    room.most_block_tokens = limit(tokens);
    if (room != rooms.back()) rooms.push_back(room);
  }
  return rooms;
}

}  // namespace

LatentRoom latent_room(const LatentJob& job, const Options& options, int heads_at_a_time, int world,
                       const RoomKernels& kernels) {
  if (heads_at_a_time < 0) {
    fail(ErrorCode::kUsage, fmt::format("{} heads at a time", heads_at_a_time), "at least one is expanded at a time",
         "0 chooses from the memory budget.");
  }
  std::unique_ptr<FoldKernel> fold = kernels.fold(job.spec.heads);
  const std::vector<LatentRoom> rooms = rooms_of(job, options, heads_at_a_time, fold->key_tile());
  if (options.memory_budget == 0) return rooms.front();
  const std::int64_t keys = job.batch.k_tokens();
  int heads = job.spec.heads;  // of `fold`
  std::optional<LeastBudget> least;
  LatentRoom smallest;
  std::size_t smallest_bytes = std::numeric_limits<std::size_t>::max();
  for (const LatentRoom& room : rooms) {
    if (room.heads != heads) fold = kernels.fold(heads = room.heads);
    const RingJob ring = ring_job(job, options, room, {*fold, kernels.keys, kernels.values});
    if (!least) least.emplace(ring, options, world);
    const std::size_t needed = least->of(ring);
    const std::int64_t block = room.most_block_tokens > 0 ? room.most_block_tokens : keys;
    // Blocks that the job states have their buffers in `needed` already.
    const std::int64_t buffers =
        world == 1 || options.block_tokens > 0 ? 0 : 2 * block * token_bytes(ring.work.streams);
    if (needed + static_cast<std::size_t>(buffers) <= options.memory_budget) return room;
    if (needed >= smallest_bytes) continue;
    smallest = room;
    smallest_bytes = needed;
  }
  return smallest;
}

}  // namespace ringattn
