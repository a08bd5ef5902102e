// SPDX-License-Identifier: Apache-2.0
// The library's front door for the causal convolution in front of a scan, over sequences that ranks share as a Ssm
// does (attention/ssm.hpp): the rows that it gives are those that the scan takes.
//
// A rank needs the last width − 1 tokens in front of each of its runs: they travel once, from the rank that has them.
// Bits don't depend on the number of ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/tokens/layout.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/causal_conv1d.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

using CausalConv1dChoice = KernelChoice<CausalConv1dSpec>;

// Plain data, the same on every rank.
struct CausalConv1dJob {
  CausalConv1dSpec spec;
  std::vector<std::int64_t> lengths;  // [sequences] tokens; 0: the halo passes through
  bool initial_halos = false;         // sequences go on from given tokens, else from zeros
  bool final_halos = false;           // the last tokens of sequences are wanted
  // One token of each sequence by the kernel's update(), from initial halos to final ones, both of which it has. The
  // bits are those of the same tokens in a run.
  bool update = false;
};

// Nothing here changes a bit of the result.
struct CausalConv1dOptions {
  KernelRequest kernel;
  std::optional<std::vector<std::vector<TokenRun>>> runs;  // as SsmOptions::runs
  int threads = 0;                                         // of a host kernel; 0: this rank's share
  double timeout_seconds = 60.0;  // of a wait for a peer that should be ready and gives no signs of life
};

// The rows of this rank's tokens, and halos [sequences, width − 1, channels] dense, oldest token first; in the kernel's
// kind of memory. In use until the stream has passed the convolution.
struct CausalConv1dInputs {
  TensorView x;                   // [own tokens, 1, channels]; tokens may be apart, as in a fused projection
  const float* weight = nullptr;  // [channels, width]
  const float* bias = nullptr;    // [channels], present exactly when CausalConv1dSpec::bias
  // Of the sequences that begin on this rank, present exactly when CausalConv1dJob::initial_halos and there are some.
  const void* initial_halos = nullptr;
  // [own tokens], of an update whose halos are some of many: as SsmInputs::slots.
  const std::int32_t* slots = nullptr;
};

struct CausalConv1dOutputs {
  MutableTensorView y;  // [own tokens, 1, channels]
  // Of the sequences that end on this rank, present exactly when CausalConv1dJob::final_halos and there are some. May
  // be the initial halos of the same sequences.
  void* final_halos = nullptr;
};

class CausalConv1d {
 public:
  // Prepares. Collective. Throws Error: kUsage (the job or the runs contradict themselves), kUnsupported (no kernel;
  // unlike ranks), kMemory (no room), kPeer (deadline). `transport` outlives the object.
  CausalConv1d(CausalConv1dJob job, Transport& transport, CausalConv1dOptions options);
  // Gives up what was not waited for; with several ranks that ends the use of the transport.
  ~CausalConv1d();
  CausalConv1d(CausalConv1d&&) noexcept;
  CausalConv1d& operator=(CausalConv1d&&) = delete;

  const CausalConv1dJob& job() const;
  const CausalConv1dChoice& kernel() const;
  Backend& backend();
  const Layout& layout() const;

  // As Ssm's.
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
