// SPDX-License-Identifier: Apache-2.0
// The library's front door: exact attention over a ring of ranks.
//
//   Attention attention(job, *transport, options);               // collective: kernel, layout, plan
//   allocate attention.shard(), attention.workspace_bytes()      // or let the views point into what you have
//   attention.run({q, k, v}, {out, lse}, workspace);             // collective
//
// Every rank passes the same job and options. What O and LSE are depends on the job, the kernel, the device model and
// the build alone: the number of ranks, layout, blocks, transport and overlap change where and when a tile is folded,
// never the bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/ring/plan.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/fold.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// How a job is run. Nothing here changes a bit of the result.
struct Options {
  KernelRequest kernel;
  LayoutRequest layout;
  // The caller's own distribution instead of `layout`, if its data lie otherwise: for each rank, its tokens.
  std::optional<std::vector<std::vector<TokenRun>>> query_runs;
  std::optional<std::vector<std::vector<TokenRun>>> key_runs;
  std::int64_t block_tokens = 0;  // 0: from the machine model and the memory budget
  std::size_t memory_budget = 0;  // bytes a rank may use, inputs and outputs included; 0: no limit
  bool overlap = true;            // the next block travels while this one is folded
  bool checksum = false;          // verify each part of a block after its travels
  bool state_out = false;         // run() also writes Outputs::state
  int threads = 0;                // of a host kernel; 0: this rank's share of the processors it may use
  // Of every single wait for a peer that should be ready. A wait for one that computes lasts longer by ten times what
  // the machine model predicts for the longest block.
  double timeout_seconds = 60.0;
  // What the plan and the deadlines assume; left as it is, default_machine() of the kernel.
  MachineModel machine;
};

// This rank's shards, rows as Attention::layout() says. Strides are free; a fused QKV is three views. In the kernel's
// kind of memory.
struct Inputs {
  TensorView q;                  // [q_rows, heads, head_dim]
  TensorView k;                  // [k_rows, kv_heads, head_dim]
  TensorView v;                  // [k_rows, kv_heads, head_dim_v]
  const float* sinks = nullptr;  // [heads], present exactly when FoldSpec::sinks
};

struct Outputs {
  MutableTensorView out;  // [q_rows, heads, head_dim_v]
  RowView lse;            // [q_rows, heads] natural logarithm, −∞ for a row without keys; no data: not wanted
  std::optional<FoldStateView> state;  // with Options::state_out
};

// What happened in a block on this rank; seconds since run() began, on a device by the clock of its stream.
struct BlockTimes {
  double posted = 0.0;      // its transfer may begin
  double wait_begin = 0.0;  // nothing left to fold until it arrives
  double fold_begin = 0.0;
  double fold_end = 0.0;
};

struct RunStats {
  double seconds = 0.0;
  double exposed_seconds = 0.0;  // waiting for blocks
  std::vector<BlockTimes> blocks;
};

// Whether blocks travel. kFoldsOnly leaves the transfers out and folds what an earlier run left in the block buffers:
// the time of the computation alone, for measurements. Its results mean nothing.
enum class RunMode { kWhole, kFoldsOnly };

// Called after each block with the number of blocks done and of all blocks; for progress displays.
using BlockDone = std::function<void(std::int64_t done, std::int64_t all)>;

class Attention {
 public:
  // Collective. Chooses kernel and layout, makes the plan, and agrees with the other ranks on job, options, build,
  // kernel and device. Throws Error: kUsage (the job contradicts itself), kUnsupported (no kernel; unlike ranks),
  // kMemory (the budget is too small), kPeer (deadline). `transport` outlives the object.
  Attention(Job job, Transport& transport, Options options);
  ~Attention();
  Attention(Attention&&) noexcept;
  Attention& operator=(Attention&&) = delete;

  const Job& job() const;
  const Options& options() const;
  const FoldChoice& kernel() const;
  Backend& backend();
  const JobLayout& layout() const;
  const Plan& plan() const;
  const Prediction& prediction() const;
  std::int64_t q_rows() const;  // rows of this rank's q, out and lse
  std::int64_t k_rows() const;  // rows of this rank's k and v

  // Bytes run() needs beside inputs and outputs: fold state, two blocks (on devices those are the object's own, because
  // peers write to them), and a dense copy of k and v if the caller's are strided (`dense_kv` false).
  std::size_t workspace_bytes(bool dense_kv = true) const;

  // Collective. Computes this rank's rows of O and LSE. `workspace` is at least workspace_bytes() long, aligned to 256,
  // in the kernel's kind of memory. On devices the work is enqueued on `stream` and complete when run() returns.
  // Throws kUsage for shapes that don't fit the job, kPeer for a deadline or a dead peer.
  RunStats run(const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace, Stream stream = {},
               const BlockDone& block_done = {}, RunMode mode = RunMode::kWhole);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The request of a job over `transport`: of several ranks, those kernels alone whose memory the transport moves.
KernelRequest fitting_request(const KernelRequest& request, const Transport& transport);

// Options::checksum in a backend's memory. Throws kUnsupported for device memory.
void check_checksum(const Backend& backend);

// The plans of a world of `world` ranks, without ranks, devices or MPI: what `plan` prints and the constructor uses.
// `staged_kv`: the caller's k and v are strided. Throws what the constructor of Attention throws of kUsage and kMemory.
class Forecasts {
 public:
  Forecasts(const Job& job, const Options& options, const FoldKernel& kernel, Route route, int world,
            bool staged_kv = false);
  Forecasts(const Forecasts&) = delete;  // the planner refers to what is kept here
  Forecasts& operator=(const Forecasts&) = delete;

  const JobLayout& layout() const { return layout_; }
  Plan plan(int rank) const { return planner_.plan(rank); }

 private:
  Job job_;
  JobLayout layout_;
  Planner planner_;
};

// The plan of one rank, with its prediction.
struct Forecast {
  JobLayout layout;
  Plan plan;
  Prediction prediction;
};
Forecast forecast(const Job& job, const Options& options, const FoldKernel& kernel, Route route, int world, int rank,
                  bool staged_kv = false);

}  // namespace ringattn
