// SPDX-License-Identifier: Apache-2.0
// Ring step of the backward pass: adds each block's keys to dQ of the rank's queries, and its queries to dK and dV of
// the rank's keys.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "attention/ring/engine.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "ops/attention_backward/sink_gradient.hpp"

namespace ringattn {

class BackwardRingStep final : public RingStep {
 public:
  // Memory of a run.
  struct Memory {
    RowStatsTask stats;  // of the rank's queries
    TensorView q;        // the rank's queries and their dO
    TensorView dout;
    BackwardKeySource keys;                        // the rank's keys, in place or as dense copies
    std::array<BackwardKeySource, 2> key_buffers;  // block b uses key_buffers[b % 2]
    BackwardQuerySource queries;                   // the rank's queries, in place or as dense copies
    std::array<BackwardQuerySource, 2> query_buffers;
    void* dq_state = nullptr;  // if Plan::keeps_state
    void* dkv_state = nullptr;
    MutableTensorView dq;
    MutableTensorView dk;
    MutableTensorView dv;
    SinkGradient* sinks = nullptr;  // with sinks
    float* dsinks = nullptr;
    bool exchanges = true;  // exchange the ranks' sums of the sinks' gradient
    double seconds = 0.0;   // estimated duration of the run
  };

  // `keys`: the rank's keys, as runs of Plan::to_keys at positions of keys. All arguments outlive the object.
  BackwardRingStep(const Plan& plan, std::span<const BackwardSequence> sequences, std::span<const QueryRun> keys,
                   AttentionBackwardKernel& kernel, const Memory& memory)
      : plan_(plan), sequences_(sequences), keys_(keys), kernel_(kernel), memory_(memory) {}

  void prepare(Stream stream, const Progress& progress) override;
  void compute(const ArrivedBlock& block, Stream stream, const Progress& progress) override;
  bool finish(Stream stream, const Progress& progress) override;

 private:
  BackwardTask task_of(const Plan& direction, const ArrivedBlock& block) const;

  const Plan& plan_;
  std::span<const BackwardSequence> sequences_;
  std::span<const QueryRun> keys_;
  AttentionBackwardKernel& kernel_;
  const Memory& memory_;
};

}  // namespace ringattn
