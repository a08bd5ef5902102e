// SPDX-License-Identifier: Apache-2.0
// Public API of the gradients of the causal conv1d (kernels/ssm/causal_conv1d.hpp), on the shards of CausalConv1d.
//
// A rank needs the width − 1 tokens before each of its runs, and x and dy of the width − 1 tokens after it. They are
// sent once, with the gradient of a final halo that reaches into the run. dx and the gradients of initial halos are
// pure functions of the sequence. dweight and dbias are sums over the batch in units of tokens
// (kernels/common/token_units.hpp): each rank receives the units of all others for its share of the channels, adds them
// in order, and sends the sums to all. So every rank gets the sums over all ranks: don't reduce them again.
#pragma once

#include <memory>

#include "ops/conv1d/causal_conv1d.hpp"

namespace ringattn {

// As CausalConv1dInputs.
struct CausalConv1dBackwardInputs {
  TensorView x;                         // [own tokens, 1, channels], of the forward
  const float* weight = nullptr;        // [channels, width]
  const float* bias = nullptr;          // [channels], exactly if CausalConv1dSpec::bias
  const void* initial_halos = nullptr;  // as in the forward
  TensorView dy;                        // [own tokens, 1, channels], gradient of y
  // Gradients of the halos of the sequences that end on this rank, exactly if CausalConv1dJob::final_halos and there
  // are such sequences.
  const void* dfinal_halos = nullptr;
};

struct CausalConv1dBackwardOutputs {
  MutableTensorView dx;      // [own tokens, 1, channels]
  float* dweight = nullptr;  // [channels, width]
  float* dbias = nullptr;    // [channels], exactly if CausalConv1dSpec::bias
  // Gradients of the halos of the sequences that begin on this rank, exactly if CausalConv1dJob::initial_halos and
  // there are such sequences.
  void* dinitial_halos = nullptr;
};

class CausalConv1dBackward {
 public:
  // Collective. `job` and `options` are those of the forward; kUnsupported for an update. Otherwise as CausalConv1d.
  CausalConv1dBackward(CausalConv1dJob job, Transport& transport, CausalConv1dOptions options);
  // Abandons work that was not waited for. With several ranks the transport is then unusable.
  ~CausalConv1dBackward();
  CausalConv1dBackward(CausalConv1dBackward&&) noexcept;
  CausalConv1dBackward& operator=(CausalConv1dBackward&&) = delete;

  const CausalConv1dJob& job() const;
  const CausalConv1dOptions& options() const;
  const CausalConv1dChoice& kernel() const;
  Backend& backend();
  const Layout& layout() const;
  const std::vector<std::int32_t>& beginning() const;  // as those of CausalConv1d
  const std::vector<std::int32_t>& ending() const;

  // As the functions of CausalConv1d.
  void run(const CausalConv1dBackwardInputs& inputs, const CausalConv1dBackwardOutputs& outputs, Stream stream = {});
  void enqueue(const CausalConv1dBackwardInputs& inputs, const CausalConv1dBackwardOutputs& outputs,
               Stream stream = {});
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
