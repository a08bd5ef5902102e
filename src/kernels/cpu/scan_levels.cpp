// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/scan_levels.hpp"

#include <algorithm>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/pulse.hpp"
#include "kernels/cpu/scan_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr std::int64_t kItemsAtOnce = 4;  // of a thread, between which the rank shows that it works

int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

float* floats_of(const Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

std::size_t bytes_of(std::int64_t count, std::size_t floats) {
  return static_cast<std::size_t>(count) * floats * sizeof(float);
}

}  // namespace

ScanLevels::ScanLevels(const ScanSpec& spec, const CpuBackend& backend, const Shape& shape)
    : spec_(spec), shape_(shape), tile_ops_(backend.tile_ops()), ops_(best_scan_ops()), threads_(backend.threads()) {}

std::size_t ScanLevels::thread_bytes() const {
  // Behind the scan's own room: the states of a piece, and one more.
  const std::size_t states = static_cast<std::size_t>(shape_.cells_together + 1) * shape_.cell_floats;
  return (bytes_of(1, shape_.room_floats + states) + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment;
}

std::size_t ScanLevels::scratch_bytes(const ScanLimits& limits) const {
  const std::size_t cell = static_cast<std::size_t>(cell_count()) * (shape_.cell_floats + shape_.cell_logs);
  return bytes_of(limits.segments + limits.super_segments, cell) + static_cast<std::size_t>(threads_) * thread_bytes();
}

void ScanLevels::reserve(const ScanLimits& limits) {
  limits_ = limits;
  const auto cells = static_cast<std::size_t>(cell_count());
  states_ = allocate_host(bytes_of(limits.segments, cells * shape_.cell_floats));
  logs_ = allocate_host(bytes_of(limits.segments, cells * shape_.cell_logs));
  super_states_ = allocate_host(bytes_of(limits.super_segments, cells * shape_.cell_floats));
  super_logs_ = allocate_host(bytes_of(limits.super_segments, cells * shape_.cell_logs));
  room_ = allocate_host(static_cast<std::size_t>(threads_) * thread_bytes());
}

float* ScanLevels::segment_state(std::int64_t segment, int cell) const {
  return floats_of(states_) + static_cast<std::size_t>(segment * cell_count() + cell) * shape_.cell_floats;
}
float* ScanLevels::segment_logs(std::int64_t segment, int cell) const {
  return floats_of(logs_) + static_cast<std::size_t>(segment * cell_count() + cell) * shape_.cell_logs;
}
float* ScanLevels::super_state(std::int64_t super_segment, int cell) const {
  return floats_of(super_states_) + static_cast<std::size_t>(super_segment * cell_count() + cell) * shape_.cell_floats;
}
float* ScanLevels::super_logs(std::int64_t super_segment, int cell) const {
  return floats_of(super_logs_) + static_cast<std::size_t>(super_segment * cell_count() + cell) * shape_.cell_logs;
}

ScanLevels::Cells ScanLevels::cells_of(const HeadRange& heads) const {
  const int first = heads.first / shape_.cell_heads;
  return {first, heads.end() / shape_.cell_heads - first};
}

std::vector<ScanLevels::Cells> ScanLevels::pieces_of(const Cells& cells) const {
  const int group = cell_count() / spec_.groups;
  std::vector<Cells> pieces;
  for (int cell = cells.first; cell < cells.first + cells.count;) {
    const int end = std::min({cells.first + cells.count, cell + shape_.cells_together, (cell / group + 1) * group});
    pieces.push_back({cell, end - cell});
    cell = end;
  }
  return pieces;
}

std::vector<ScanLevels::Segment> ScanLevels::segments_of(const ScanTask& task) {
  std::vector<Segment> segments;
  std::int64_t super_segment = -1;
  for (const ScanRun& run : task.runs) {
    for (std::int64_t token = 0; token < run.tokens; token += kSegmentTokens) {
      if (token % kSuperSegmentTokens == 0) ++super_segment;
      segments.push_back({run.row + token, static_cast<int>(std::min(kSegmentTokens, run.tokens - token)),
                          static_cast<std::int64_t>(segments.size()), super_segment});
    }
  }
  return segments;
}

void ScanLevels::for_each(std::int64_t items, const Progress& progress,
                          const std::function<void(std::int64_t item, float* room)>& work) const {
  const std::int64_t at_once = kItemsAtOnce * threads_;
  for (std::int64_t begin = 0; begin < items; begin += at_once) {
    beat();
    if (progress) progress();
    const std::int64_t end = std::min(items, begin + at_once);
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
    for (std::int64_t item = begin; item < end; ++item) {
      const std::size_t mine = static_cast<std::size_t>(thread_number()) * thread_bytes();
      work(item, reinterpret_cast<float*>(room_.data() + mine));
    }
  }
}

void ScanLevels::make_dt(float* dt, int count, const float* bias) const {
  for (int i = 0; bias != nullptr && i < count; ++i) dt[i] += bias[i % kChannelBlock];
  if (spec_.dt_softplus) ops_.softplus(dt, count);
  for (int i = 0; i < count; ++i) {  // NaN stays NaN
    if (dt[i] < spec_.dt_least) dt[i] = spec_.dt_least;
    if (dt[i] > spec_.dt_most) dt[i] = spec_.dt_most;
  }
}

void ScanLevels::fold(const ScanTask& task, const HeadRange& heads, Stream, const Progress& progress) {
  check_scan_task(spec_, limits_, task);
  const std::vector<Segment> segments = segments_of(task);
  const std::vector<Cells> pieces = pieces_of(cells_of(heads));
  const auto piece_count = static_cast<std::int64_t>(pieces.size());
  for_each(static_cast<std::int64_t>(segments.size()) * piece_count, progress, [&](std::int64_t item, float* room) {
    const Segment& segment = segments[static_cast<std::size_t>(item / piece_count)];
    const Cells& piece = pieces[static_cast<std::size_t>(item % piece_count)];
    fold_piece(task, {segment.row, segment.tokens, piece.first, piece.count}, room,
               segment_state(segment.index, piece.first), segment_logs(segment.index, piece.first));
  });

  // The ordered pass over the segments of each super-segment.
  std::vector<std::size_t> begins;  // the first segment of each super-segment
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (i == 0 || segments[i].super_segment != segments[i - 1].super_segment) begins.push_back(i);
  }
  begins.push_back(segments.size());
  const Cells cells = cells_of(heads);
  for_each(static_cast<std::int64_t>(begins.size() - 1) * cells.count, progress, [&](std::int64_t item, float* room) {
    const std::int64_t super_segment = item / cells.count;
    const int cell = cells.first + static_cast<int>(item % cells.count);
    float* const local = room;
    float* const before = super_state(super_segment, cell);
    float* const logs = super_logs(super_segment, cell);
    std::vector<float> log(shape_.cell_logs);
    std::fill_n(before, shape_.cell_floats, 0.0F);
    std::fill_n(logs, shape_.cell_logs, 0.0F);
    const auto first = static_cast<std::int64_t>(begins[static_cast<std::size_t>(super_segment)]);
    const auto end = static_cast<std::int64_t>(begins[static_cast<std::size_t>(super_segment) + 1]);
    for (std::int64_t s = first; s < end; ++s) {
      std::copy_n(segment_state(s, cell), shape_.cell_floats, local);
      std::copy_n(segment_logs(s, cell), shape_.cell_logs, log.data());
      std::copy_n(before, shape_.cell_floats, segment_state(s, cell));
      std::copy_n(logs, shape_.cell_logs, segment_logs(s, cell));
      join(task, cell, log.data(), before, local, before);
      for (std::size_t i = 0; i < shape_.cell_logs; ++i) logs[i] += log[i];
    }
  });
}

