// SPDX-License-Identifier: Apache-2.0
// Where the tiles of a walk lie. A walk goes through the key runs of a sequence as if they were one: the tiles that the
// task has are numbered through all of them.
#pragma once

#include "kernels/cuda/fold_params.hpp"

namespace ringattn::cuda {

// Of the `count` runs of a sequence, the one that holds the tile of this number.
__device__ __forceinline__ const RunEntry& find_run(const RunEntry* runs, int count, std::int64_t number) {
  while (count > 1) {
    const int half = count / 2;
    const bool behind = runs[half].first <= number;
    runs += behind ? half : 0;
    count = behind ? count - half : half;
  }
  return *runs;
}

// A tile of a walk.
struct WalkTile {
  std::int64_t tile;       // its number in the sequence: its keys begin at tile · key_tile
  const TileEntry& entry;  // where it lies
};

// The i-th tile of `walk`, which is a WorkItem, a WorkBundle, or has the members of those that say where a walk lies.
template <class Walk>
__device__ __forceinline__ WalkTile tile_of_walk(const FoldParams::Tables& tables, const Walk& walk, int i) {
  std::int64_t tile = walk.first_tile + i;
  std::int64_t index = walk.table + i;
  if (walk.runs > 1) {
    const std::int64_t number = walk.first + i;
    const RunEntry& run = find_run(tables.runs + walk.run_begin, walk.runs, number);
    tile = run.first_tile + number - run.first;
    index = run.table + number - run.first;
  }
  return {tile, tables.tiles[index]};
}

// The source of this number.
__device__ __forceinline__ const SourceEntry& source_of(const FoldParams::Tables& tables, int source) {
  return tables.all_near ? tables.near_sources[source] : tables.sources[source];
}

}  // namespace ringattn::cuda
