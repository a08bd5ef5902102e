// SPDX-License-Identifier: Apache-2.0
// Turns the tables of a FoldTask into those that a CUDA fold kernel reads: work items, bundles of them, key runs, the
// map of tiles, and sources, one after the other in one block of memory. Items, or bundles, stand there in the order in
// which they should start. This is plain host code, which all CUDA fold kernels share. The words are explained in
// kernels/README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/fold_params.hpp"
#include "kernels/cuda/piece_order.hpp"
#include "kernels/fold.hpp"

namespace ringattn::cuda {

// How a kernel cuts its work.
struct WorkShape {
  int item_rows;                 // query rows of an item, at most
  int query_tile;                // FoldKernel::query_tile(); where it is larger than 1, an item lies in one query tile
  int key_tile;                  // FoldKernel::key_tile()
  int units = 1;                 // that a CTA folds side by side; where it is 1, there are no bundles
  std::int64_t cache_bytes = 0;  // a section's K and V should not exceed this
  std::int64_t ctas = 1;         // that work at a time, and should end together
  int walk_ctas = 1;             // that may fold a bundle side by side, which then has as many times the units
};

// Where the tables lie in their memory, in bytes from its start, and what else a launch is told with them.
struct TableLayout {
  std::size_t runs = 0;
  std::size_t tiles = 0;
  std::size_t positions = 0;  // empty unless keys have positions of their own
  std::size_t sources = 0;    // empty unless there are more than kNearSources
  std::size_t items = 0;
  std::size_t bundles = 0;
  std::size_t counters = 0;  // int32, all 0: FoldParams::Schedule::taken, then its tiles_done
  std::size_t bytes = 0;     // of all of them
  std::int32_t item_count = 0;
  std::int32_t bundle_count = 0;
  // As in FoldParams::Schedule.
  std::int32_t piece_heads = 1;
  std::int32_t unit_heads = 1;
  std::int32_t section_heads = 1;
  std::int32_t early_count = 0;
  std::int32_t walk_ctas = 1;
  bool keep_pace = false;

  bool operator==(const TableLayout&) const = default;
};

SourceEntry source_entry(const KeySource& source);

// Bytes of one token's K and V of one KV head.
std::int64_t kv_head_bytes(const FoldSpec& spec);

// The most bytes that any task within `limits` needs.
std::size_t table_bytes(const FoldSpec& spec, const WorkShape& shape, const FoldLimits& limits);

// Builds tables; keeps its lists between tasks, so that building allocates nothing once they have grown.
class WorkBuilder {
 public:
  // Room for every task within `limits`.
  void reserve(const FoldSpec& spec, const WorkShape& shape, const FoldLimits& limits);
  // Writes the task's tables into `memory`. Throws kInternal when it is too small, as reserve() promised more.
  TableLayout build(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape, std::span<std::byte> memory);

 private:
  // Items that may share bundles, because their runs are the same: those of a sequence, or of a list of tiles or of
  // positions. They begin where those of the stretch before end.
  struct Stretch {
    std::size_t end_item;
    std::int32_t section;
  };

  // Counts sections: the bytes of K and V that items read, one sequence or list after the other.
  struct Section {
    std::int32_t number = 0;
    std::int64_t bytes = 0;

    // Those of the next one begin another section where they don't fit into this one.
    void add(std::int64_t more, std::int64_t most) {
      if (bytes > 0 && bytes + more > most) {
        ++number;
        bytes = 0;
      }
      bytes += more;
    }
  };

  void collect(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape);
  // The items of one list of positions; where there are none, of all heads.
  void collect_list(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape, int list, Section& section);
  static void write_positions(const FoldTask& task, const WorkShape& shape, std::int32_t* positions);
  // Returns how many tiles the keys of the longest sequence have.
  std::int64_t collect_listed(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape);
  void list_runs(const FoldSpec& spec, const TileLists& lists, std::size_t sequence, int head, std::int64_t query_block,
                 int key_tile, std::span<const KeyRun> keys);
  std::int32_t tiles_before(const WorkItem& item, std::int64_t tile) const;
  // Sets which tiles every row of the item sees whole: those that hold no keys but `common`.
  void set_plain(const KeyRange& common, int key_tile, WorkItem& item) const;
  void cut(int unit_heads, int units);
  void bundle(int unit_heads, int units, std::size_t first_item, const Stretch& stretch);
  bool walks_pay(int unit_heads, const WorkShape& shape) const;

  std::vector<RunEntry> runs_;
  // Of the query block in hand, where there are lists: the first of its runs, what they are of the sequence, and the
  // places of their first tiles.
  std::size_t first_listed_ = 0;
  std::vector<KeyRun> listed_;
  std::vector<std::int64_t> places_;
  std::vector<Stretch> stretches_;
  std::vector<WorkItem> items_;
  std::vector<WorkBundle> bundles_;
  PieceOrder order_;  // of the bundles, or of the items where there are none
};

}  // namespace ringattn::cuda