void ScanLevels::carry(const ScanTask& task, const HeadRange& heads, int step, Stream) {
  const Cells cells = cells_of(heads);
  const std::size_t cell_state = static_cast<std::size_t>(shape_.cell_heads) * state_floats();
  for_each(cells.count, {}, [&](std::int64_t item, float* room) {
    const int cell = cells.first + static_cast<int>(item);
    float* const state = room;
    float* const local = room + shape_.cell_floats;
    std::int64_t super_segment = 0;
    for (const ScanRun& run : task.runs) {
      const std::int64_t end = super_segment + (run.tokens + kSuperSegmentTokens - 1) / kSuperSegmentTokens;
      if (run.step != step) {
        super_segment = end;
        continue;
      }
      std::fill_n(state, shape_.cell_floats, 0.0F);
      if (run.initial != nullptr) load_state(run.initial + static_cast<std::size_t>(cell) * cell_state, state);
      for (; super_segment < end; ++super_segment) {
        float* const here = super_state(super_segment, cell);
        std::copy_n(here, shape_.cell_floats, local);
        std::copy_n(state, shape_.cell_floats, here);
        join(task, cell, super_logs(super_segment, cell), state, local, state);
      }
      if (run.final != nullptr) store_state(state, run.final + static_cast<std::size_t>(cell) * cell_state);
    }
  });
}

