// SPDX-License-Identifier: Apache-2.0
// Public API of sums of gradients over ranks with different tokens (data parallelism), with the same bits for any
// number of ranks.
//
// - A training step's tokens are divided into kLinearLeaves contiguous leaves, whatever the number of ranks. Rank r of
// P
//   has the leaves of linear_leaves(P, r), so one rank has all of them, and with more than kLinearLeaves ranks some
//   have none. By default leaf i of T tokens is linear_tokens(T, kLinearLeaves, i), by packed index. Any other division
//   that does not depend on the ranks is possible, for instance between sequences.
// - A leaf's gradient is that of one backward pass over its tokens, in fp32: for a weight, the left fold over units of
//   tokens that LinearBackward computes. A leaf without tokens is left out.
// - Leaves are added in fp32 by the tree of row-parallel layers (kernels/linear/linear.hpp):
//   ((0+1)+(2+3))+((4+5)+(6+7)). Each rank adds a part of the elements. The others send it one sum for each of their
//   aligned nodes. Then each rank gets the whole sum. It is not rounded; the caller rounds it once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "ops/linear/linear.hpp"

namespace ringattn {

class GradientReduction {
 public:
  // Collective. For gradients of `elements` elements, the same on every rank. `parameters`: a text that lists the
  // parameters in order, such as "float32 [4, 3], float32 [3]"; it is only compared with the other ranks' texts. Throws
  // kUsage, kUnsupported (ranks differ) and kMemory.
  GradientReduction(std::int64_t elements, Transport& transport, LinearOptions options, std::string parameters = {});
  // Abandons work that was not waited for. With several ranks the transport is then unusable.
  ~GradientReduction();
  GradientReduction(GradientReduction&&) noexcept;
  GradientReduction& operator=(GradientReduction&&) = delete;

  std::int64_t elements() const;
  const LinearChoice& kernel() const;
  std::size_t memory_bytes() const;  // allocated by the object
  LeafRange leaves() const;          // this rank's

  // Adds the gradient of this rank's next leaf, fp32 [elements]; null: the leaf has no tokens. Not collective. The
  // memory is in use until the stream has passed the call. Throws kUsage if all leaves were added.
  void add(const float* gradient, Stream stream = {});
  // Forgets the leaves that were added since the last sum.
  void reset();

  // Collective, after all leaves were added. sum: fp32 [elements], written. The next add() begins the next sum. run()
  // validates on all ranks, and waits. enqueue() only enqueues on a device, and computes on a host.
  void run(float* sum, Stream stream = {});
  void enqueue(float* sum, Stream stream = {});
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
