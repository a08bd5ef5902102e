// SPDX-License-Identifier: Apache-2.0
// Public API of the causal conv1d before an SSM layer. Sequences are distributed over the ranks as by Ssm
// (ops/ssm/ssm.hpp), so its output rows are the SSM layer's input rows.
//
// A rank needs the last width − 1 tokens before each of its runs, its halo. Halos are sent once, from the rank that has
// the tokens. Bits don't depend on the number of ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/ssm/causal_conv1d.hpp"

namespace ringattn {

using CausalConv1dChoice = KernelChoice<CausalConv1dSpec>;

// The same on every rank.
struct CausalConv1dJob {
  CausalConv1dSpec spec;
  std::vector<std::int64_t> lengths;  // [sequences] tokens; 0: the halo passes through
  bool initial_halos = false;         // initial halos are given; else they are zeros
  bool final_halos = false;           // final halos are written
  // One token of each sequence by the kernel's update(), with initial and final halos. The bits are those of the same
  // tokens in a run over the sequence.
  bool update = false;
};

// The bits of the result do not depend on these options.
struct CausalConv1dOptions {
  KernelRequest kernel;
  // As SsmOptions::runs, but of whole segments of 2,048 tokens, so that a gated delta rule's runs fit, too.
  std::optional<std::vector<std::vector<TokenRun>>> runs;
  int threads = 0;                // of a host kernel; 0: this rank's share
  double timeout_seconds = 60.0;  // of a wait for a peer that should be ready and sends no heartbeats
};

// Rows of this rank's tokens, and dense halos [sequences, width − 1, channels], oldest token first, in the kernel's
// kind of memory. The memory is in use until the stream has passed the convolution.
struct CausalConv1dInputs {
  TensorView x;                   // [own tokens, 1, channels]; any token stride, as in a fused projection
  const float* weight = nullptr;  // [channels, width]
  const float* bias = nullptr;    // [channels], exactly if CausalConv1dSpec::bias
  // Halos of the sequences that begin on this rank, exactly if CausalConv1dJob::initial_halos and there are such
  // sequences.
  const void* initial_halos = nullptr;
  // [own tokens], for an update with a pool of halos: as SsmInputs::slots.
  const std::int32_t* slots = nullptr;
};

struct CausalConv1dOutputs {
  MutableTensorView y;  // [own tokens, 1, channels]
  // Halos of the sequences that end on this rank, exactly if CausalConv1dJob::final_halos and there are such sequences.
  // May be the initial halos of the same sequences.
  void* final_halos = nullptr;
};

class CausalConv1d {
 public:
  // Collective. `transport` must outlive the object. Throws Error: kUsage (the job or the runs contradict themselves),
  // kUnsupported (no kernel, or ranks differ), kMemory (allocation failed), kPeer (deadline).
  CausalConv1d(CausalConv1dJob job, Transport& transport, CausalConv1dOptions options);
  // Abandons work that was not waited for. With several ranks the transport is then unusable.
  ~CausalConv1d();
  CausalConv1d(CausalConv1d&&) noexcept;
  CausalConv1d& operator=(CausalConv1d&&) = delete;

  const CausalConv1dJob& job() const;
  const CausalConv1dChoice& kernel() const;
  Backend& backend();
  const Layout& layout() const;

  // As the functions of Ssm.
  const std::vector<std::int32_t>& beginning() const;
  const std::vector<std::int32_t>& ending() const;

  // As Ssm::run(), enqueue() and wait().
  void run(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs, Stream stream = {});
  void enqueue(const CausalConv1dInputs& inputs, const CausalConv1dOutputs& outputs, Stream stream = {});
  void wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
