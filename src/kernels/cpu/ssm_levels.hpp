// SPDX-License-Identifier: Apache-2.0
// What the CPU scans share: the states of segments and super-segments and the ordered passes over them
// (kernels/ssm.hpp, 1 to 4), and the threads. A scan adds the arithmetic of a segment.
//
// Heads are computed in head_blocks: a head of its own, or a block of channels. A head_block's state is an array of
// floats in an order of the scan's own, and the logarithm of a decay is one float, or one a channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/ssm_ops.hpp"
#include "kernels/ssm.hpp"

namespace ringattn::cpu {

// Some head_blocks of one group in one segment.
struct SsmWorkTile {
  std::int64_t row = 0;
  int tokens = 0;  // at most kSegmentTokens
  int first_head_block = 0;
  int head_blocks = 0;
};

class SsmLevels : public SsmKernel {
 public:
  std::size_t scratch_bytes(const SsmLimits& limits) const override;
  void reserve(const SsmLimits& limits) override;
  void accumulate_states(const SsmTask& task, const HeadRange& heads, Stream stream, const Progress& progress) override;
  void carry(const SsmTask& task, const HeadRange& heads, int step, Stream stream) override;
  void finish(const SsmTask& task, const HeadRange& heads, Stream stream, const Progress& progress) override;
  void update(const SsmUpdate& update, Stream stream) override;

 protected:
  struct Shape {
    int heads_per_block = 1;         // heads of a head_block
    int blocks_per_tile = 1;         // head_blocks of a piece, at most
    std::size_t block_floats = 0;    // a state
    std::size_t block_logs = 1;      // logarithms of a decay
    std::size_t scratch_floats = 0;  // that a thread needs for a piece
  };
  SsmLevels(const SsmSpec& spec, const CpuBackend& backend, const Shape& shape);

  // Folds a piece from zero: its states [head_blocks, block_floats] and the logarithms of its decay [head_blocks,
  // block_logs].
  virtual void accumulate_tile(const SsmTask& task, const SsmWorkTile& piece, float* scratch, float* states,
                               float* logs) const = 0;
  // Rows of y of a piece, from the states in front of it, which it overwrites.
  virtual void finish_tile(const SsmTask& task, const SsmWorkTile& piece, float* scratch, float* states) const = 0;
  // result = fma(decay, before, local) of a head_block's states.
  virtual void join(const SsmTask& task, int head_block, const float* logs, const float* before, const float* local,
                    float* result) const = 0;
  // A head_block's state, from its heads' dense [head_dim, state_dim] and back.
  virtual void load_state(const float* heads, float* state) const = 0;
  virtual void store_state(const float* state, float* heads) const = 0;

  // dt as it enters the recurrence: bias, softplus, limits. `bias` is [kChannelBlock], whose elements repeat, or null.
  void make_dt(float* dt, int count, const float* bias) const;

  const SsmSpec& spec() const { return spec_; }
  const TileOps& rows() const { return tile_ops_; }
  const SsmOps& ops() const { return ops_; }

 private:
  struct HeadBlocks {
    int first = 0;
    int count = 0;
  };
  // A segment, and where it stands among all of the task's.
  struct Segment {
    std::int64_t row = 0;
    int tokens = 0;
    std::int64_t index = 0;
    std::int64_t super_segment = 0;
  };

  int head_block_count() const { return spec_.heads / shape_.heads_per_block; }
  // A head's state, dense.
  std::size_t state_floats() const {
    return static_cast<std::size_t>(spec_.head_dim) * static_cast<std::size_t>(spec_.state_dim);
  }
  std::size_t thread_bytes() const;
  HeadBlocks head_blocks_of(const HeadRange& heads) const;
  void update_head(const SsmUpdate& update, std::int64_t sequence, int head) const;
  // The pieces that a range of head_blocks is cut into: none lies in two groups.
  std::vector<HeadBlocks> work_tiles_of(const HeadBlocks& head_blocks) const;
  static std::vector<Segment> segments_of(const SsmTask& task);
  void for_each(std::int64_t items, const Progress& progress,
                const std::function<void(std::int64_t item, float* scratch)>& work) const;
  float* segment_state(std::int64_t segment, int head_block) const;
  float* segment_logs(std::int64_t segment, int head_block) const;
  float* super_state(std::int64_t super_segment, int head_block) const;
  float* super_logs(std::int64_t super_segment, int head_block) const;

  SsmSpec spec_;
  Shape shape_;
  const TileOps& tile_ops_;
  const SsmOps& ops_;
  int threads_;
  SsmLimits limits_;
  Buffer states_;        // [segments, head_blocks, block_floats]: local states, then those in front of the segments (M)
  Buffer logs_;          // [segments, head_blocks, block_logs]: of the segments, then of those between
  Buffer super_states_;  // [super_segments, head_blocks, block_floats]: local states, then those in front of them (T)
  Buffer super_logs_;    // [super_segments, head_blocks, block_logs]
  Buffer scratch_;       // [threads, thread_bytes()]
};

}  // namespace ringattn::cpu
