// SPDX-License-Identifier: Apache-2.0
// The row stats of the backward pass on a GPU.
#pragma once

#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/attention_backward/cuda/backward_params.hpp"

namespace ringattn::cuda {

// Loads the kernel on the current device.
void prepare_row_stats();
// Enqueues a RowStatsTask.
void compute_row_stats(const RowStatsTask& task, Stream stream);

// Enqueues a RowSumsTask.
void add_rows(const RowSumsTask& task, int heads, Stream stream);

// Enqueues. Copies the row stats of tiles of queries, [rows, row_heads, kRowStats], to `stats`, [tiles, heads,
// kRowStats, kBackwardTile], from which TMA can load those of a tile and head at once. Absent rows get zeros.
void gather_row_stats(const OtherTile* tiles, std::int64_t tile_count, int row_heads, int heads, float* stats,
                      Stream stream);

}  // namespace ringattn::cuda
