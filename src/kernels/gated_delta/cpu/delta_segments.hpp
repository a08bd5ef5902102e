// SPDX-License-Identifier: Apache-2.0
// What the CPU kernels of the gated delta rule have in common: the pairs (M, U) of segments, the carry, and the update
// of a token, all in fp32. A derived kernel computes segments, in parallel over segments and value heads.
#pragma once

#include <cstdint>
#include <functional>

#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/host_work.hpp"
#include "kernels/gated_delta/gated_delta.hpp"
#include "kernels/ssm/cpu/ssd_levels.hpp"
#include "kernels/ssm/cpu/ssm_ops.hpp"

namespace ringattn::cpu {

inline constexpr int kMaxDeltaDim = 256;

// A segment of a run, and value heads of one key head.
struct DeltaSegment {
  std::int64_t index = 0;  // of the task's segments
  std::int64_t row = 0;
  int tokens = 0;
  bool needs_state = false;
  bool needs_transition = false;
  int first_head = 0;
  int heads = 0;
};

class DeltaSegments : public GatedDeltaKernel {
 public:
  int heads_together() const override { return 1; }
  double cost_of_two_ranges(double) const override { return 0.0; }
  double carry_seconds(std::int64_t runs, std::int64_t segments) const override;
  std::size_t scratch_bytes(const GatedDeltaLimits& limits) const override;
  void reserve(const GatedDeltaLimits& limits) override;
  void accumulate_states(const GatedDeltaTask& task, const HeadRange& heads, Stream stream,
                         const Progress& progress) override;
  void carry(const GatedDeltaTask& task, const HeadRange& heads, int step, Stream stream) override;
  void finish(const GatedDeltaTask& task, const HeadRange& heads, Stream stream, const Progress& progress) override;
  void update(const GatedDeltaUpdate& update, Stream stream) override;

 protected:
  // `max_heads`: value heads that a work item may have. `scratch_floats`: a thread's.
  DeltaSegments(const GatedDeltaSpec& spec, const CpuBackend& backend, int max_heads, std::size_t scratch_floats);

  // Computes U and M of a segment's heads, into state_at() and transition_at().
  virtual void accumulate_segment(const GatedDeltaTask& task, const DeltaSegment& segment, float* scratch) const = 0;
  // Computes o of a segment's heads from the states before it, in state_at(), which may be overwritten.
  virtual void finish_segment(const GatedDeltaTask& task, const DeltaSegment& segment, float* scratch) const = 0;

  static int padded_dim(int dim);  // to whole vectors
  const GatedDeltaSpec& spec() const { return spec_; }
  const TileOps& rows() const { return rows_; }
  const SsmOps& ops() const { return ops_; }
  float scale() const { return scale_; }
  int value_width() const { return value_width_; }
  int key_width() const { return key_width_; }
  std::size_t state_floats_padded() const { return static_cast<std::size_t>(spec_.key_dim * value_width_); }
  // U of a segment, then the state before it: [key_dim, value_width].
  float* state_at(std::int64_t segment, int head) const;
  // M of a segment: [key_dim, key_width].
  float* transition_at(std::int64_t segment, int head) const { return state_at(segment, head) + state_floats_padded(); }

  // A row of q or k, in fp32.
  void load_key_row(const TensorView& view, std::int64_t row, int head, float* target) const;

  // Calls work(first row, tokens, tokens of the next chunk) for each chunk.
  template <typename Work>
  static void for_each_chunk(const DeltaSegment& segment, const Work& work) {
    for (int begin = 0; begin < segment.tokens; begin += kChunkRows) {
      const int tokens = std::min(kChunkRows, segment.tokens - begin);
      work(segment.row + begin, tokens, std::min(kChunkRows, segment.tokens - begin - tokens));
    }
  }

 private:
  using SegmentWork = std::function<void(const DeltaSegment&, float* memory)>;

  std::size_t head_floats() const {
    return state_floats_padded() + static_cast<std::size_t>(spec_.key_dim * key_width_);
  }
  std::size_t segment_bytes(const GatedDeltaLimits& limits) const {
    return static_cast<std::size_t>(limits.segments * spec_.value_heads) * head_floats() * sizeof(float);
  }
  float* thread_memory() const;
  void load_state(const float* states, int head, float* state) const;
  void store_state(const float* state, int head, float* states) const;
  void normalize(float* row) const;
  void for_each_segment(const GatedDeltaTask& task, const HeadRange& heads, const Progress& progress,
                        const SegmentWork& work) const;
  void update_head(const GatedDeltaUpdate& update, std::int64_t sequence, int head, float* state) const;

  GatedDeltaSpec spec_;
  float scale_;
  int value_width_;
  int key_width_;
  int max_heads_;
  std::size_t thread_floats_;
  const TileOps& rows_;
  const SsmOps& ops_;
  int threads_;
  GatedDeltaLimits limits_;
  Buffer segments_;  // [segments, value_heads, head_floats()]
  Buffer scratch_;   // [threads, thread_floats_]
};

// The work of a run of `tokens` tokens (KernelRow::host_work), `max_heads` value heads per work item.
// `flops_per_second` is the rate of one pass over the rows on one core. `transition` is the additional time, in passes,
// of a segment whose transition is computed, which is that of every segment but the first.
HostWork delta_work(const GatedDeltaSpec& spec, const Backend& backend, std::int64_t tokens, int max_heads,
                    double flops_per_second, double transition);

// A log-decay to base 2, not below kMinLogDecay.
float delta_log_decay(float log_decay);

}  // namespace ringattn::cpu
