// SPDX-License-Identifier: Apache-2.0
// Runs a backward kernel of the table over BackwardInputs in arrangements that must not change a bit: rows distributed
// over ranks, tiles divided into tasks and scattered over sources, strided views, thread counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/common/registry.hpp"
#include "tests/support/attention_inputs.hpp"

namespace ringattn::testing {

using AttentionBackwardRow = KernelRow<AttentionBackwardSpec>;

// Packed inputs of one backward pass over several sequences.
struct BackwardInputs {
  AttentionInputs attention;
  Dtype gradients = Dtype::kF32;
  std::vector<std::byte> out;   // [q_tokens, heads, head_dim_v], of the forward
  std::vector<float> lse;       // [q_tokens, heads], of the forward
  std::vector<std::byte> dout;  // [q_tokens, heads, head_dim_v]
  std::vector<float> dlse;      // [q_tokens, heads], or empty: 0

  AttentionBackwardSpec spec() const { return {attention.spec, gradients}; }
  TensorView out_view(std::size_t sequence) const;
  TensorView dout_view(std::size_t sequence) const;
  // One element of dO; `token` is packed.
  void set_dout(std::int64_t token, int head, int dim, float value);
};

// Sets out and lse to the fp64 oracle's results, rounded.
void compute_forward(BackwardInputs& inputs);

// Standard normal q, k, v, dO, dLSE and sinks, and the forward's results. The same for the same seed.
BackwardInputs random_backward_inputs(const AttentionBackwardSpec& spec, std::vector<SequenceShape> sequences,
                                      std::uint64_t seed);
// The same with a random O, and an LSE close to that of random scores, for sequences that take the oracle too long.
BackwardInputs unrelated_backward_inputs(const AttentionBackwardSpec& spec, std::vector<SequenceShape> sequences,
                                         std::uint64_t seed);

// With one rank and one task, dQ, dK and dV are computed by one call, add_dq_and_dkv().
struct BackwardArrangement {
  int threads = 1;
  std::int64_t tiles_per_task = 0;  // tiles (of all sequences, in order) of one task; 0: one task has all
  std::uint64_t cuts = 0;           // not 0: tasks end at random tiles of this seed
  int ranks = 1;                    // rows are dealt among them; each has a state of its own
  std::int64_t run_rows = 0;        // longest run of rows; 0: one run per sequence
  std::uint64_t deal = 0;     // not 0: runs have random lengths, ranks and places in memory, of this seed; 0: in turn
  bool needed_tiles = false;  // a rank's tasks have the tiles that its rows process, and no others
  std::uint64_t shuffle = 0;  // not 0: tiles lie in several sources, in an order of this seed, with NaN in between
  std::size_t sources = 3;    // that many, with a shuffle
  bool strided = false;       // tokens and heads of all tensors lie apart
  bool odd = false;           // rows lie at odd elements, where no vector load can read or write them
  bool separate_finish = false;  // the last task only finishes
  bool keep_state = false;       // the last task saves as well, and what it saved must give the same rows once more
};

// Dense, in the order of packed tokens.
struct BackwardResult {
  std::vector<std::byte> dq;      // [q_tokens, heads, head_dim]
  std::vector<std::byte> dk;      // [k_tokens, kv_heads, head_dim]
  std::vector<std::byte> dv;      // [k_tokens, kv_heads, head_dim_v]
  std::vector<float> stats;       // [q_tokens, heads, kRowStats]
  std::vector<float> sink_terms;  // [q_tokens, heads], or empty
  std::string error;              // a write outside of rows, or a saved state that gives other rows; empty: none

  // Whether every byte is equal, including NaN patterns and signs of zero. Counts as a check if there are bytes.
  [[nodiscard]] bool same_bits(const BackwardResult& other) const;
};

// A backward kernel of the table, made for a spec.
class BackwardRunner {
 public:
  BackwardRunner(const AttentionBackwardRow& row, const AttentionBackwardSpec& spec, int threads = 1);

  // Computes the row stats and all gradients. States and outputs are NaN before, and so is every row of a source that
  // belongs to no tile.
  BackwardResult run(const BackwardInputs& inputs, const BackwardArrangement& arrangement = {});

  AttentionBackwardKernel& kernel() { return *kernel_; }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<AttentionBackwardKernel> kernel_;
};

// Makes the kernel, for the arrangement's threads, and computes everything once.
BackwardResult differentiate_with(const AttentionBackwardRow& row, const BackwardInputs& inputs,
                                  const BackwardArrangement& arrangement = {});

}  // namespace ringattn::testing
