// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/cpu/ssd_levels.hpp"

#include <algorithm>

#include "kernels/rope/token_rotation.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kChunksPerSegment = static_cast<int>(kSegmentTokens / kChunkTokens);

}  // namespace

void SsdDecays::lay_out(ScratchArrays& arrays) {
  arrays.take(dt, 1, kChunkRows);
  arrays.take(sums, 1, kChunkRows);
  arrays.take(bias, 1, kChannelBlock);
}

void SsdScratch::lay_out(int heads, int state_dim, int width, ScratchArrays& arrays) {
  SsdDecays::lay_out(arrays);
  arrays.take(row, 1, state_dim);
  arrays.take(b, state_dim, kChunkRows);
  arrays.take(scaled, state_dim, kChunkRows);
  arrays.take(x, kChunkRows, width);
  arrays.take(z, 1, width);
  arrays.take(added, state_dim, width);
  arrays.take(decays, 1, kChunkRows);
  arrays.take(chunk_logs, heads, kChunksPerSegment);
}

int SsdLevels::width_of(const SsmSpec& spec) { return padded(spec.head_dim, best_ssm_ops().lanes); }

SsmLevels::Shape SsdLevels::shape_of(const SsmSpec& spec, int heads_per_tile, std::size_t scratch_floats,
                                     bool descending, int block_logs) {
  const int width = width_of(spec);
  ScratchArrays own(nullptr);
  SsdScratch().lay_out(heads_per_tile, spec.state_dim, width, own);
  Shape shape;
  shape.blocks_per_tile = heads_per_tile;
  shape.block_floats = static_cast<std::size_t>(spec.state_dim) * static_cast<std::size_t>(width);
  shape.scratch_floats = own.floats() + scratch_floats;
  shape.block_logs = static_cast<std::size_t>(block_logs);
  shape.descending = descending;
  return shape;
}

SsdLevels::SsdLevels(const SsmSpec& spec, const CpuBackend& backend, int heads_per_tile, std::size_t scratch_floats,
                     bool descending, int block_logs)
    : SsmLevels(spec, backend, shape_of(spec, heads_per_tile, scratch_floats, descending, block_logs)),
      heads_per_tile_(heads_per_tile),
      width_(width_of(spec)),
      descending_(descending) {}

SsdScratch SsdLevels::scratch_of(ScratchArrays& arrays) const {
  SsdScratch scratch;
  scratch.lay_out(heads_per_tile_, spec().state_dim, width_, arrays);
  std::fill_n(scratch.x, kChunkRows * width_, 0.0F);  // the padding stays zero
  return scratch;
}

void SsdLevels::accumulate_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* memory, float* states,
                                float* logs) const {
  ScratchArrays arrays(memory);
  SsdScratch scratch = scratch_of(arrays);
  std::fill_n(states, static_cast<std::size_t>(work_tile.head_blocks) * block_floats(), 0.0F);
  const int chunks = (work_tile.tokens + kChunkRows - 1) / kChunkRows;
  for (int nth = 0; nth < chunks; ++nth) {
    const int chunk = descending_ ? chunks - 1 - nth : nth;
    const std::int64_t row = work_tile.row + chunk * kChunkRows;
    const int tokens = std::min(kChunkRows, work_tile.tokens - chunk * kChunkRows);
    load_b(task.rotation, task.b, row, tokens, group_of(work_tile.first_head_block), scratch);
    for (int i = 0; i < work_tile.head_blocks; ++i) {
      load_head(task, row, tokens, work_tile.first_head_block + i, scratch);
      accumulate_chunk(tokens, states + static_cast<std::size_t>(i) * block_floats(), scratch);
      scratch.chunk_logs[i * kChunksPerSegment + chunk] = scratch.sums[tokens - 1];
    }
  }
  for (int i = 0; i < work_tile.head_blocks; ++i) {
    logs[i] = 0.0F;
    for (int chunk = 0; chunk < chunks; ++chunk) logs[i] += scratch.chunk_logs[i * kChunksPerSegment + chunk];
  }
}

void SsdLevels::join(const SsmTask&, int, const float* logs, const float* before, const float* local,
                     float* result) const {
  join_states(*logs, before, local, result);
}

void SsdLevels::join_states(float log, const float* before, const float* local, float* result) const {
  float decay[kChannelBlock] = {log};
  ops().exp2(decay, kChannelBlock);
  ops().join(decay[0], before, local, static_cast<int>(block_floats()), result);
}

