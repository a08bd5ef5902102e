// SPDX-License-Identifier: Apache-2.0
// Base of the CPU SSM kernels: the states of segments and super-segments, the ordered passes over them
// (kernels/ssm/ssm.hpp, 1 to 4), and threading. A derived kernel has the arithmetic within a segment.
//
// Work is divided by head block: one head for Mamba-2, kChannelBlock channels for Mamba-1. A head block's state is an
// array of floats in a layout that the derived kernel chooses. Its log-decay is one float, or one per channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/host_work.hpp"
#include "kernels/ssm/cpu/ssm_ops.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::cpu {

// A segment, and its index and that of its super-segment in the task.
struct SsmSegment {
  std::int64_t row = 0;
  int tokens = 0;  // at most kSegmentTokens
  std::int64_t index = 0;
  std::int64_t super_segment = 0;
};

// Head blocks of one SSM group (shared B and C) in one segment.
struct SsmWorkTile : SsmSegment {
  int first_head_block = 0;
  int head_blocks = 0;
};

// The work of a task with one run of `tokens`. `heads_per_tile`: of a work tile, in one segment. `flops_per_second`: of
// one core.
HostWork run_work(const SsmSpec& spec, int heads_per_tile, const Backend& backend, std::int64_t tokens,
                  double flops_per_second);

class SsmLevels : public SsmKernel {
 public:
  bool rotates_rows() const override { return true; }
  std::size_t scratch_bytes(const SsmLimits& limits) const override;
  void reserve(const SsmLimits& limits) override;
  void accumulate_states(const SsmTask& task, const HeadRange& heads, Stream stream, const Progress& progress) override;
  void carry(const SsmTask& task, const HeadRange& heads, int step, Stream stream) override;
  void finish(const SsmTask& task, const HeadRange& heads, Stream stream, const Progress& progress) override;
  void update(const SsmUpdate& update, Stream stream) override;

  // The state of a head block before a segment, after carry() of its run: 4 of ssm.hpp.
  void state_before(const SsmTask& task, const SsmSegment& segment, int head_block, float* state) const;

 protected:
  struct Shape {
    int heads_per_block = 1;         // heads per head block
    int blocks_per_tile = 1;         // maximum head blocks per work tile
    std::size_t block_floats = 0;    // floats of a head block's state
    std::size_t block_logs = 1;      // floats of a head block's log-decay
    std::size_t scratch_floats = 0;  // a thread's scratch for a work tile
    // From the end to the beginning, as gradients of states go: the state "before" is that after a segment, and a run's
    // initial state is the one after its last token.
    bool descending = false;
  };
  SsmLevels(const SsmSpec& spec, const CpuBackend& backend, const Shape& shape);

  // Computes a work tile's local states from zero, [head_blocks, block_floats], and their log-decays, [head_blocks,
  // block_logs].
  virtual void accumulate_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* scratch, float* states,
                               float* logs) const = 0;
  // Computes a work tile's rows of y from the states before it, which it overwrites.
  virtual void finish_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* scratch, float* states) const = 0;
  // result = fma(decay, before, local) for a head block's states.
  virtual void join(const SsmTask& task, int head_block, const float* logs, const float* before, const float* local,
                    float* result) const = 0;
  // Convert a head block's state from its heads' dense [head_dim, state_dim], and back.
  virtual void load_state(const float* heads, float* state) const = 0;
  virtual void store_state(const float* state, float* heads) const = 0;

  // Transforms dt: bias, softplus, limits. `bias` is [kChannelBlock], used cyclically, or null.
  void make_dt(float* dt, int count, const float* bias) const;

  // Loads a row of B or C in fp32, after its RoPE.
  void load_bc(const SsmRotation& rotation, const TensorView& view, std::int64_t row, int group, float* target) const;

  const SsmSpec& spec() const { return spec_; }
  const TileOps& rows() const { return tile_ops_; }
  const SsmOps& ops() const { return ops_; }

 private:
  struct HeadBlocks {
    int first = 0;
    int count = 0;
  };
  int head_block_count() const { return spec_.heads / shape_.heads_per_block; }
  // Floats of a head's dense state.
  std::size_t state_floats() const {
    return static_cast<std::size_t>(spec_.head_dim) * static_cast<std::size_t>(spec_.state_dim);
  }
  std::size_t thread_bytes() const;
  HeadBlocks head_blocks_of(const HeadRange& heads) const;
  float dt_of(const SsmUpdate& update, std::int64_t sequence, int head) const;
  void update_head(const SsmUpdate& update, std::int64_t sequence, int head) const;
  // Divides a range of head blocks into work tiles. None spans two SSM groups.
  std::vector<HeadBlocks> work_tiles_of(const HeadBlocks& head_blocks) const;
  // In the order in which states are passed on.
  std::vector<SsmSegment> segments_of(const SsmTask& task) const;
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
  Buffer states_;  // [segments, head_blocks, block_floats]: local states, then the states M before the segments
  Buffer logs_;    // [segments, head_blocks, block_logs]: log-decays of the segments, then of the segments between
  Buffer super_states_;  // [super_segments, head_blocks, block_floats]: local states, then the states T before them
  Buffer super_logs_;    // [super_segments, head_blocks, block_logs]
  Buffer scratch_;       // [threads, thread_bytes()]
};

}  // namespace ringattn::cpu
