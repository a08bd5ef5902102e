// SPDX-License-Identifier: Apache-2.0
// A job of scans (kernels/ssm.hpp): what is computed, over which sequences. Plain data, the same on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/causal_conv1d.hpp"
#include "kernels/ssm.hpp"

namespace ringattn {

struct SsmJob {
  SsmSpec spec;
  std::vector<std::int64_t> lengths;  // [sequences] tokens; 0: the state passes through
  bool initial_states = false;        // sequences start from given states, else from zero
  bool final_states = false;          // the states behind them are wanted
  // One token of each sequence by the kernel's update(), which reads and writes each state once: from initial states to
  // final ones, both of which it has. Such rows and states agree with those of a scan within a tolerance.
  bool update = false;
  // In front of the scan, over x, B and C side by side (conv1d_channels()); with state_decays over x alone.
  std::optional<CausalConv1dSpec> convolution = {};
  // The convolution is the whole job, and y is what it makes of x. Of the spec only dtype and heads are looked at: with
  // state_decays they are its channels.
  bool conv1d_only = false;
  bool initial_halos = false;  // sequences go on from given tokens in front of the convolution, else from zeros
  bool final_halos = false;    // their last tokens in front of it are wanted

  std::int64_t tokens() const;  // of all sequences
};

// "scan, bf16, 80 heads of 64, state 128, 1 group; 2 sequences, 131072 tokens, initial states"
std::string describe(const SsmJob& job);

// Channels that a convolution in front of a scan has.
int conv1d_channels(const SsmSpec& spec);

// Throws kUsage where the parts of a job contradict each other; lengths are looked at by whoever deals them.
void check_ssm_job(const SsmJob& job);

// Bytes of one sequence's state, all heads.
std::int64_t state_bytes(const SsmSpec& spec);
// Bytes of what a sequence hands on to who goes on with it: its state, or of a convolution alone its last tokens.
std::int64_t carried_bytes(const SsmJob& job);
std::string_view carried_name(const SsmJob& job);  // "final_states", "final_conv_state"
// It as files have it, of so many sequences: [sequences, heads, head_dim · state_dim], or [sequences, channels,
// width − 1].
TensorView carried_view(const SsmJob& job, const void* data, std::int64_t sequences);

}  // namespace ringattn
