// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/cpu/ssm_levels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/rank_liveness.hpp"
#include "kernels/common/cpu/thread_number.hpp"
#include "kernels/rope/token_rotation.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr std::int64_t kWorkTilesPerHeartbeat = 4;  // per thread, between heartbeats

float* floats_of(const Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

std::size_t bytes_of(std::int64_t count, std::size_t floats) {
  return static_cast<std::size_t>(count) * floats * sizeof(float);
}

}  // namespace

HostWork run_work(const SsmSpec& spec, int heads_per_tile, const Backend& backend, std::int64_t tokens,
                  double flops_per_second) {
  const int threads = static_cast<const CpuBackend&>(backend).threads();
  const int heads_of_group = spec.heads / spec.groups;
  const int tiles_of_group = (heads_of_group + heads_per_tile - 1) / heads_per_tile;
  const double rows = static_cast<double>(tokens);
  const double segments = std::ceil(rows / static_cast<double>(kSegmentTokens));
  const double tiles = segments * static_cast<double>(tiles_of_group * spec.groups);
  const double width = static_cast<double>(spec.heads) * spec.head_dim;
  const double flops = 4.0 * width * spec.state_dim * rows;
  const double x_bytes = rows * width * static_cast<double>(size_of(spec.dtype));
  const double state_bytes = segments * width * spec.state_dim * sizeof(float);
  // The states of segments, the states before them, and the rows.
  WorkPhase accumulate{.tiles = tiles, .vector_seconds = 0.5 * flops / flops_per_second, .bytes = x_bytes};
  accumulate.regions = std::ceil(tiles / static_cast<double>(kWorkTilesPerHeartbeat * threads));
  WorkPhase finish = accumulate;
  finish.bytes = (spec.gate ? 4.0 : 3.0) * x_bytes;
  const WorkPhase carry{.tiles = 2.0 * spec.heads, .bytes = 6.0 * state_bytes, .regions = 2.0};
  return {threads, flops, {accumulate, carry, finish}};
}

SsmLevels::SsmLevels(const SsmSpec& spec, const CpuBackend& backend, const Shape& shape)
    : spec_(spec), shape_(shape), tile_ops_(backend.tile_ops()), ops_(best_ssm_ops()), threads_(backend.threads()) {}

