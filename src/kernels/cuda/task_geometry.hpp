// SPDX-License-Identifier: Apache-2.0
// What of a task its tables depend on. A job does the same tasks layer by layer with other tensors, so tables that are
// on the device already can serve again.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.hpp"

namespace ringattn::cuda {

// Whether rows that fold nothing in a task have work all the same: they are written, unless their state stays as it is.
bool takes_all_rows(const AttentionTask& task);

class TaskGeometry {
 public:
  // Makes room for every task within `limits`, and forgets.
  void reserve(const AttentionLimits& limits);
  void remember(const AttentionTask& task);
  void forget() { known_ = false; }
  // Whether `task` has the same tables as what was remembered last. It never has where tables hold sources, because
  // those name the tensors.
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
