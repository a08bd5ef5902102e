// SPDX-License-Identifier: Apache-2.0
// Turns the tables of a AttentionTask into those that a CUDA fold kernel reads: work work_tiles, gqa_tiles of them, key
// runs, the map of tiles, and sources, one after the other in one block of memory. Items, or gqa_tiles, stand there in
// the order in which they should start. This is plain host code, which all CUDA fold kernels share. The words are
// explained in kernels/README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/cuda/attention_params.hpp"
#include "kernels/cuda/scheduler_order.hpp"

namespace ringattn::cuda {

// How a kernel cuts its work.
struct WorkTileShape {
  int tile_rows;       // query rows of an work_tile, at most
  int query_tile;      // AttentionKernel::query_tile(); where it is larger than 1, an work_tile lies in one query tile
  int key_tile;        // AttentionKernel::key_tile()
  int head_tiles = 1;  // that a CTA folds side by side; where it is 1, there are no gqa_tiles
  std::int64_t cache_bytes = 0;  // a swizzle_group's K and V should not exceed this
  std::int64_t ctas = 1;         // that work at a time, and should end together
  int cluster_ctas = 1;          // that may fold a gqa_tile side by side, which then has as many times the head_tiles
};

// Where the tables lie in their memory, in bytes from its start, and what else a launch is told with them.
struct TableLayout {
  std::size_t runs = 0;
  std::size_t tiles = 0;
  std::size_t positions = 0;  // empty unless keys have positions of their own
  std::size_t sources = 0;    // empty unless there are more than kNearSources
  std::size_t work_tiles = 0;
  std::size_t gqa_tiles = 0;
  std::size_t counters = 0;  // int32, all 0: AttentionParams::Schedule::taken, then its tiles_done
  std::size_t bytes = 0;     // of all of them
  std::int32_t work_tile_count = 0;
  std::int32_t gqa_tile_count = 0;
  // As in AttentionParams::Schedule.
  std::int32_t entry_heads = 1;
  std::int32_t heads_per_gqa_tile = 1;
  std::int32_t swizzle_heads = 1;
  std::int32_t early_entries = 0;
  std::int32_t cluster_ctas = 1;
  bool keep_pace = false;

  bool operator==(const TableLayout&) const = default;
};

SourceEntry source_entry(const KeySource& source);

// Bytes of one token's K and V of one KV head.
std::int64_t kv_head_bytes(const AttentionSpec& spec);

// The most bytes that any task within `limits` needs.
std::size_t table_bytes(const AttentionSpec& spec, const WorkTileShape& shape, const AttentionLimits& limits);

// Builds tables; keeps its lists between tasks, so that building allocates nothing once they have new_lengths.
class WorkBuilder {
 public:
  // Room for every task within `limits`.
  void reserve(const AttentionSpec& spec, const WorkTileShape& shape, const AttentionLimits& limits);
  // Writes the task's tables into `memory`. Throws kInternal when it is too small, as reserve() promised more.
  TableLayout build(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape,
                    std::span<std::byte> memory);

 private:
  // Items that may share gqa_tiles, because their runs are the same: those of a sequence, or of a list of tiles or of
  // positions. They begin where those of the stretch before end.
  struct Stretch {
    std::size_t end_tile;
    std::int32_t swizzle_group;
  };

  // Counts sections: the bytes of K and V that work_tiles read, one sequence or list after the other.
  struct SwizzleGroup {
    std::int32_t number = 0;
    std::int64_t bytes = 0;

    // Those of the next one begin another swizzle_group where they don't fit into this one.
    void add(std::int64_t more, std::int64_t most) {
      if (bytes > 0 && bytes + more > most) {
        ++number;
        bytes = 0;
      }
      bytes += more;
    }
  };

  void collect(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape);
  // The work_tiles of one list of positions; where there are none, of all heads.
  void collect_positions(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape, int list,
                         SwizzleGroup& swizzle_group);
  static void write_positions(const AttentionTask& task, const WorkTileShape& shape, std::int32_t* positions);
  // Returns how many tiles the keys of the longest sequence have.
  std::int64_t collect_masked(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape);
  void mask_tile_runs(const AttentionSpec& spec, const BlockMask& block_mask, std::size_t sequence, int head,
                      std::int64_t query_block, int key_tile, std::span<const KeyRun> keys);
  std::int32_t tiles_before(const WorkTile& work_tile, std::int64_t tile) const;
  // Sets which tiles every row of the work_tile sees whole: those that hold no keys but `common`.
  void set_plain(const KeyRange& common, int key_tile, WorkTile& work_tile) const;
  void cut(int heads_per_gqa_tile, int head_tiles);
  void gqa_tile(int heads_per_gqa_tile, int head_tiles, std::size_t first_work_tile, const Stretch& stretch);
  bool clusters_pay(int heads_per_gqa_tile, const WorkTileShape& shape) const;

  std::vector<RunEntry> runs_;
  // Of the query block in hand, where there are lists: the first of its runs, what they are of the sequence, and the
  // places of their first tiles.
  std::size_t first_masked_ = 0;
  std::vector<KeyRun> masked_runs_;
  std::vector<std::int64_t> places_;
  std::vector<Stretch> stretches_;
  std::vector<WorkTile> work_tiles_;
  std::vector<GqaPackedTile> gqa_tiles_;
  SchedulerOrder order_;  // of the gqa_tiles, or of the work_tiles where there are none
};

}  // namespace ringattn::cuda