std::size_t SsmLevels::thread_bytes() const {
  // After the derived kernel's scratch: the states of a work tile, and one more.
  const std::size_t states = static_cast<std::size_t>(shape_.blocks_per_tile + 1) * shape_.block_floats;
  return (bytes_of(1, shape_.scratch_floats + states) + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment;
}

std::size_t SsmLevels::scratch_bytes(const SsmLimits& limits) const {
  const std::size_t head_block =
      static_cast<std::size_t>(head_block_count()) * (shape_.block_floats + shape_.block_logs);
  return bytes_of(limits.segments + limits.super_segments, head_block) +
         static_cast<std::size_t>(threads_) * thread_bytes();
}

void SsmLevels::reserve(const SsmLimits& limits) {
  limits_ = limits;
  const auto head_blocks = static_cast<std::size_t>(head_block_count());
  states_ = allocate_host(bytes_of(limits.segments, head_blocks * shape_.block_floats));
  logs_ = allocate_host(bytes_of(limits.segments, head_blocks * shape_.block_logs));
  super_states_ = allocate_host(bytes_of(limits.super_segments, head_blocks * shape_.block_floats));
  super_logs_ = allocate_host(bytes_of(limits.super_segments, head_blocks * shape_.block_logs));
  scratch_ = allocate_host(static_cast<std::size_t>(threads_) * thread_bytes());
}

float* SsmLevels::segment_state(std::int64_t segment, int head_block) const {
  return floats_of(states_) + static_cast<std::size_t>(segment * head_block_count() + head_block) * shape_.block_floats;
}
float* SsmLevels::segment_logs(std::int64_t segment, int head_block) const {
  return floats_of(logs_) + static_cast<std::size_t>(segment * head_block_count() + head_block) * shape_.block_logs;
}
float* SsmLevels::super_state(std::int64_t super_segment, int head_block) const {
  return floats_of(super_states_) +
         static_cast<std::size_t>(super_segment * head_block_count() + head_block) * shape_.block_floats;
}
float* SsmLevels::super_logs(std::int64_t super_segment, int head_block) const {
  return floats_of(super_logs_) +
         static_cast<std::size_t>(super_segment * head_block_count() + head_block) * shape_.block_logs;
}

SsmLevels::HeadBlocks SsmLevels::head_blocks_of(const HeadRange& heads) const {
  const int first = heads.first / shape_.heads_per_block;
  return {first, heads.end() / shape_.heads_per_block - first};
}

std::vector<SsmLevels::HeadBlocks> SsmLevels::work_tiles_of(const HeadBlocks& head_blocks) const {
  const int group = head_block_count() / spec_.groups;
  std::vector<HeadBlocks> work_tiles;
  for (int head_block = head_blocks.first; head_block < head_blocks.first + head_blocks.count;) {
    const int end = std::min(
        {head_blocks.first + head_blocks.count, head_block + shape_.blocks_per_tile, (head_block / group + 1) * group});
    work_tiles.push_back({head_block, end - head_block});
    head_block = end;
  }
  return work_tiles;
}

std::vector<SsmSegment> SsmLevels::segments_of(const SsmTask& task) const {
  std::vector<SsmSegment> segments;
  std::int64_t super_segment = -1;
  for (const SsmRun& run : task.runs) {
    const auto first = static_cast<std::ptrdiff_t>(segments.size());
    for (std::int64_t token = 0; token < run.tokens; token += kSegmentTokens) {
      if (token % kSuperSegmentTokens == 0) ++super_segment;
      segments.push_back({run.row + token, static_cast<int>(std::min(kSegmentTokens, run.tokens - token)),
                          static_cast<std::int64_t>(segments.size()), super_segment});
    }
    if (shape_.descending) std::reverse(segments.begin() + first, segments.end());
  }
  return segments;
}

void SsmLevels::for_each(std::int64_t items, const Progress& progress,
                         const std::function<void(std::int64_t item, float* scratch)>& work) const {
  const std::int64_t at_once = kWorkTilesPerHeartbeat * threads_;
  for (std::int64_t begin = 0; begin < items; begin += at_once) {
    heartbeat();
    if (progress) progress();
    const std::int64_t end = std::min(items, begin + at_once);
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
    for (std::int64_t item = begin; item < end; ++item) {
      const std::size_t mine = static_cast<std::size_t>(thread_number()) * thread_bytes();
      work(item, reinterpret_cast<float*>(scratch_.data() + mine));
    }
  }
}

void SsmLevels::make_dt(float* dt, int count, const float* bias) const {
  for (int i = 0; bias != nullptr && i < count; i += kChannelBlock) {
    for (int c = 0; c < kChannelBlock; ++c) dt[i + c] += bias[c];
  }
  if (spec_.dt_softplus) ops_.softplus(dt, count);
  const float least = spec_.dt_min;
  const float most = spec_.dt_max;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (least == -kInfinity && most == kInfinity) return;
  for (int i = 0; i < count; ++i) {  // NaN stays NaN
    dt[i] = least > dt[i] ? least : dt[i];
    dt[i] = most < dt[i] ? most : dt[i];
  }
}

void SsmLevels::load_bc(const SsmRotation& rotation, const TensorView& view, std::int64_t row, int group,
                        float* target) const {
  if (rotation.rope == nullptr) return widen_row(tile_ops_, view, row, group, spec_.state_dim, target);
  alignas(64) std::byte rotated[kMaxRopeDim * sizeof(float)];
  rotate_row(row_rotation(*rotation.rope, nullptr), rotation.angles + row * rotation.rope->rotary_dim,
             fetch_row(view, row, group, spec_.state_dim), rotated);
  tile_ops_.widen(rotated, spec_.dtype, spec_.state_dim, target);
}

void SsmLevels::accumulate_states(const SsmTask& task, const HeadRange& heads, Stream, const Progress& progress) {
  check_ssm_task(spec_, limits_, task, rotates_rows());
  const std::vector<SsmSegment> segments = segments_of(task);
  const std::vector<HeadBlocks> work_tiles = work_tiles_of(head_blocks_of(heads));
  const auto work_tile_count = static_cast<std::int64_t>(work_tiles.size());
  for_each(
      static_cast<std::int64_t>(segments.size()) * work_tile_count, progress, [&](std::int64_t item, float* scratch) {
        const SsmSegment& segment = segments[static_cast<std::size_t>(item / work_tile_count)];
        const HeadBlocks& work_tile = work_tiles[static_cast<std::size_t>(item % work_tile_count)];
        accumulate_tile(task, {segment, work_tile.first, work_tile.count}, scratch,
                        segment_state(segment.index, work_tile.first), segment_logs(segment.index, work_tile.first));
      });

  // Ordered pass over the segments of each super-segment.
  std::vector<std::size_t> begins;  // the first segment of each super-segment
  for (std::size_t i = 0; i < segments.size(); ++i) {
    if (i == 0 || segments[i].super_segment != segments[i - 1].super_segment) begins.push_back(i);
  }
  begins.push_back(segments.size());
  const HeadBlocks head_blocks = head_blocks_of(heads);
  for_each(static_cast<std::int64_t>(begins.size() - 1) * head_blocks.count, progress,
           [&](std::int64_t item, float* scratch) {
             const auto nth = static_cast<std::size_t>(item / head_blocks.count);
             const std::int64_t super_segment = segments[begins[nth]].super_segment;
             const int head_block = head_blocks.first + static_cast<int>(item % head_blocks.count);
             float* const local = scratch;
             float* const before = super_state(super_segment, head_block);
             float* const logs = super_logs(super_segment, head_block);
             std::vector<float> log(shape_.block_logs);
             std::fill_n(before, shape_.block_floats, 0.0F);
             std::fill_n(logs, shape_.block_logs, 0.0F);
             for (std::size_t i = begins[nth]; i < begins[nth + 1]; ++i) {
               const std::int64_t s = segments[i].index;
               std::copy_n(segment_state(s, head_block), shape_.block_floats, local);
               std::copy_n(segment_logs(s, head_block), shape_.block_logs, log.data());
               std::copy_n(before, shape_.block_floats, segment_state(s, head_block));
               std::copy_n(logs, shape_.block_logs, segment_logs(s, head_block));
               join(task, head_block, log.data(), before, local, before);
               for (std::size_t l = 0; l < shape_.block_logs; ++l) logs[l] += log[l];
             }
           });
}

void SsmLevels::carry(const SsmTask& task, const HeadRange& heads, int step, Stream) {
  const HeadBlocks head_blocks = head_blocks_of(heads);
  const std::size_t block_state = static_cast<std::size_t>(shape_.heads_per_block) * state_floats();
  for_each(head_blocks.count, {}, [&](std::int64_t item, float* scratch) {
    const int head_block = head_blocks.first + static_cast<int>(item);
    float* const state = scratch;
    float* const local = scratch + shape_.block_floats;
    std::int64_t next = 0;
    for (const SsmRun& run : task.runs) {
      const std::int64_t first = next;
      const std::int64_t count = (run.tokens + kSuperSegmentTokens - 1) / kSuperSegmentTokens;
      next += count;
      if (run.step != step) continue;
      std::fill_n(state, shape_.block_floats, 0.0F);
      if (run.initial != nullptr) load_state(run.initial + static_cast<std::size_t>(head_block) * block_state, state);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t super_segment = shape_.descending ? next - 1 - i : first + i;
        float* const here = super_state(super_segment, head_block);
        std::copy_n(here, shape_.block_floats, local);
        std::copy_n(state, shape_.block_floats, here);
        join(task, head_block, super_logs(super_segment, head_block), state, local, state);
      }
      if (run.final != nullptr) store_state(state, run.final + static_cast<std::size_t>(head_block) * block_state);
    }
  });
}

