// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/cuda/finish.hpp"

#include "kernels/linear/cuda/finish_params.hpp"

namespace ringattn::cuda {

void enqueue_finish(const LinearSpec& spec, const LinearFinishTask& task, Stream stream) {
  if (task.y.tokens == 0 || spec.out_features == 0) return;
  FinishParams p{};
  p.integers = spec.weights == WeightFormat::kInt8;
  p.dtype = spec.dtype;
  p.rows = task.y.tokens;
  int count = 0;
  for (const LinearPartial& partial : task.partials) {
    if (p.integers) {
      if (partial.leaves.begin < partial.leaves.end) p.sums[count++] = partial.sums;
      continue;
    }
    const auto* sums = static_cast<const float*>(partial.sums);
    for (const int node : aligned_nodes(partial.leaves)) {
      p.sums[node] = sums;
      sums += partial.node_stride;
    }
  }
  p.columns = spec.out_features;
  p.sum_columns = spec.sum_columns();
  const LinearMatrix* const matrices[] = {&task.weights.matrix, &task.weights.up};
  for (int m = 0; m < (spec.gated ? 2 : 1); ++m) {
    p.bias[m] = matrices[m]->bias;
    p.scales[m] = matrices[m]->scales;
  }
  p.absmax = task.absmax.values;
  p.absmax_parts = task.absmax.parts;
  p.absmax_stride = task.absmax.stride;
  p.y = task.y.data;
  p.y_stride = task.y.token_stride;
  p.activation = spec.activation;
  p.gated = spec.gated;
  launch_finish(p, stream);
}

}  // namespace ringattn::cuda
