// SPDX-License-Identifier: Apache-2.0
// A job of the gated delta rule (kernels/gated_delta/gated_delta.hpp): a spec and the lengths of its sequences. The
// same on every rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn {

struct GatedDeltaJob {
  GatedDeltaSpec spec;
  std::vector<std::int64_t> lengths;  // [sequences] tokens; 0: the state passes through
  bool initial_states = false;        // initial states are given; else they are zero
  bool final_states = false;          // final states are written
  // One token of each sequence by the kernel's update(). Has initial and final states. Results agree with those of a
  // whole sequence within a tolerance.
  bool update = false;

  std::int64_t tokens() const;  // of all sequences
};

// "GDN, bf16, 32 value heads of 128, 16 key heads of 128; 2 sequences, 131072 tokens, initial states"
std::string describe(const GatedDeltaJob& job);

// Throws kUsage if the members of a job contradict each other. Lengths are checked when they are distributed.
void check_gated_delta_job(const GatedDeltaJob& job);

// Bytes of one sequence's state, all value heads: what a rank passes on for a sequence that continues on another one.
std::int64_t state_bytes(const GatedDeltaSpec& spec);

// FLOPs of one token, all value heads: a multiplication and an addition for each element of the state, to read it with
// k, to update it and to read it with q.
double gated_delta_token_flops(const GatedDeltaSpec& spec);
// Bytes of one token's rows: q, k, v, log_decay, beta and o.
std::int64_t gated_delta_token_bytes(const GatedDeltaSpec& spec);

}  // namespace ringattn