void SsmLevels::finish(const SsmTask& task, const HeadRange& heads, Stream, const Progress& progress) {
  const std::vector<SsmSegment> segments = segments_of(task);
  const std::vector<HeadBlocks> work_tiles = work_tiles_of(head_blocks_of(heads));
  const auto work_tile_count = static_cast<std::int64_t>(work_tiles.size());
  for_each(
      static_cast<std::int64_t>(segments.size()) * work_tile_count, progress, [&](std::int64_t item, float* scratch) {
        const SsmSegment& segment = segments[static_cast<std::size_t>(item / work_tile_count)];
        const HeadBlocks& work_tile = work_tiles[static_cast<std::size_t>(item % work_tile_count)];
        float* const states = scratch + shape_.scratch_floats;
        for (int i = 0; i < work_tile.count; ++i) {
          state_before(task, segment, work_tile.first + i, states + static_cast<std::size_t>(i) * shape_.block_floats);
        }
        finish_tile(task, {segment, work_tile.first, work_tile.count}, scratch, states);
      });
}

void SsmLevels::state_before(const SsmTask& task, const SsmSegment& segment, int head_block, float* state) const {
  join(task, head_block, segment_logs(segment.index, head_block), super_state(segment.super_segment, head_block),
       segment_state(segment.index, head_block), state);
}

