// SPDX-License-Identifier: Apache-2.0
// The library's front door: exact attention over a ring of ranks.
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
// Every rank passes the same job and options. What O and LSE are depends on the job, the kernel, the device model and
// the build alone: the number of ranks, layout, blocks, transport and overlap change where and when a tile is folded,
// never the bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "attention/options.hpp"
#include "attention/paged_keys.hpp"
#include "attention/plan_summary.hpp"
#include "attention/ring/engine.hpp"
#include "attention/ring/ring_runs.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/attention.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// This rank's shards, rows as Attention::layout() says. Strides are free; a fused QKV is three views. In the kernel's
// kind of memory.
struct Inputs {
  TensorView q;                  // [q_rows, heads, head_dim]
  TensorView k;                  // [k_rows, kv_heads, head_dim]
  TensorView v;                  // [k_rows, kv_heads, head_dim_v]
  const float* sinks = nullptr;  // [heads], present exactly when AttentionSpec::sinks
  // Instead of k and v, exactly where the job has a page size: a pool of the rank's own, with a table of its own. One
  // rank reads the pages where they lie; several copy theirs into the workspace first, and so does any rank whose pages
  // hold codes.
  PagedKeys pages{};
  // Instead of k, and of v, exactly where Job::format is not plain and the job has no page size: streams of the rank's
  // rows, dense or strided, and tables of the whole job (tails of all its sequences), the same on every rank.
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
  // Prepares. Collective. Chooses kernel and layout, makes the plan, agrees with the other ranks on job, options,
  // build, kernel and device, and allocates what runs need beside the caller's workspace. Throws Error: kUsage (the job
  // contradicts itself), kUnsupported (no kernel; unlike ranks), kMemory (the budget is too small), kPeer (deadline).
  // `transport` outlives the object.
  Attention(Job job, Transport& transport, Options options);
  // Gives up runs that were not waited for; with several ranks that ends the use of the transport.
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
  std::int64_t q_rows() const;  // rows of this rank's q, out and lse
  std::int64_t k_rows() const;  // rows of this rank's k and v

  // Bytes a run needs beside inputs and outputs: fold state, two blocks (on devices those are the object's own, because
  // peers write to them), a dense copy of k and v if the caller's are strided (`dense_kv` false) or lie in pages, and
  // of compressed ones a block's rows as they are decompressed.
  std::size_t workspace_bytes(bool dense_kv = true) const;

  // Collective. Computes this rank's rows of O and LSE. `workspace` is at least workspace_bytes() long, aligned to 256,
  // in the kernel's kind of memory. On devices the work is enqueued on `stream` and complete when run() returns, and so
  // is what was enqueued before. Where a rank's shapes don't fit the job, all throw kUsage; kPeer for a deadline or a
  // dead peer.
  RunStats run(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream = {},
               const BlockDone& block_done = {}, RunMode mode = RunMode::kWhole);

  // With Options::shorter_lengths: other lengths for the runs from here on, until the next call: as many sequences as
  // the job that the object was made with or fewer, none with more queries or keys than that one's of the same index.
  // job(), layout(), plan() and the rows are then of these lengths; workspace_bytes() too, and it is no more than
  // before. Every rank calls it with the same batch between the same runs. Nothing is agreed on, and no device memory
  // allocated; the plan is made anew on the host. Blocks of other lengths are not announced to peers, so with several
  // ranks hosts may wait for each other in enqueue(). Throws kUsage, and changes nothing, for lengths beyond what was
  // prepared.
  void set_lengths(const Batch& batch);

  // The same work without the waiting: every rank enqueues the same runs in the same order, and the memory behind all
  // views is in use until the stream has passed them. One workspace serves any number of runs, for they follow each
  // other on the stream; runs of other objects of the same transport may lie between. Nothing is agreed on: kUsage is
  // thrown here alone, before anything is enqueued. Nor is anything allocated. The host doesn't wait for the device,
  // unless the plan has so many blocks that their tables were not prepared, or one rank reads pages: their tables pass
  // through memory for four tasks, and those of the last four are kept, so layers that share a block table share one.
  // Nor does it wait for other ranks on transport p2p, unless they are threads of its process; on nccl as NCCL's own
  // calls do. A failure of an earlier run may surface here. A host kernel does the work before this returns.
  //
  // While `stream` is being captured the run becomes part of the graph, whose launches read and write the memory that
  // the views name now; the object and the workspace outlive it, and the graph's launches follow other runs of the
  // object in stream order. kUnsupported where a graph can't hold the run: several ranks, or tables that were not
  // prepared, as those of set_lengths() and of pages are not.
  void enqueue(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream = {});

  // Returns when the device has passed every run that was enqueued; at once if there is none. Throws what they failed
  // with: kPeer for a deadline or a dead peer. Launches of graphs are the caller's to wait for.
  void wait();

 private:
  struct Lengths;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
