// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/cuda/task_geometry.hpp"

#include <algorithm>

#include "kernels/attention/cuda/attention_params.hpp"

namespace ringattn::cuda {

namespace {

// The id of an immutable object, or 0 for null.
template <class Object>
std::int64_t id_of(const Object* object) {
  return object == nullptr ? 0 : object->id();
}

}  // namespace

bool takes_all_rows(const AttentionTask& task) { return task.finish != nullptr || (task.save && !task.resume); }

void TaskGeometry::reserve(const AttentionLimits& limits) {
  forget();
  queries_.reserve(static_cast<std::size_t>(limits.query_runs));
  key_lengths_.reserve(static_cast<std::size_t>(limits.sequences));
  key_runs_.reserve(static_cast<std::size_t>(limits.key_runs));
  tiles_.reserve(static_cast<std::size_t>(limits.tiles));
}

void TaskGeometry::remember(const AttentionTask& task) {
  forget();
  if (task.sources.size() > kInlineSources) return;
  all_rows_ = takes_all_rows(task);
  rows_ = task.q.tokens;
  block_mask_id_ = id_of(task.block_mask);
  positions_ = id_of(task.positions);
  queries_.assign(task.queries.begin(), task.queries.end());
  key_lengths_.assign(task.key_lengths.begin(), task.key_lengths.end());
  key_runs_.assign(task.key_runs.begin(), task.key_runs.end());
  tiles_.assign(task.tiles.begin(), task.tiles.end());
  known_ = true;
}

bool TaskGeometry::fits(const AttentionTask& task) const {
  // Blocks of a plan differ in their keys, so keys are compared first.
  return known_ && task.sources.size() <= kInlineSources && all_rows_ == takes_all_rows(task) &&
         rows_ == task.q.tokens && block_mask_id_ == id_of(task.block_mask) && positions_ == id_of(task.positions) &&
         std::ranges::equal(key_runs_, task.key_runs) && std::ranges::equal(tiles_, task.tiles) &&
         std::ranges::equal(queries_, task.queries) && std::ranges::equal(key_lengths_, task.key_lengths);
}

}  // namespace ringattn::cuda
