// SPDX-License-Identifier: Apache-2.0
// Public API of the gradients of a floating-point linear layer, on the shards of Linear.
//
// - z = x · Wᵀ + b, as a layer without activation and gate gives it, rounded to the dtype. It is computed only if the
//   layer has an activation.
// - dz = dy · a'(z), and du of a gated layer (kernels/linear/linear.hpp), rounded to the dtype. Without an activation
//   dz is dy.
// - dx = dz · W, rounded to the dtype.
// - dweight = dzᵀ · x and dbias = Σ dz, in fp32.
//
// - dx is a linear layer over Wᵀ: the sums over N have the order that linear.hpp has for sums over K. That layer is
//   ordinary for an ordinary layer, row-parallel for a column-parallel one, and column-parallel for a row-parallel one.
//   The columns of a gated layer are its gate columns, then its up columns; if it is column-parallel, so for each leaf
//   in turn (linear_gradient_order()). A row of dx depends on the row of x and dy, the weights and the spec, and
//   neither on the number of tokens nor on the number of ranks.
// - dweight and dbias are sums over a call's tokens in units of tokens (kernels/common/token_units.hpp), which count
//   from its first token. Ranks that share the layer have all tokens, so each has the gradients of its shard. Ranks
//   that don't share it (kNone) get the sums over their own tokens.
// - dz of a row-parallel layer over several ranks needs all tokens, so its output is replicated, and so is dy.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/linear/linear.hpp"

namespace ringattn {

// Views' memory must live until the stream has completed the work. Outputs must not overlap inputs.
struct LinearBackwardInputs {
  TensorView x;   // [tokens, 1, features()], of the forward
  TensorView dy;  // gradient of y, of y's shape
  // As in the forward. Only read if there is an activation.
  LinearWeights weights;
  // [features(), columns()] of the dtype, gated [features(), 2 columns()]: the transposed shard of W, with its columns
  // in the order of linear_gradient_order(). Only `data` and `row_stride` are read, and only for dx.
  LinearMatrix transposed;
};

struct LinearBackwardOutputs {
  // [tokens, 1, features()]; no data: not wanted, on any rank. kColumn: the sum over all ranks, on each of them.
  MutableTensorView dx;
  float* dweight = nullptr;  // [columns(), features()], gated [2 columns(), features()]; null: not wanted
  float* dbias = nullptr;    // [columns()], gated [2 columns()]; null: not wanted
};

// The rows of a rank's weight, with gate rows above up rows, as runs in the order in which dx sums them.
std::vector<FeatureRange> linear_gradient_order(const LinearJob& job, int ranks, int rank);

class LinearBackward {
 public:
  // Collective. `job` and `options` are those of the forward. Throws as Linear does, and kUnsupported for quantized
  // weights, for numbers of features that are not multiples of 8, for outputs that are divided by tokens, and for
  // shared columns whose cuts are not leaf boundaries of dx.
  LinearBackward(LinearJob job, Transport& transport, LinearOptions options);
  // Abandons work that was not waited for. With several ranks the transport is then unusable.
  ~LinearBackward();
  LinearBackward(LinearBackward&&) noexcept;
  LinearBackward& operator=(LinearBackward&&) = delete;

  const LinearJob& job() const;
  const LinearChoice& kernel() const;  // of dx
  std::size_t memory_bytes() const;    // allocated by the object
  FeatureRange features() const;       // as those of Linear
  FeatureRange columns() const;

  // Collective if the layer is shared, as the functions of Linear. All ranks want the same outputs.
  void run(const LinearBackwardInputs& inputs, const LinearBackwardOutputs& outputs, Stream stream = {});
  void enqueue(const LinearBackwardInputs& inputs, const LinearBackwardOutputs& outputs, Stream stream = {});
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
