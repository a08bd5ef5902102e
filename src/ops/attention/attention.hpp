// SPDX-License-Identifier: Apache-2.0
// Public API of exact attention over a ring of ranks.
//
//   Attention attention(job, transport, options);   // collective: kernel, layout, plan, memory
//   // q, k and v: this rank's rows, attention.q_rows() and k_rows() of them, as attention.layout() deals them
//   // workspace: attention.workspace_bytes() of the kernel's kind of memory
//   attention.run({q, k, v}, {out, lse}, workspace);                    // collective; returns when it is done
//
// or, for layers that follow each other on a stream of a GPU:
//
//   for (auto& layer : layers) attention.enqueue(layer.inputs, layer.outputs, workspace, stream);
//   attention.wait();
//
// Every rank passes the same job and options. The bits of O and LSE depend only on the job, the kernel, the device
// model and the build. The number of ranks, layout, blocks, transport and overlap change where and when a tile is
// computed, but never the bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "attention/options.hpp"
#include "attention/ring/engine.hpp"
#include "attention/ring/ring_runs.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "ops/attention/paged_keys.hpp"
#include "ops/attention/plan_summary.hpp"

namespace ringattn {

// Tensors of this rank, in the kernel's kind of memory: the rows that Attention::layout() assigns to it. Strides are
// free, so a fused QKV tensor is passed as three views.
struct Inputs {
  TensorView q;                  // [q_rows, heads, head_dim]
  TensorView k;                  // [k_rows, kv_heads, head_dim]
  TensorView v;                  // [k_rows, kv_heads, head_dim_v]
  const float* sinks = nullptr;  // [heads], exactly if AttentionSpec::sinks
  // Instead of k and v, exactly if the job has a page size: this rank's page pool and its block table. With one rank
  // the kernel reads plain pages in place. Several ranks, and any rank with quantized pages, first gather the pages
  // into the workspace.
  PagedKeys pages{};
  // Instead of k and v, exactly if Job::format is not plain and the job has no page size: streams of this rank's rows,
  // dense or strided, and the tables of the whole job (tails of all its sequences), equal on every rank.
  CompressedRows quantized_k{};
  CompressedRows quantized_v{};
};

struct Outputs {
  MutableTensorView out;  // [q_rows, heads, head_dim_v]
  RowView lse;            // [q_rows, heads] natural logarithm, −∞ for a row without keys; no data: not wanted
  std::optional<AttentionStateView> state;  // with Options::state_out
};

class Attention {
 public:
  // Collective. Chooses kernel and layout, makes the plan, compares job, options, build, kernel and device with the
  // other ranks, and allocates what runs need besides the caller's workspace. `transport` must outlive the object.
  // Throws Error: kUsage (the job contradicts itself), kUnsupported (no kernel, or ranks differ), kMemory (the budget
  // is too small), kPeer (deadline).
  Attention(Job job, Transport& transport, Options options);
  // Abandons runs that were not waited for. With several ranks the transport is then unusable.
  ~Attention();
  Attention(Attention&&) noexcept;
  Attention& operator=(Attention&&) = delete;

  const Job& job() const;
  const Options& options() const;
  const AttentionChoice& kernel() const;
  Backend& backend();
  const JobLayout& layout() const;
  const Plan& plan() const;
  const TimeEstimate& time_estimate() const;
  std::int64_t q_rows() const;  // tokens of this rank's q, out and lse
  std::int64_t k_rows() const;  // tokens of this rank's k and v

  // Bytes that a run needs besides inputs and outputs: attention state, two block buffers (on devices the object owns
  // them, because peers write to them), a dense copy of k and v if they are strided (`dense_kv` false) or paged, and
  // decompressed rows of one block if they are compressed.
  std::size_t workspace_bytes(bool dense_kv = true) const;

  // Collective. Computes this rank's rows of O and LSE. `workspace` has at least workspace_bytes(), is aligned to 256
  // bytes and lies in the kernel's kind of memory. On a device the work is enqueued on `stream`, and run() returns when
  // the stream has completed it. If the shapes of any rank don't fit the job, all ranks throw kUsage. Throws kPeer for
  // a deadline or a dead peer.
  RunStats run(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream = {},
               const BlockDone& block_done = {}, RunMode mode = RunMode::kWhole);

  // Requires Options::shorter_lengths. Sets other lengths for the following runs. `batch` has at most as many sequences
  // as the job at construction, and sequence i has at most as many queries and keys as that job's sequence i. job(),
  // layout(), plan() and row counts change to these lengths. workspace_bytes() changes too, but never grows. Every rank
  // calls it with the same batch between the same runs; ranks do not compare it. It makes a new plan on the host and
  // allocates no device memory. The buffers of such blocks are not announced to peers, so with several ranks hosts may
  // wait for each other in enqueue(). Throws kUsage, and changes nothing, for lengths beyond the prepared ones.
  void set_lengths(const Batch& batch);

  // Enqueues a run without waiting for it. Every rank enqueues the same runs in the same order. The memory of all views
  // stays in use until the stream has passed the run. Runs on one stream are ordered, so they may share a workspace;
  // runs of other objects of the same transport may lie between them. It allocates nothing and compares nothing with
  // other ranks: kUsage is thrown only on this rank, before anything is enqueued. A failure of an earlier run may be
  // thrown here. A host kernel has done the work on return.
  //
  // The host does not wait for the device, with two exceptions: plans with so many blocks that their task tables were
  // not prepared, and one rank that reads pages. These tables pass through staging memory for four tasks. The tables of
  // the last four tasks are kept, so layers with the same block table share one. The host does not wait for other ranks
  // on transport p2p, unless they are threads of its process. On nccl it waits as NCCL calls do.
  //
  // If `stream` is being captured, the run becomes part of the graph. Launches read and write the memory that the views
  // name at capture. Object and workspace must outlive the graph, and its launches must be ordered after other runs of
  // the object. Throws kUnsupported if a graph can't hold the run: with several ranks, or with tables that are not
  // prepared, as after set_lengths() and with pages.
  void enqueue(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream = {});

  // Returns when the device has passed all enqueued runs. Throws their failure: kPeer for a deadline or a dead peer.
  // The caller waits for graph launches itself.
  void wait();

 private:
  struct Lengths;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
