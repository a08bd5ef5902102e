// SPDX-License-Identifier: Apache-2.0
// The runs of an op over the ring: what every front door does with its plan, its block buffers and its block step. The
// op says what travels (row streams) and what happens to a block that has arrived (RingStep); all else is here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>

#include "attention/ring/block_mover.hpp"
#include "attention/ring/engine.hpp"
#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/plan.hpp"
#include "attention/ring/timeline.hpp"
#include "attention/ring/workspace.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/collective.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

// Whether blocks travel. kComputeOnly leaves the transfers out and folds what an earlier run left in the block buffers:
// the time of the computation alone, for measurements. Its results mean nothing.
enum class RunMode { kWhole, kComputeOnly };

// A plan with what its runs use again and again.
struct PlannedRuns {
  PlannedRuns(const Plan& the_plan, double seconds) : plan(the_plan), estimated_seconds(seconds) {}
  PlannedRuns(const PlannedRuns&) = delete;  // the mover refers to the plan
  PlannedRuns& operator=(const PlannedRuns&) = delete;

  const Plan& plan;          // outlives the object
  double estimated_seconds;  // of a run
  std::optional<BlockMover> mover;
  std::optional<Timeline> timeline;  // of RingRuns::run()
};

class RingRuns {
 public:
  struct Settings {
    RowStreams streams;
    bool overlap = true;
    bool checksum = false;
    double flops_per_second = 1.0;  // of the machine model: deadlines wait for what a block is predicted to take
  };
  // What a run reads, writes and does.
  struct Run {
    PlannedRuns& planned;
    RingStep& step;
    std::array<StreamRows, 2> buffers;
    // Called where blocks travel: the rank's own rows, dense, on the run's stream.
    std::function<StreamRows()> shard;
    RunMode mode = RunMode::kWhole;
    bool copies_shard = false;  // the step reads what shard() copies: one rank calls it, too
  };

  // What it refers to outlives the object.
  RingRuns(const Collective& collective, Transport& transport, Backend& backend, Settings settings);

  bool several() const { return transport_.size() > 1; }
  // Peers write to a device's block buffers, so they are memory that transports may map: not the caller's.
  bool owns_block_buffers() const { return backend_.memory() == MemoryKind::kDevice && several(); }

  // Allocates what runs need beside the caller's workspace, with block buffers of so many rows.
  void allocate(std::int64_t buffer_rows);
  // Makes the plan's mover, where there are several ranks.
  void make_mover(PlannedRuns& planned) const;
  // Tells peers where the plan's blocks will land, where the block buffers are the object's own. Collective.
  void connect(PlannedRuns& planned);

  std::int64_t buffer_rows() const { return buffer_rows_; }
  // Of the caller's workspace: `staged_rows` of a dense copy of the shard.
  WorkspaceLayout workspace(std::size_t state_bytes, std::int64_t staged_rows) const;
  // The two block buffers of a run in that workspace.
  std::array<StreamRows, 2> block_buffers(std::byte* workspace, const WorkspaceLayout& layout) const;
  // The rank's own rows as transfers and assembled tiles need them: a stream's view where it is dense, else a copy of
  // it at `staged`. `views`: [streams].
  StreamRows dense_shard(std::span<const TensorView> views, StreamRows staged, Stream stream) const;

  // A graph can't hold a run whose blocks are exchanged.
  void check_capture_alone() const;
  // Nor one whose blocks' tables were not prepared. `prepared`: [blocks].
  static void check_capture_of(std::span<const PreparedTask> prepared);

  // Enqueues a run on `stream` (devices) or does it (hosts), as EnqueuedRuns::enqueue() says.
  void enqueue(const Run& run, Stream stream, Timeline* timeline, const BlockDone& block_done);
  // A run that is waited for, and timed: `enqueue` calls enqueue() with the timeline.
  RunStats run(PlannedRuns& planned, const std::function<void(Timeline*)>& enqueue, const BlockDone& block_done);
  // Returns when all runs that were enqueued have ended.
  void wait();

 private:
  double longest_block(const Plan& plan) const;

  const Collective& collective_;
  Transport& transport_;
  Backend& backend_;
  Settings settings_;
  std::int64_t buffer_rows_ = 0;  // of each block buffer
  Buffer own_buffers_;            // on devices
  std::optional<EnqueuedRuns> runs_;
};

// Throws kUnsupported: a graph can't hold a run, for a reason that no other rank has a part in.
[[noreturn]] void refuse_capture(std::string_view why, std::string_view suggestion);

}  // namespace ringattn
