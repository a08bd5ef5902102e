// SPDX-License-Identifier: Apache-2.0
// Turns the tables of an AttentionTask into those that a CUDA attention kernel reads: work tiles, GQA-packed tiles, key
// runs, the page map and sources, one after another in one allocation. Work tiles, or GQA-packed tiles, are in launch
// order. Plain host code, called by cuda_attention.cpp for all CUDA attention kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/attention/cuda/attention_params.hpp"

namespace ringattn::cuda {

// How a kernel tiles its work.
struct WorkTileShape {
  int tile_rows;                 // maximum query rows of a work tile
  int query_tile;                // AttentionKernel::query_tile(); if larger than 1, a work tile lies in one query tile
  int key_tile;                  // AttentionKernel::key_tile()
  int head_tiles = 1;            // head work tiles per CTA; if 1, there are no gqa_tiles
  std::int64_t cache_bytes = 0;  // limit for the K and V of a swizzle group
  std::int64_t ctas = 1;         // CTAs that run at a time and should end together
  int cluster_ctas = 1;          // CTAs of a cluster that may share a gqa_tile, which then has head_tiles per CTA
};

// Byte offsets of the tables in their allocation, and the launch parameters that come with them.
struct TableLayout {
  std::size_t runs = 0;
  std::size_t tiles = 0;
  std::size_t positions = 0;  // empty unless keys have explicit positions
  std::size_t sources = 0;    // empty unless there are more than kInlineSources
  std::size_t work_tiles = 0;
  std::size_t gqa_tiles = 0;
  std::size_t counters = 0;  // int32, all 0: AttentionParams::Schedule::taken, then its tiles_done
  std::size_t bytes = 0;     // of all tables
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

// Upper bound of the table bytes of any task within `limits`.
std::size_t table_bytes(const AttentionSpec& spec, const WorkTileShape& shape, const AttentionLimits& limits);

// Sorts the entries of a task into the order that attention_params.hpp describes (work_index()).

struct SchedulerEntry {
  std::int32_t swizzle_group;
  std::int32_t tiles;
  std::int32_t index;  // of the work tile or gqa_tile

  bool operator<(const SchedulerEntry& other) const { return tiles > other.tiles; }  // the longest first
};

// Sorts the entries of a task. Reuses its vectors between tasks, so that sorting doesn't allocate after reserve().
class SchedulerOrder {
 public:
  void reserve(std::size_t entries);
  void clear() { entries_.clear(); }
  // Swizzle groups must ascend from entry to entry.
  void add(const SchedulerEntry& entry) { entries_.push_back(entry); }
  // KV tiles of the longest entry, 0 if there is none.
  std::int32_t max_tiles() const;
  // Sorts the entries and returns how many of them are early. `workers` CTAs, or CTA clusters, take entries, and each
  // entry is taken once for each of `heads` heads.
  std::int32_t sort(std::int64_t workers, std::int64_t heads);

  std::span<const SchedulerEntry> entries() const { return entries_; }

 private:
  std::int32_t move_late_entries_back(std::int64_t workers, std::int64_t heads);
  void sort_swizzle_group(std::span<SchedulerEntry> swizzle_group);

  std::vector<SchedulerEntry> entries_;
  std::vector<SchedulerEntry> unsorted_;
  std::vector<std::int32_t> counts_;  // number of entries by their tiles
};

// Builds tables. Reuses its vectors between tasks, so that building doesn't allocate.
class WorkBuilder {
 public:
  // Allocates for every task within `limits`.
  void reserve(const AttentionSpec& spec, const WorkTileShape& shape, const AttentionLimits& limits);
  // Writes the task's tables into `memory`. Throws kInternal if it is smaller than the tables.
  TableLayout build(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape,
                    std::span<std::byte> memory);

 private:
  // Work tiles that may share gqa_tiles because their runs are the same: those of a sequence, of a row of a block mask,
  // or of a list of key positions. They begin where those of the stretch before end.
  struct Stretch {
    std::size_t end_tile;
    std::int32_t swizzle_group;
  };

  // Numbers the L2 swizzle groups by the bytes of K and V that work tiles read.
  struct SwizzleGroup {
    std::int32_t number = 0;
    std::int64_t bytes = 0;

    // Adds a sequence or list of `more` bytes. Begins another swizzle group if it doesn't fit into this one.
    void add(std::int64_t more, std::int64_t max_bytes) {
      if (bytes > 0 && bytes + more > max_bytes) {
        ++number;
        bytes = 0;
      }
      bytes += more;
    }
  };

  void collect(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape);
  // Appends the work tiles of one list of key positions. Without positions, `list` is 0 and they count for all heads.
  void collect_positions(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape, int list,
                         SwizzleGroup& swizzle_group);
  static void write_positions(const AttentionTask& task, const WorkTileShape& shape, std::int32_t* positions);
  // Returns the number of KV tiles of the longest sequence.
  std::int64_t collect_masked(const AttentionSpec& spec, const AttentionTask& task, const WorkTileShape& shape);
  void mask_tile_runs(const AttentionSpec& spec, const BlockMask& block_mask, std::size_t sequence, int head,
                      std::int64_t query_block, int key_tile, std::span<const KeyRun> keys);
  std::int32_t tiles_before(const WorkTile& work_tile, std::int64_t tile) const;
  // Sets which tiles every row of the work tile sees in full: those that hold only keys of `common`.
  void set_unmasked_tiles(const KeyRange& common, int key_tile, WorkTile& work_tile) const;
  void cut(int heads_per_gqa_tile, int head_tiles);
  void gqa_tile(int heads_per_gqa_tile, int head_tiles, std::size_t first_work_tile, const Stretch& stretch);
  bool clusters_pay(int heads_per_gqa_tile, const WorkTileShape& shape) const;

  std::vector<RunEntry> runs_;
  // The current row of a block mask: its first entry in runs_, its runs as KeyRuns, and the position of each run's
  // first tile among the mask's tiles.
  std::size_t first_masked_ = 0;
  std::vector<KeyRun> masked_runs_;
  std::vector<std::int64_t> split_positions_;
  std::vector<Stretch> stretches_;
  std::vector<WorkTile> work_tiles_;
  std::vector<GqaPackedTile> gqa_tiles_;
  SchedulerOrder order_;  // of the gqa_tiles, or of the work tiles if there are none
};

}  // namespace ringattn::cuda