void SsdLevels::load_state(const float* head, float* state) const {
  for (int n = 0; n < spec().state_dim; ++n) {
    for (int p = 0; p < spec().head_dim; ++p) state[n * width_ + p] = head[p * spec().state_dim + n];
  }
}

void SsdLevels::store_state(const float* state, float* head) const {
  for (int n = 0; n < spec().state_dim; ++n) {
    for (int p = 0; p < spec().head_dim; ++p) head[p * spec().state_dim + n] = state[n * width_ + p];
  }
}

void SsdLevels::load_b(const SsmRotation& rotation, const TensorView& b, std::int64_t row, int tokens, int group,
                       SsdScratch& scratch) const {
  for (int j = 0; j < kChunkRows; ++j) {
    if (j < tokens) {
      load_bc(rotation, b, row + j, group, scratch.row);
    } else {
      std::fill_n(scratch.row, spec().state_dim, 0.0F);
    }
    for (int n = 0; n < spec().state_dim; ++n) scratch.b[n * kChunkRows + j] = scratch.row[n];
  }
}

SsdRows SsdLevels::load_bc_rows(const SsmRotation& rotation, const TensorView& view, std::int64_t row, int tokens,
                                int group, std::byte* rotated) const {
  if (rotation.rope == nullptr) return {view.at(row, group), view.token_stride * 2};
  const RowRotation by = row_rotation(*rotation.rope, nullptr);
  const std::int64_t stride = std::int64_t{2} * spec().state_dim;
  for (int j = 0; j < tokens; ++j) {
    rotate_row(by, rotation.angles + (row + j) * rotation.rope->rotary_dim, view.at(row + j, group),
               rotated + j * stride);
  }
  return {rotated, stride};
}

void SsdLevels::load_head(const SsmTask& task, std::int64_t row, int tokens, int head, SsdScratch& scratch) const {
  for (int j = 0; j < tokens; ++j) {
    float* const x = scratch.x + j * width_;
    widen_row(rows(), task.x, row + j, head, spec().head_dim, x);
    if (descending_ && spec().gate) {
      widen_row(rows(), task.z, row + j, head, spec().head_dim, scratch.z);
      ops().finish(spec().head_dim, nullptr, x, scratch.z, x);
    }
  }
  load_decays(task, row, tokens, head, scratch);
}

void SsdLevels::load_decays(const SsmTask& task, std::int64_t row, int tokens, int head, SsdDecays& decays) const {
  const bool has_dt = spec().decay == SsmDecay::kDt;
  std::fill_n(decays.dt, kChunkRows, 0.0F);
  for (int j = 0; j < tokens; ++j) decays.dt[j] = has_dt ? element_at(task.dt, row + j, head) : 1.0F;
  if (has_dt) {
    if (spec().dt_bias) std::fill_n(decays.bias, kChannelBlock, task.dt_bias[head]);
    make_dt(decays.dt, kChunkRows, spec().dt_bias ? decays.bias : nullptr);
  }
  // a log-decay per token, or A
  const float rate = spec().decay == SsmDecay::kToken ? kLog2E : task.a[head] * kLog2E;
  float sum = 0.0F;
  for (int j = 0; j < kChunkRows; ++j) {  // entries after the chunk's last token are not used
    const float log =
        rate * (spec().decay == SsmDecay::kToken && j < tokens ? element_at(task.dt, row + j, head) : decays.dt[j]);
    sum += log < kMinLogDecay ? kMinLogDecay : log;
    decays.sums[j] = sum;
  }
}

void SsdLevels::accumulate_chunk(int tokens, float* state, SsdScratch& scratch) const {
  const float last = scratch.sums[tokens - 1];
  for (int j = 0; j < kChunkRows; ++j) scratch.decays[j] = descending_ ? scratch.sums[j] : last - scratch.sums[j];
  ops().exp2(scratch.decays, kChunkRows);
  if (!descending_) {
    for (int j = 0; j < kChunkRows; ++j) scratch.decays[j] *= scratch.dt[j];
  }
  ops().scale_columns(spec().state_dim, scratch.b, scratch.decays, scratch.scaled);
  ops().product(scratch.scaled, kChunkRows, spec().state_dim, tokens, scratch.x, width_, scratch.added);
  join_states(last, state, scratch.added, state);
}

}  // namespace ringattn::cpu
