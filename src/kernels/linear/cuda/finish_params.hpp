// SPDX-License-Identifier: Apache-2.0
// Parameters and launcher of the kernel that adds sums of leaves and writes y.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "kernels/linear/linear_constants.hpp"

namespace ringattn::cuda {

struct FinishParams {
  // kFloat: sums of nodes, starting with the first row; null for nodes whose sum is that of their children. kInt8: sums
  // of partials, terminated by null.
  const void* sums[kLinearNodes];
  bool integers;  // kInt8
  Dtype dtype;    // not fp32 with `integers`
  std::int64_t rows;
  std::int64_t columns;  // of y
  std::int64_t sum_columns;
  const void* bias[2];
  const float* scales[2];  // kInt8
  // kInt8: the results of find_absmax() for the devices' parts of K, [absmax_parts, rows], starting with the first row.
  // absmax_stride is the number of elements from part to part.
  const float* absmax;
  std::int64_t absmax_stride;
  int absmax_parts;
  void* y;
  std::int64_t y_stride;  // elements
  LinearActivation activation;
  bool gated;
};

// LinearSumTask. `count` is less than 2^31 blocks of threads.
struct NodeSumParams {
  const void* sums[kLinearNodes];  // fp32 [count], or null
  std::int64_t count;
  float* sum;
};

// Loads the kernels on the current device, so that no task has to load them while peers wait.
void prepare_finish();
// Enqueues on the current device.
void launch_finish(const FinishParams& params, Stream stream);
void launch_node_sum(const NodeSumParams& params, Stream stream);

}  // namespace ringattn::cuda
