// SPDX-License-Identifier: Apache-2.0
// A FoldTask's host tables → the tables that a CUDA fold kernel reads, in one piece of memory: work items, or bundles
// of them, in the order in which they should start, key runs, the tile map, sources. Plain host code, for every fold
// kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/fold_params.hpp"
#include "kernels/fold.hpp"

namespace ringattn::cuda {

// How a kernel cuts its work.
struct WorkShape {
  int item_rows;   // query rows of an item, at most
  int query_tile;  // FoldKernel::query_tile(); larger than 1: items are a run's parts of canonical tiles
  int key_tile;
  int units = 1;                 // query tiles, of one KV head, that a CTA folds side by side; 1: no bundles
  std::int64_t cache_bytes = 0;  // K and V that are folded at a time should not exceed this
  std::int64_t ctas = 1;         // that work at a time, and should end together
  int walk_ctas = 1;             // that may share a bundle, which then has as many times the units
};

// Where the tables lie in their memory, in bytes from its start.
struct TableLayout {
  std::size_t runs = 0;
  std::size_t tiles = 0;
  std::size_t sources = 0;  // empty unless there are more than kNearSources
  std::size_t items = 0;
  std::size_t bundles = 0;
  std::size_t counters = 0;  // int32: work taken, and of each CTA how far it is; all 0
  std::size_t bytes = 0;     // in all
  std::int32_t item_count = 0;
  std::int32_t bundle_count = 0;
  std::int32_t section_heads = 1;  // see FoldParams
  std::int32_t early_count = 0;    // see FoldParams
  std::int32_t walk_ctas = 1;      // see FoldParams
  bool keep_pace = false;          // see FoldParams

  bool operator==(const TableLayout&) const = default;
};

SourceEntry source_entry(const KeySource& source);

// What of a task its tables depend on. A job does the same tasks layer by layer, with other tensors.
class TaskGeometry {
 public:
  // Room for every task within `limits`.
  void reserve(const FoldLimits& limits);
  void remember(const FoldTask& task);
  void forget() { known_ = false; }
  // Whether `task` has the same tables as what was remembered last. Never with sources that the tables hold.
  bool fits(const FoldTask& task) const;

 private:
  bool known_ = false;
  bool all_rows_ = false;
  std::int64_t rows_ = 0;
  std::vector<QueryRun> queries_;
  std::vector<std::int64_t> key_lengths_;
  std::vector<KeyRun> key_runs_;
  std::vector<KeyTile> tiles_;
};

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
  struct Order {
    std::int32_t section;
    std::int32_t tiles;
    std::int32_t index;  // of an item or a bundle

    bool operator<(const Order& other) const { return tiles > other.tiles; }  // within a section
  };

  struct Sequence {  // its items begin where the one before ends
    std::size_t end_item;
    std::int32_t section;
  };

  void collect(const FoldSpec& spec, const FoldTask& task, const WorkShape& shape);
  void cut(const FoldSpec& spec, int units);
  void bundle(const FoldSpec& spec, int units, std::size_t first_item, const Sequence& sequence);
  bool walks_pay(const FoldSpec& spec, const WorkShape& shape) const;
  std::int32_t leave_for_last(std::int64_t workers, std::int64_t heads, std::int64_t most);
  void sort();
  void sort_section(std::span<Order> section);

  std::vector<RunEntry> runs_;
  std::vector<Sequence> sequences_;
  std::vector<WorkItem> items_;
  std::vector<WorkBundle> bundles_;
  std::vector<Order> order_;  // of the bundles, or, without those, of the items; sections ascend
  std::vector<Order> unsorted_;
  std::vector<std::int32_t> places_;
};

}  // namespace ringattn::cuda