void ScanLevels::finish(const ScanTask& task, const HeadRange& heads, Stream, const Progress& progress) {
  const std::vector<Segment> segments = segments_of(task);
  const std::vector<Cells> pieces = pieces_of(cells_of(heads));
  const auto piece_count = static_cast<std::int64_t>(pieces.size());
  for_each(static_cast<std::int64_t>(segments.size()) * piece_count, progress, [&](std::int64_t item, float* room) {
    const Segment& segment = segments[static_cast<std::size_t>(item / piece_count)];
    const Cells& piece = pieces[static_cast<std::size_t>(item % piece_count)];
    float* const states = room + shape_.room_floats;
    for (int i = 0; i < piece.count; ++i) {
      const int cell = piece.first + i;
      join(task, cell, segment_logs(segment.index, cell), super_state(segment.super_segment, cell),
           segment_state(segment.index, cell), states + static_cast<std::size_t>(i) * shape_.cell_floats);
    }
    finish_piece(task, {segment.row, segment.tokens, piece.first, piece.count}, room, states);
  });
}

void ScanLevels::update(const ScanUpdate& update, Stream) {
  check_scan_update(spec_, update);
  const std::int64_t items = update.x.tokens * spec_.heads;
#pragma omp parallel for num_threads(threads_) schedule(static)
  for (std::int64_t item = 0; item < items; ++item) {
    const std::int64_t sequence = item / spec_.heads;
    const int head = static_cast<int>(item % spec_.heads);
    if (update.slots == nullptr || update.slots[sequence] >= 0) {
      update_head(update, sequence, head);
    } else {
      std::memset(update.y.at(sequence, head), 0, static_cast<std::size_t>(spec_.head_dim) * size_of(spec_.dtype));
    }
  }
}

void ScanLevels::update_head(const ScanUpdate& update, std::int64_t sequence, int head) const {
  const auto states = static_cast<std::size_t>(spec_.state_dim);
  const auto dims = static_cast<std::size_t>(spec_.head_dim);
  const int group = head / (spec_.heads / spec_.groups);
  std::vector<float> memory(3 * states + 3 * dims + kChannelBlock);
  float* const decays = memory.data();
  float* const b = decays + states;
  float* const c = b + states;
  float* const x = c + states;
  float* const z = x + dims;
  float* const y = z + dims;
  float* const d = y + dims;
  widen_row(tile_ops_, update.b, sequence, group, spec_.state_dim, b);
  widen_row(tile_ops_, update.c, sequence, group, spec_.state_dim, c);
  float dts[kChannelBlock] = {element_at(update.dt, sequence, head)};
  float biases[kChannelBlock] = {spec_.dt_bias ? update.dt_bias[head] : 0.0F};
  make_dt(dts, kChannelBlock, spec_.dt_bias ? biases : nullptr);
  const float dt = dts[0];
  for (std::size_t n = 0; n < states; ++n) {
    const float a = spec_.state_decays ? update.a[static_cast<std::size_t>(head) * states + n] : update.a[head];
    decays[n] = dt * (a * kLog2E);
  }
  ops_.exp2(decays, spec_.state_dim);
  load_elements(update.x, sequence, head, x);
  if (spec_.gate) load_elements(update.z, sequence, head, z);
  const std::int64_t slot = update.slots == nullptr ? sequence : update.slots[sequence];
  float* const state = update.states + (static_cast<std::size_t>(slot * spec_.heads + head)) * state_floats();
  for (std::size_t p = 0; p < dims; ++p) {
    y[p] = ops_.update(spec_.state_dim, decays, dt * x[p], b, c, state + p * states);
  }
  if (spec_.skip) std::fill_n(d, kChannelBlock, update.d[head]);
  for (std::size_t p = 0; p < dims; p += kChannelBlock) {
    // A channel is a block by itself.
    float block[3][kChannelBlock] = {};
    const std::size_t count = std::min<std::size_t>(kChannelBlock, dims - p);
    std::copy_n(x + p, count, block[0]);
    std::copy_n(z + p, count, block[1]);
    std::copy_n(y + p, count, block[2]);
    ops_.finish(kChannelBlock, spec_.skip ? d : nullptr, block[0], spec_.gate ? block[1] : nullptr, block[2]);
    narrow_row(block[2], static_cast<int>(count), spec_.dtype, update.y.at(sequence, head) + p * size_of(spec_.dtype));
  }
}

}  // namespace ringattn::cpu