void SsmLevels::update(const SsmUpdate& update, Stream) {
  check_ssm_update(spec_, update, rotates_rows());
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

float SsmLevels::dt_of(const SsmUpdate& update, std::int64_t sequence, int head) const {
  float dts[kChannelBlock] = {element_at(update.dt, sequence, head)};
  float biases[kChannelBlock] = {spec_.dt_bias ? update.dt_bias[head] : 0.0F};
  make_dt(dts, kChannelBlock, spec_.dt_bias ? biases : nullptr);
  return dts[0];
}

void SsmLevels::update_head(const SsmUpdate& update, std::int64_t sequence, int head) const {
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
  load_bc(update.rotation, update.b, sequence, group, b);
  load_bc(update.rotation, update.c, sequence, group, c);
  const float dt = spec_.decay == SsmDecay::kDt ? dt_of(update, sequence, head) : 1.0F;
  for (std::size_t n = 0; n < states; ++n) {
    switch (spec_.decay) {
      case SsmDecay::kDt:
        decays[n] =
            dt *
            ((spec_.state_decays ? update.a[static_cast<std::size_t>(head) * states + n] : update.a[head]) * kLog2E);
        break;
      case SsmDecay::kHead:
        decays[n] = update.a[head] * kLog2E;
        break;
      case SsmDecay::kToken:
        decays[n] = element_at(update.dt, sequence, head) * kLog2E;
        break;
      case SsmDecay::kDim:
        decays[n] = load_element(update.dt.at(sequence, head) + n * size_of(update.dt.dtype), update.dt.dtype) * kLog2E;
    }
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
    // Each channel is its own block.
    float block[3][kChannelBlock] = {};
    const std::size_t count = std::min<std::size_t>(kChannelBlock, dims - p);
    std::copy_n(x + p, count, block[0]);
    std::copy_n(z + p, count, block[1]);
    std::copy_n(y + p, count, block[2]);
    ops_.finish(kChannelBlock, spec_.skip ? d : nullptr, block[0], spec_.gate ? block[1] : nullptr, block[2]);
    scale_row(spec_.scale, kChannelBlock, block[2]);
    narrow_row(ops_, block[2], static_cast<int>(count), spec_.dtype,
               update.y.at(sequence, head) + p * size_of(spec_.dtype));
  }
}

}  // namespace ringattn::cpu
