// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_room.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "attention/block_room.hpp"
#include "attention/latent_work.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

// Of expanded rows.
constexpr std::int64_t kMostExpandedBytes = std::int64_t{256} << 20;
// Absorbed, queries are few and a state is four times as large.
constexpr std::int64_t kAbsorbedTokens = 4 * kBlockTokens;

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
  const std::int64_t most = options.block_tokens > 0 ? options.block_tokens : expanded ? kBlockTokens : kAbsorbedTokens;
  const std::vector<std::int64_t> sizes = block_sizes(options, keys, most, key_tile);
  LatentRoom room{spec.heads, sizes.front()};
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
  for (std::size_t i = 1; i < sizes.size(); ++i) {
    room.most_block_tokens = sizes[i];
    rooms.push_back(room);
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
  int heads = job.spec.heads;  // of `fold`
  return rooms[choose_room(rooms.size(), options, world, [&](std::size_t i) {
    if (rooms[i].heads != heads) fold = kernels.fold(heads = rooms[i].heads);
    return ring_job(job, options, rooms[i], {*fold, kernels.keys, kernels.values});
  })];
}

}  // namespace ringattn
