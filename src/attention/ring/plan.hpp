// SPDX-License-Identifier: Apache-2.0
// For one rank: blocks in ascending token order, each with its transfers and its compute task. A pure function of the
// work, the layout, the kernel's tiles, the machine model and the options; where these are the same on all ranks, every
// rank computes its own plan, and they fit together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/ring/ring_work.hpp"
#include "attention/tokens/layout.hpp"
#include "comm/transport.hpp"
#include "kernels/attention.hpp"

namespace ringattn {

// What a plan must know of the kernel that will run it (AttentionKernel, as numbers).
struct KernelShape {
  int key_tile = 128;
  int query_tile = 1;

  bool operator==(const KernelShape&) const = default;
};

inline constexpr std::int64_t kChecksumBytes = 8;

struct PlanOptions {
  // kDirect is a preference: an owner of so much of a block that handing on is faster (by the machine model) hands on.
  Route route = Route::kDirect;
  std::int64_t block_tokens = 0;  // 0: chosen from the machine model and the memory budget
  // Of a block that is chosen, also where nothing travels; 0: no limit. A block of one tile may have more.
  std::int64_t max_block_tokens = 0;
  std::size_t memory_budget = 0;  // bytes a rank may use, all of it; 0: no limit
  std::size_t fixed_bytes = 0;    // what a rank needs whatever the blocks are: shards, scratch, staging; the most of
                                  // any rank, for all ranks cut the same blocks
  std::size_t state_bytes = 0;    // of the fold state, likewise
  bool state_out = false;         // the state is wanted; else one block alone needs none
  bool checksum = false;          // kChecksumBytes travel with each part
  bool overlap = true;            // transfers are hidden behind folds

  bool operator==(const PlanOptions&) const = default;
};

// Rows of one owner's key shard, of every stream, that travel together: contiguous in the shard and in every buffer
// that receives them.
struct MessagePart {
  int owner = 0;
  std::int64_t owner_row = 0;  // first row in the owner's shard
  std::int64_t rows = 0;
  std::int64_t buffer_row = -1;  // first row in this rank's block buffer; −1 where the rank owns the part
};

// A message of an exchange: these parts, in this order.
struct PlannedMessage {
  int peer = 0;
  int round = 0;
  std::vector<std::int32_t> parts;  // indices into BlockPlan::parts
};

// Rows to copy into the block buffer before the fold: pieces of a tile whose keys don't lie together.
struct RowCopy {
  bool from_shard = false;  // else from the block buffer
  std::int64_t from_row = 0;
  std::int64_t to_row = 0;  // of the block buffer
  std::int64_t rows = 0;
};

// Sources of a block's tile map, by index.
inline constexpr std::int32_t kOwnShard = 0;
inline constexpr std::int32_t kBlockBuffer = 1;

struct BlockPlan {
  std::int64_t first_token = 0;  // packed key tokens [first_token, last_token) of the whole job
  std::int64_t last_token = 0;
  std::vector<MessagePart> parts;        // that this rank sends, receives or hands on
  std::vector<PlannedMessage> sends;     // ascending by round
  std::vector<PlannedMessage> receives;  // ascending by round
  std::vector<RowCopy> copies;
  std::vector<KeyRun> key_runs;  // the rank's compute task
  std::vector<PageRun> tiles;
  std::int64_t buffer_rows = 0;  // that the block needs: received rows, then assembled tiles
  double flops = 0.0;            // of this rank's task; the first block's has what is done once for each query
  std::int64_t bytes_received = 0;
  std::int64_t bytes_sent = 0;
};

struct Plan {
  int rank = 0;
  int world = 1;
  KernelShape kernel;
  std::vector<QueryRun> queries;                  // of the rank's shard
  std::vector<std::int64_t> key_lengths;          // of every sequence
  std::shared_ptr<const BlockMask> block_mask;    // of the job, or null
  std::shared_ptr<const KeyPositions> positions;  // of the job's keys, or null
  std::vector<BlockPlan> blocks;
  std::int64_t buffer_rows = 0;        // of each of the two block buffers: the largest block's
  std::size_t block_buffer_bytes = 0;  // of each of the two
  bool keeps_state = true;             // the rows' state outlives a block
  std::size_t memory_bytes = 0;        // predicted peak of the rank: fixed_bytes, the state if kept, and both buffers

  double flops() const;
  std::int64_t bytes_received() const;
  std::int64_t bytes_sent() const;
};

// All ranks' plans: what they share is worked out once. `layout` is read by the constructor and by plan(), and outlives
// the object. The constructor throws kUsage for a layout that doesn't hold the batch's tokens and for options
// or a machine model that make no sense, and kMemory, saying what would fit, when the budget can't hold even the
// smallest blocks.
class Planner {
 public:
  Planner(RingWork work, const JobLayout& layout, const KernelShape& kernel, const MachineModel& machine,
          const PlanOptions& options);
  ~Planner();
  Planner(Planner&&) noexcept;
  Planner& operator=(Planner&&) noexcept;

  // Packed key tokens at which blocks begin, with all key tokens behind: [blocks + 1]. At tile boundaries of the
  // sequences. There is always a block, if of nothing.
  const std::vector<std::int64_t>& boundaries() const;
  Plan plan(int rank) const;

 private:
  struct Shared;
  std::unique_ptr<const Shared> shared_;
};

// Planner::boundaries() and Planner::plan() for those who need one of them once.
std::vector<std::int64_t> block_boundaries(RingWork work, const JobLayout& layout, const KernelShape& kernel,
                                           const MachineModel& machine, const PlanOptions& options);
Plan make_plan(RingWork work, const JobLayout& layout, const KernelShape& kernel, const MachineModel& machine,
               const PlanOptions& options, int rank);

// Predicted seconds of a plan: each block's fold and transfer, the next in flight while one folds. There are two block
// buffers, so a transfer starts when the one before it and the fold before the last have ended.
struct TimeEstimate {
  double seconds = 0.0;
  double exposed_comm_seconds = 0.0;  // in which the rank waits for bytes
};
// Without overlap each block is waited for before it is folded, and the next transfer starts after the fold.
TimeEstimate estimate_time(const Plan& plan, const MachineModel& machine, bool overlap = true);

}  // namespace ringattn
