// SPDX-License-Identifier: Apache-2.0
// The plan of one rank: KV blocks in ascending token order, each with its messages and its compute task. It is a pure
// function of the work, the layout, the kernel's tiles, the machine model and the options. Where these are equal on all
// ranks, the plans that ranks compute fit together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/ring/machine_model.hpp"
#include "attention/ring/ring_work.hpp"
#include "attention/tokens/layout.hpp"
#include "comm/transport.hpp"
#include "kernels/attention/attention.hpp"

namespace ringattn {

// Tile sizes of the kernel that will run the plan.
struct KernelShape {
  int key_tile = 128;
  int query_tile = 1;

  bool operator==(const KernelShape&) const = default;
};

// Bytes of a message part's checksum.
inline constexpr std::int64_t kChecksumBytes = 8;

struct PlanOptions {
  // kDirect is a preference: if the machine model says that forwarding a part is faster, receivers forward it.
  Route route = Route::kDirect;
  std::int64_t block_tokens = 0;  // 0: chosen from the machine model and the memory budget
  // Upper limit for a chosen block size, also with one rank; 0: no limit. A block of one tile may exceed it.
  std::int64_t max_block_tokens = 0;
  std::size_t memory_budget = 0;  // bytes that a rank may use in total; 0: no limit
  std::size_t fixed_bytes = 0;    // independent of the blocks: shards, scratch, staging; the maximum over all ranks,
                                  // because all ranks have the same blocks
  std::size_t state_bytes = 0;    // of attention state; the maximum over all ranks
  bool state_out = false;         // the state is an output; otherwise a plan of one block needs none
  bool checksum = false;          // kChecksumBytes are sent with each part
  bool overlap = true;            // the next block is received while a block is computed

  bool operator==(const PlanOptions&) const = default;
};

// A message part: rows of one owner's key shard, of every stream, that are sent together. They are contiguous in the
// shard and in every buffer that receives them.
struct MessagePart {
  int owner = 0;
  std::int64_t owner_row = 0;  // first row in the owner's shard
  std::int64_t rows = 0;
  std::int64_t buffer_row = -1;  // first row in this rank's block buffer; −1 if the rank owns the part
};

// One message of an exchange: these parts in this order.
struct PlannedMessage {
  int peer = 0;
  int round = 0;
  std::vector<std::int32_t> parts;  // indices into BlockPlan::parts
};

// Rows to copy within memory before the block is computed, to assemble a tile whose keys are scattered.
struct RowCopy {
  bool from_shard = false;  // source: own shard, or block buffer
  std::int64_t from_row = 0;
  std::int64_t to_row = 0;  // in the block buffer
  std::int64_t rows = 0;
};

// Sources of a block's tile map.
inline constexpr std::int32_t kOwnShard = 0;
inline constexpr std::int32_t kBlockBuffer = 1;

struct BlockPlan {
  std::int64_t first_token = 0;  // packed key tokens [first_token, last_token) of the whole job
  std::int64_t last_token = 0;
  std::vector<MessagePart> parts;        // parts that this rank sends, receives or forwards
  std::vector<PlannedMessage> sends;     // ascending by round
  std::vector<PlannedMessage> receives;  // ascending by round
  std::vector<RowCopy> copies;
  std::vector<KeyRun> key_runs;  // keys of the rank's compute task
  std::vector<PageRun> tiles;
  std::int64_t buffer_rows = 0;  // rows of the block buffer in use: received rows, then assembled tiles
  double flops = 0.0;            // of this rank's task; the first block includes the work that is done once per query
  std::int64_t bytes_received = 0;
  std::int64_t bytes_sent = 0;
};

struct Plan {
  int rank = 0;
  int world = 1;
  KernelShape kernel;
  std::vector<QueryRun> queries;                  // of the rank's shard
  std::vector<std::int64_t> key_lengths;          // [sequences]
  std::shared_ptr<const BlockMask> block_mask;    // of the job, or null
  std::shared_ptr<const KeyPositions> positions;  // of the job's keys, or null
  std::vector<BlockPlan> blocks;
  // If queries are sent, too (RingWork::sends_queries()), the plan by which this rank's keys receive them, with queries
  // and keys exchanged: `queries` are the rank's keys, and key tiles are tiles of queries, at the key positions of
  // queries_to_keys(). It has as many blocks, which are exchanged and computed with those of this plan. Null otherwise.
  std::shared_ptr<const Plan> to_keys;
  std::int64_t buffer_rows = 0;        // of each of the two block buffers: the maximum over blocks
  std::size_t block_buffer_bytes = 0;  // of each of the two block buffers, without those of to_keys
  bool keeps_state = true;             // state is kept between blocks
  std::size_t memory_bytes = 0;        // estimated peak of the rank: fixed_bytes, kept state, and all block buffers

  // These and the following include to_keys.
  double flops() const;
  std::int64_t bytes_received() const;
  std::int64_t bytes_sent() const;
  double block_flops(std::size_t block) const;
  std::int64_t block_bytes_received(std::size_t block) const;
  std::int64_t block_bytes_sent(std::size_t block) const;
  RowCounts all_buffer_rows() const { return {buffer_rows, to_keys != nullptr ? to_keys->buffer_rows : 0}; }
};

// Computes the plans of all ranks, and their common parts once. `layout` is read by the constructor and by plan(), and
// must outlive the object. If queries are sent, too, a block is a range of key tiles and a range of query tiles at the
// same positions: kernel.key_tile is a multiple of kernel.query_tile. The constructor throws kUsage for a layout that
// doesn't match the batch and for invalid options or machine models. It throws kMemory, with a sufficient budget, if
// the budget is too small for the smallest blocks.
class Planner {
 public:
  Planner(RingWork work, const JobLayout& layout, const KernelShape& kernel, const MachineModel& machine,
          const PlanOptions& options);
  ~Planner();
  Planner(Planner&&) noexcept;
  Planner& operator=(Planner&&) noexcept;

  // Packed key token at which each block begins, then the number of key tokens: [blocks + 1]. Boundaries are tile
  // boundaries of the sequences. There is at least one block, which may be empty.
  const std::vector<std::int64_t>& boundaries() const;
  Plan plan(int rank) const;

 private:
  struct Direction;
  struct Shared;
  std::unique_ptr<const Shared> shared_;
};

// Planner::boundaries() and Planner::plan() for a single use.
std::vector<std::int64_t> block_boundaries(RingWork work, const JobLayout& layout, const KernelShape& kernel,
                                           const MachineModel& machine, const PlanOptions& options);
Plan make_plan(RingWork work, const JobLayout& layout, const KernelShape& kernel, const MachineModel& machine,
               const PlanOptions& options, int rank);

// Estimated duration of a plan. Block b + 1 is received while block b is computed. There are two block buffers, so a
// receive starts after the receive before it and after the computation of the block that used the same buffer.
struct TimeEstimate {
  double seconds = 0.0;
  double exposed_comm_seconds = 0.0;  // in which the rank waits for a block
};
// Without overlap the receive of block b + 1 starts after the computation of block b.
TimeEstimate estimate_time(const Plan& plan, const MachineModel& machine, bool overlap = true);

}  // namespace ringattn
