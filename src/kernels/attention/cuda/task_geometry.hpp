// SPDX-License-Identifier: Apache-2.0
// The part of a task that determines its tables. A job repeats the same tasks in each layer with other tensors, so
// tables that are already on the device can be reused.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.hpp"

namespace ringattn::cuda {

// Returns true if rows without keys in a task need a work tile: their results or state are written, unless the state is
// kept.
bool takes_all_rows(const AttentionTask& task);

class TaskGeometry {
 public:
  // Allocates for every task within `limits`, and forgets.
  void reserve(const AttentionLimits& limits);
  void remember(const AttentionTask& task);
  void forget() { known_ = false; }
  // Returns true if `task` has the same tables as the remembered one. Always false if tables hold sources, because
  // sources have the tensors' addresses.
  bool fits(const AttentionTask& task) const;

 private:
  bool known_ = false;
  bool all_rows_ = false;
  std::int64_t rows_ = 0;
  std::int64_t block_mask_id_ = 0;  // BlockMask::id(), or 0
  std::int64_t positions_ = 0;      // KeyPositions::id(), or 0
  std::vector<QueryRun> queries_;
  std::vector<std::int64_t> key_lengths_;
  std::vector<KeyRun> key_runs_;
  std::vector<PageRun> tiles_;
};

}  // namespace ringattn::cuda
