// SPDX-License-Identifier: Apache-2.0
// Turns a BackwardTask into the tables of backward_params.hpp. Plain host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/attention_backward/cuda/backward_params.hpp"

namespace ringattn::cuda {

// BackwardShape::swizzle_bytes for a single L2 swizzle group of all KV heads.
inline constexpr std::int64_t kWithoutSwizzle = std::numeric_limits<std::int64_t>::max();

// The rows of a kernel's gradient.
enum class BackwardSide { kQueries, kKeys };  // rows of dQ; rows of dK and dV

struct BackwardShape {
  BackwardSide rows;
  int other_tile;              // rows of a tile of the other side
  std::int64_t split;          // positions of a split of the other side
  int group;                   // BackwardTables::group
  int head_tiles;              // maximum head tiles of a CTA
  int ctas;                    // that are resident at once
  std::int64_t partials;       // that BackwardSums::scratch has room for, for each KV head
  std::int64_t swizzle_bytes;  // bytes of the other side's tensors in an L2 swizzle group
  std::int64_t head_bytes;     // bytes of a row of the other side's tensors, for one KV head
  bool spills = false;         // dK and dV: dS is stored; dQ: it is read from the task built before, of dK and dV
};

// The task's sources.
struct BackwardSources {
  std::span<const TileRows> rows;
  std::span<const float* const> stats;  // empty for keys
  bool bulk;                            // TMA loads their tiles, which then need no TileRows
};

// Byte offsets of the tables in their allocation.
struct BackwardTableLayout {
  std::size_t taken = 0;
  std::size_t pairs = 0;
  std::size_t row_tiles = 0;
  std::size_t runs = 0;
  std::size_t tiles = 0;
  std::size_t tile_rows = 0;  // empty if TMA loads the tiles
  std::size_t merged = 0;
  std::size_t ds = 0;  // empty unless dQ is computed from dS
  std::size_t bytes = 0;
  std::int32_t pair_count = 0;
  std::int32_t merged_count = 0;
  std::int32_t swizzle_heads = 1;
  std::int32_t ds_tiles = 0;  // of a KV head, if dK and dV store dS
};

// Upper bound of the row tiles of any task within `limits`.
std::size_t row_tile_limit(const BackwardLimits& limits);
// Upper bound of the table bytes of any task within `limits`. `partials`: the maximum BackwardShape::partials.
std::size_t backward_table_bytes(const BackwardLimits& limits, int group, std::int64_t partials);

// Builds tables. Reuses its vectors between tasks, so that building doesn't allocate.
class BackwardTableBuilder {
 public:
  void reserve(const BackwardLimits& limits, int group, std::int64_t partials);
  // Writes the task's tables into `memory`. `finish`: rows without tiles are part of the work too.
  BackwardTableLayout build(const AttentionSpec& spec, const BackwardTask& task, const BackwardShape& shape,
                            bool finish, const BackwardSources& sources, std::span<std::byte> memory);

 private:
  struct Sequence;

  void add_tiles(const BackwardTask& task, const BackwardShape& shape, const BackwardSources& sources);
  void place_ds(int group, std::int32_t sequence, std::int64_t origin, std::size_t first_row_tile);
  void find_ds(const BackwardTask& task);
  void add_rows(const BackwardTask& task, const BackwardShape& shape, const Mask& mask, const QueryRun& rows,
                const Sequence& sequence, bool finish);
  RowTile row_tile(const BackwardTask& task, const BackwardShape& shape, const Mask& mask, const QueryRun& rows,
                   const Sequence& sequence, std::int64_t tile_begin) const;
  // Tiles of the pair's sequence that the task has in [begin, end).
  std::int32_t tiles_between(const RowTilePair& pair, std::int32_t begin, std::int32_t end) const;
  void pair_up(const BackwardShape& shape, const Sequence& sequence, std::size_t first_row_tile);
  void sort_pairs();
  // Replaces long pairs by one pair for each of their splits where CTAs would wait for them.
  void share_splits(const BackwardShape& shape, int kv_heads);

  std::vector<TileRun> runs_;
  std::vector<OtherTile> tiles_;
  std::vector<RowTile> row_tiles_;
  std::vector<RowTilePair> pairs_;
  std::vector<MergedHeadTile> merged_;
  // Places of dS: those of the last task of dK and dV, by sequence and tile of kBackwardTile keys, and those that a
  // task of dQ reads.
  struct PlacedDs {
    std::int32_t sequence;
    std::int64_t tile;
    DsOfKeys ds;
  };
  std::vector<PlacedDs> placed_ds_;
  std::vector<DsOfKeys> ds_;
  std::int32_t ds_tiles_ = 0;
};

}  // namespace ringattn::cuda
