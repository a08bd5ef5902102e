// SPDX-License-Identifier: Apache-2.0
// SSD with one decay per head (Mamba-2). A segment is processed chunk by chunk with four products: C · Bᵀ, which the
// heads of a work tile share; C · S and (intra-chunk scores) · x, which give y; and (scaled B)ᵀ · x, which updates the
// state (ssd_levels.hpp).
#include "kernels/ssm/cpu/cpu_ssd.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/ssm/cpu/ssd_levels.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kHeadsPerTile = 4;  // heads whose states fit into the L2 cache

// What rows of y take besides SsdScratch.
struct RowScratch {
  float* c = nullptr;        // [kChunkRows, state_dim]
  float* scores = nullptr;   // [kChunkRows, kChunkRows]: C · Bᵀ
  float* weights = nullptr;  // [kChunkRows, kChunkRows]: intra-chunk scores
  float* y = nullptr;        // [kChunkRows, width]
  float* d = nullptr;        // [kChannelBlock], all equal

  RowScratch(int state_dim, int width, ScratchArrays& arrays) {
    arrays.take(c, kChunkRows, state_dim);
    arrays.take(scores, kChunkRows, kChunkRows);
    arrays.take(weights, kChunkRows, kChunkRows);
    arrays.take(y, kChunkRows, width);
    arrays.take(d, 1, kChannelBlock);
  }
  static std::size_t floats(const SsmSpec& spec, int width) {
    ScratchArrays arrays(nullptr);
    RowScratch(spec.state_dim, width, arrays);
    return arrays.floats();
  }
};

class CpuSsd final : public SsdLevels {
 public:
  CpuSsd(const SsmSpec& spec, const CpuBackend& backend)
      : SsdLevels(spec, backend, kHeadsPerTile, RowScratch::floats(spec, width_of(spec))) {}

  int heads_together() const override { return 1; }
  double cost_of_two_ranges(double) const override { return 0.0; }

 private:
  void finish_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* memory, float* states) const override {
    const int state_dim = spec().state_dim;
    ScratchArrays arrays(memory);
    SsdScratch scratch = scratch_of(arrays);
    const RowScratch own(state_dim, width(), arrays);
    const int group = group_of(work_tile.first_head_block);
    for (int begin = 0; begin < work_tile.tokens; begin += kChunkRows) {
      const int tokens = std::min(kChunkRows, work_tile.tokens - begin);
      const std::int64_t row = work_tile.row + begin;
      load_b(task.rotation, task.b, row, tokens, group, scratch);
      for (int i = 0; i < tokens; ++i) load_bc(task.rotation, task.c, row + i, group, own.c + i * state_dim);
      ops().product(own.c, state_dim, tokens, state_dim, scratch.b, kChunkRows, own.scores);
      for (int head_block = 0; head_block < work_tile.head_blocks; ++head_block) {
        const int head = work_tile.first_head_block + head_block;
        float* const state = states + static_cast<std::size_t>(head_block) * block_floats();
        load_head(task, row, tokens, head, scratch);
        write_rows(task, row, tokens, head, state, scratch, own);
        if (begin + tokens < work_tile.tokens) accumulate_chunk(tokens, state, scratch);
      }
    }
  }

  void write_rows(const SsmTask& task, std::int64_t row, int tokens, int head, const float* state, SsdScratch& scratch,
                  const RowScratch& own) const {
    ops().product(own.c, spec().state_dim, tokens, spec().state_dim, state, width(), own.y);
    std::copy_n(scratch.sums, kChunkRows, scratch.decays);
    ops().exp2(scratch.decays, kChunkRows);
    ops().intra_chunk_scores(tokens, own.scores, scratch.sums, scratch.dt, own.weights);
    ops().add_lower(own.weights, kChunkRows, tokens, scratch.decays, scratch.x, width(), own.y);
    if (spec().skip) std::fill_n(own.d, kChannelBlock, task.d[head]);
    for (int i = 0; i < tokens; ++i) {
      float* const y = own.y + i * width();
      if (spec().gate) widen_row(rows(), task.z, row + i, head, spec().head_dim, scratch.z);
      ops().finish(spec().head_dim, spec().skip ? own.d : nullptr, scratch.x + i * width(),
                   spec().gate ? scratch.z : nullptr, y);
      scale_row(spec().scale, spec().head_dim, y);
      narrow_row(ops(), y, spec().head_dim, spec().dtype, task.y.at(row + i, head));
    }
  }
};

}  // namespace

std::vector<std::string> cpu_ssd_missing(const SsmSpec& spec) {
  std::vector<std::string> missing;
  if (spec.state_decays || spec.decay == SsmDecay::kDim) {
    missing.push_back("a decay for each state (supported: a decay per head)");
  }
  const auto check = [&missing](const char* name, int dim) {
    if (dim >= 8 && dim <= kMaxSsdDim && dim % 8 == 0) return;
    missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, kMaxSsdDim));
  };
  check("head_dim", spec.head_dim);
  check("state_dim", spec.state_dim);
  return missing;
}

// Fitted to jobs with 1, 2 and 16 threads, as the rates of the other SSM kernels
// (bench/notes/attention-portable.md#estimates).
HostWork cpu_ssd_work(const SsmSpec& spec, const Backend& backend, std::int64_t tokens) {
  return run_work(spec, kHeadsPerTile, backend, tokens, 2.7 * best_ssm_ops().flops_per_second);
}

std::unique_ptr<SsmKernel> make_cpu_ssd(const SsmSpec& spec, Backend& backend) {
  return std::make_unique<CpuSsd>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
