// SPDX-License-Identifier: Apache-2.0
// What the CPU scans share: the states of segments and super-segments and the ordered passes over them
// (kernels/scan.hpp, 1 to 4), and the threads. A scan adds the arithmetic of a segment.
//
// Heads are computed in cells: a head of its own, or a block of channels. A cell's state is an array of floats in an
// order of the scan's own, and the logarithm of a decay is one float, or one a channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/cpu/cpu_backend.hpp"
#include "kernels/cpu/scan_ops.hpp"
#include "kernels/scan.hpp"

namespace ringattn::cpu {

// Some cells of one group in one segment.
struct ScanPiece {
  std::int64_t row = 0;
  int tokens = 0;  // at most kSegmentTokens
  int first_cell = 0;
  int cells = 0;
};

class ScanLevels : public ScanKernel {
 public:
  std::size_t scratch_bytes(const ScanLimits& limits) const override;
  void reserve(const ScanLimits& limits) override;
  void fold(const ScanTask& task, const HeadRange& heads, Stream stream, const Progress& progress) override;
  void carry(const ScanTask& task, const HeadRange& heads, int step, Stream stream) override;
  void finish(const ScanTask& task, const HeadRange& heads, Stream stream, const Progress& progress) override;
  void update(const ScanUpdate& update, Stream stream) override;

 protected:
  struct Shape {
    int cell_heads = 1;           // heads of a cell
    int cells_together = 1;       // cells of a piece, at most
    std::size_t cell_floats = 0;  // a state
    std::size_t cell_logs = 1;    // logarithms of a decay
    std::size_t room_floats = 0;  // that a thread needs for a piece
  };
  ScanLevels(const ScanSpec& spec, const CpuBackend& backend, const Shape& shape);

  // Folds a piece from zero: its states [cells, cell_floats] and the logarithms of its decay [cells, cell_logs].
  virtual void fold_piece(const ScanTask& task, const ScanPiece& piece, float* room, float* states,
                          float* logs) const = 0;
  // Rows of y of a piece, from the states in front of it, which it overwrites.
  virtual void finish_piece(const ScanTask& task, const ScanPiece& piece, float* room, float* states) const = 0;
  // result = fma(decay, before, local) of a cell's states.
  virtual void join(const ScanTask& task, int cell, const float* logs, const float* before, const float* local,
                    float* result) const = 0;
  // A cell's state, from its heads' dense [head_dim, state_dim] and back.
  virtual void load_state(const float* heads, float* state) const = 0;
  virtual void store_state(const float* state, float* heads) const = 0;

  // dt as it enters the recurrence: bias, softplus, limits. `bias` is [kChannelBlock], whose elements repeat, or null.
  void make_dt(float* dt, int count, const float* bias) const;

  const ScanSpec& spec() const { return spec_; }
  const TileOps& rows() const { return tile_ops_; }
  const ScanOps& ops() const { return ops_; }

 private:
  struct Cells {
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

  int cell_count() const { return spec_.heads / shape_.cell_heads; }
  // A head's state, dense.
  std::size_t state_floats() const {
    return static_cast<std::size_t>(spec_.head_dim) * static_cast<std::size_t>(spec_.state_dim);
  }
  std::size_t thread_bytes() const;
  Cells cells_of(const HeadRange& heads) const;
  void update_head(const ScanUpdate& update, std::int64_t sequence, int head) const;
  // The pieces that a range of cells is cut into: none lies in two groups.
  std::vector<Cells> pieces_of(const Cells& cells) const;
  static std::vector<Segment> segments_of(const ScanTask& task);
  void for_each(std::int64_t items, const Progress& progress,
                const std::function<void(std::int64_t item, float* room)>& work) const;
  float* segment_state(std::int64_t segment, int cell) const;
  float* segment_logs(std::int64_t segment, int cell) const;
  float* super_state(std::int64_t super_segment, int cell) const;
  float* super_logs(std::int64_t super_segment, int cell) const;

  ScanSpec spec_;
  Shape shape_;
  const TileOps& tile_ops_;
  const ScanOps& ops_;
  int threads_;
  ScanLimits limits_;
  Buffer states_;        // [segments, cells, cell_floats]: local states, then those in front of the segments (M)
  Buffer logs_;          // [segments, cells, cell_logs]: of the segments, then of those between
  Buffer super_states_;  // [super_segments, cells, cell_floats]: local states, then those in front of them (T)
  Buffer super_logs_;    // [super_segments, cells, cell_logs]
  Buffer room_;          // [threads, thread_bytes()]
};

}  // namespace ringattn::cpu
