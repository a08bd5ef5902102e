// SPDX-License-Identifier: Apache-2.0
// An SSM, linear attention or conv1d job (kernels/ssm/ssm.hpp): a spec and the lengths of its sequences. The same on
// every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/rope/rope.hpp"
#include "kernels/ssm/causal_conv1d.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn {

struct SsmJob {
  SsmSpec spec;
  std::vector<std::int64_t> lengths;  // [sequences] tokens; 0: the state passes through
  bool initial_states = false;        // initial states are given; else they are zero
  bool final_states = false;          // final states are written
  // One token of each sequence by the kernel's update(), which reads and writes each state once. Has initial and final
  // states. Results agree with those of a whole sequence within a tolerance.
  bool update = false;
  // Causal conv1d before the SSM, over x, B and C side by side (conv1d_channels()); with state_decays only over x.
  std::optional<CausalConv1dSpec> convolution = {};
  // The job has only the convolution, with input x and output y. Of the spec only dtype and heads are used; with
  // state_decays set the heads are the channels.
  bool conv1d_only = false;
  bool initial_halos = false;  // initial halos of the convolution are given; else they are zeros
  bool final_halos = false;    // final halos of the convolution are written
  // Linear attention only: the rows of B and C (k and q) are rotated, and rounded once to the dtype.
  std::optional<RopeSpec> rope = {};

  std::int64_t tokens() const;  // of all sequences
};

// "scan, bf16, 80 heads of 64, state 128, 1 group; 2 sequences, 131072 tokens, initial states"
std::string describe(const SsmJob& job);

// The settings that describe() rounds or leaves out, exactly: of dt, or of linear attention the scale and RoPE.
std::string exact_settings(const SsmJob& job);

// Number of channels of the convolution before an SSM.
int conv1d_channels(const SsmSpec& spec);

// "an SSM", "linear attention" or "a causal conv1d", in messages.
std::string_view op_noun(const SsmJob& job);

// Throws kUsage if the members of a job contradict each other. Lengths are checked when they are distributed.
void check_ssm_job(const SsmJob& job);

// Bytes of one sequence's state, all heads.
std::int64_t state_bytes(const SsmSpec& spec);
// Bytes that a sequence passes on to the next rank: its state; for a convolution only, its halo.
std::int64_t carried_bytes(const SsmJob& job);
std::string_view carried_name(const SsmJob& job);  // "final_states", "final_conv_state"
std::string_view rows_name(const SsmSpec& spec);   // name of the result: "y", "out"
// View of the carried data of `sequences` sequences in a file: [sequences, heads, head_dim · state_dim], or [sequences,
// channels, width − 1].
TensorView carried_view(const SsmJob& job, const void* data, std::int64_t sequences);

}  // namespace ringattn
