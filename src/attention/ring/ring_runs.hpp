// SPDX-License-Identifier: Apache-2.0
// Runs of an op over the ring: owns block buffers, movers and enqueued runs, and calls the overlap loop. The op
// provides its row streams and its computation (RingStep). Used by Attention and Mla.
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
#include "kernels/common/backend.hpp"

namespace ringattn {

// kComputeOnly omits the exchanges and computes on the contents that an earlier run left in the block buffers. It
// measures the compute time; its results are meaningless.
enum class RunMode { kWhole, kComputeOnly };

// A plan, and what all of its runs share.
struct PlannedRuns {
  PlannedRuns(const Plan& the_plan, double seconds) : plan(the_plan), estimated_seconds(seconds) {}
  PlannedRuns(const PlannedRuns&) = delete;  // the mover refers to the plan
  PlannedRuns& operator=(const PlannedRuns&) = delete;

  const Plan& plan;          // outlives the object
  double estimated_seconds;  // of a run
  std::optional<BlockMover> mover;
  std::optional<Timeline> timeline;  // for RingRuns::run()
};

class RingRuns {
 public:
  struct Settings {
    RowStreams streams;
    bool overlap = true;
    bool checksum = false;
    double flops_per_second = 1.0;  // of the machine model; deadlines include the estimated time of a block
  };
  // Memory and computation of one run.
  struct Run {
    PlannedRuns& planned;
    RingStep& step;
    std::array<StreamRows, 2> buffers;
    // Called if blocks are exchanged: returns the rank's own rows, dense, ordered on the run's stream.
    std::function<StreamRows()> shard;
    RunMode mode = RunMode::kWhole;
    bool copies_shard = false;  // the step reads the copy made by shard(), so shard() is called on one rank, too
  };

  // All arguments outlive the object.
  RingRuns(const Collective& collective, Transport& transport, Backend& backend, Settings settings);

  bool several() const { return transport_.size() > 1; }
  // On devices peers write to block buffers, so the buffers must be memory that transports can map, not the caller's.
  bool owns_block_buffers() const { return backend_.memory() == MemoryKind::kDevice && several(); }

  // Allocates what runs need besides the caller's workspace, with block buffers of `buffer_rows` rows.
  void allocate(RowCounts buffer_rows);
  // Creates the plan's mover if there are several ranks.
  void make_mover(PlannedRuns& planned) const;
  // Collective. Announces the plan's block buffers to the peers if the object owns them.
  void connect(PlannedRuns& planned);

  RowCounts buffer_rows() const { return buffer_rows_; }
  // Layout of the caller's workspace, with `staged_rows` rows for a dense copy of the shard.
  WorkspaceLayout workspace(std::size_t state_bytes, RowCounts staged_rows) const;
  // The two block buffers of a run: own buffers, or in that workspace.
  std::array<StreamRows, 2> block_buffers(std::byte* workspace, const WorkspaceLayout& layout) const;
  // The rank's own rows for transfers and assembled tiles: each stream in place if it is dense, else copied to
  // `staged`. `views`: [streams].
  StreamRows dense_shard(std::span<const TensorView> views, StreamRows staged, Stream stream) const;

  // Throws kUnsupported if a graph can't hold the runs because blocks are exchanged.
  void check_capture_alone() const;
  // Throws kUnsupported if the tables of any block were not prepared. `prepared`: [blocks].
  static void check_capture_of(std::span<const PreparedTask> prepared);

  // Enqueues a run on `stream` (devices) or does it (hosts); see EnqueuedRuns::enqueue().
  void enqueue(const Run& run, Stream stream, Timeline* timeline, const BlockDone& block_done);
  // Runs once, waits and returns timing. `enqueue` calls enqueue() with the timeline that it is given.
  RunStats run(PlannedRuns& planned, const std::function<void(Timeline*)>& enqueue, const BlockDone& block_done);
  // Returns when all enqueued runs have ended.
  void wait();

 private:
  double longest_block(const Plan& plan) const;

  const Collective& collective_;
  Transport& transport_;
  Backend& backend_;
  Settings settings_;
  RowCounts buffer_rows_;  // of each block buffer
  Buffer own_buffers_;     // on devices with several ranks
  std::optional<EnqueuedRuns> runs_;
};

// Throws kUnsupported: a graph can't hold a run, for a reason on this rank.
[[noreturn]] void refuse_capture(std::string_view why, std::string_view suggestion);

}  // namespace ringattn
