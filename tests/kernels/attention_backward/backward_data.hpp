// SPDX-License-Identifier: Apache-2.0
// Inputs of attention backward, its gradients in fp64 by their definition, and a runner that arranges the work of the
// kernels in ways that must not change a bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention_backward/attention_backward.hpp"
#include "tests/support/attention_inputs.hpp"

namespace ringattn::testing {

// Dense arrays, the sequences one after the other.
struct BackwardInputs {
  AttentionInputs forward;
  Dtype gradients = Dtype::kBf16;
  std::vector<std::byte> out;   // [q_tokens, heads, head_dim_v]
  std::vector<float> lse;       // [q_tokens, heads]
  std::vector<std::byte> dout;  // [q_tokens, heads, head_dim_v]
  std::vector<float> dlse;      // [q_tokens, heads], or empty

  AttentionBackwardSpec spec() const { return {forward.spec, gradients}; }
  void set_dout(std::int64_t token, int head, int dim, float value);
};

// random_inputs() with O and LSE of cpu_attention and a normal dO (and dLSE, where `with_dlse`).
BackwardInputs random_backward_inputs(const AttentionSpec& spec, const std::vector<SequenceShape>& sequences,
                                      std::uint64_t seed, bool with_dlse = false);
// Computes O and LSE again after the forward inputs have changed.
void run_forward(BackwardInputs& inputs);

struct Gradients {
  std::vector<std::byte> dq;      // [q_tokens, heads, head_dim]
  std::vector<std::byte> dk;      // [k_tokens, kv_heads, head_dim]
  std::vector<std::byte> dv;      // [k_tokens, kv_heads, head_dim_v]
  std::vector<float> stats;       // [q_tokens, heads, kRowStats]
  std::vector<float> sink_terms;  // [q_tokens, heads] with sinks

  // Whether every byte is equal. Counts as a check.
  [[nodiscard]] bool same_bits(const Gradients& other) const;
};

struct BackwardArrangement {
  int threads = 1;
  std::int64_t tiles_per_task = 0;  // tiles of all sequences in order; 0: one task
  int ranks = 1;                    // rows are dealt to that many in runs of 1 to `max_run`
  std::int64_t max_run = 37;
  std::uint64_t seed = 1;
  bool strided = false;          // tokens and heads of rows and of gradients lie apart
  bool separate_finish = false;  // the last task has no tile
};

// Runs cpu_attention_backward. Tiles lie in two sources, with NaN around them; states and gradients are NaN before.
Gradients differentiate(const BackwardInputs& inputs, const BackwardArrangement& arrangement = {});

// Differs from the fp64 gradients by more than the precision of the dtype explains? Returns where first; empty: no.
std::string check_gradients(const BackwardInputs& inputs, const Gradients& result);

}  // namespace ringattn::testing
