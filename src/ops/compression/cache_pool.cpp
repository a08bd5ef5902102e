// SPDX-License-Identifier: Apache-2.0
#include "ops/compression/cache_pool.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/rank_liveness.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "ops/common/non_finite.hpp"
#include "ops/compression/cache_rows.hpp"
#include "ops/compression/finite_tensor.hpp"
#include "ops/compression/pool_slots.hpp"

namespace ringattn {

std::int64_t part_tokens(const CachePool& pool) {
  return std::max<std::int64_t>(1, kPartBytes / std::max<std::int64_t>(1, token_bytes({}, pool.shape)));
}

void read_slots(const CachePool& pool, std::span<const PackedRun> slots, std::span<std::byte> rows) {
  const std::int64_t tokens = total_tokens(slots);
  const MutableTensorView view =
      dense_view(static_cast<void*>(rows.data()), pool.shape.dtype, tokens, pool.shape.heads, pool.shape.dim);
  read_rows(pool.source, pool.grid, slots, view);
  if (count_non_finite(view) == 0) return;
  const auto invalid = find_invalid_element(view);
  refuse_invalid_element(fmt::format("{}_pages", pool.name), {}, pool.shape, *invalid, ErrorCode::kFile,
                         page_coordinates(pool.table, pool.grid.order, slot_at(slots, invalid->token), invalid->head));
}

void check_slots(const CachePool& pool, std::span<const PackedRun> slots) {
  const RowGrid& grid = pool.grid;
  const std::size_t element = size_of(pool.shape.dtype);
  heartbeat();
  for_each_segment(grid, slots, element, std::numeric_limits<std::int64_t>::max(), [&](const RowSegment& segment) {
    const std::int64_t first = segment.offset / static_cast<std::int64_t>(element);
    const auto found = find_non_finite(pool.source, first, first + segment.tokens * segment.heads * grid.dim);
    if (!found) return;
    const InvalidElement invalid = invalid_element_at(*found, grid);
    refuse_invalid_element(fmt::format("{}_pages", pool.name), {}, pool.shape, invalid, ErrorCode::kFile,
                           page_coordinates(pool.table, grid.order, invalid.token, invalid.head));
  });
}

}  // namespace ringattn
