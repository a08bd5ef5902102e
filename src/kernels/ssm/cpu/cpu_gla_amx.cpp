// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/cpu/cpu_gla_amx.hpp"

#include <algorithm>

#include "kernels/common/cpu/amx.hpp"
#include "kernels/common/cpu/amx_spec.hpp"
#include "kernels/ssm/cpu/cpu_gla.hpp"
#include "kernels/ssm/cpu/gla_tiles.hpp"
#include "kernels/ssm/cpu/ssd_levels.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

// One thread's scratch.
struct GlaTileScratch {
  GlaTiles tiles;
  std::byte* rounded_state = nullptr;  // [state_dim, head_dim] of bf16
  std::byte* rotated_k = nullptr;  // [2 · kChunkRows, state_dim] of bf16, with RoPE; the next chunk's: prefetched only
  std::byte* rotated_q = nullptr;

  GlaTileScratch(const SsmSpec& spec, ScratchArrays& arrays) {
    const int dim = spec.state_dim;
    DecayedTiles& keys = tiles.keys;
    tiles.head_dim = spec.head_dim;
    keys.dim = dim;
    for (float** rows : {&keys.k, &keys.q, &keys.decays, &keys.scaled_k}) arrays.take(*rows, kChunkRows, dim);
    arrays.take(keys.diagonal, dim, kChunkRows / 4);
    for (std::byte** factor : {&keys.near_q, &keys.q_rows, &keys.k_transposed, &keys.k_transposed_lo}) {
      arrays.take(*factor, kChunkRows, 2 * dim);
    }
    arrays.take(keys.far_k, 6 * kChunkRows / 4, 2 * dim);
    arrays.take(keys.qk, kChunkRows, kChunkRows);
    arrays.take(keys.chunk_decays, 1, dim);
    arrays.take(tiles.weights, kChunkRows, 2 * kChunkRows);
    arrays.take(tiles.v, kChunkRows, 2 * spec.head_dim);
    arrays.take(tiles.products, kChunkRows, kChunkRows);
    arrays.take(rounded_state, dim, 2 * spec.head_dim);
    for (std::byte** rows : {&rotated_k, &rotated_q}) arrays.take(*rows, 2 * kChunkRows, 2 * dim);
  }
  static std::size_t floats(const SsmSpec& spec) {
    ScratchArrays arrays(nullptr);
    const GlaTileScratch scratch(spec, arrays);
    return arrays.floats();
  }
};

class CpuGlaAmx final : public SsdLevels {
 public:
  CpuGlaAmx(const SsmSpec& spec, const CpuBackend& backend)
      : SsdLevels(spec, backend, 1, GlaTileScratch::floats(spec), /*descending=*/false, spec.state_dim),
        tile_ops_(*gla_tile_ops()) {}

  int heads_together() const override { return 1; }
  double cost_of_two_ranges(double) const override { return 0.0; }

 private:
  void accumulate_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* memory, float* states,
                       float* logs) const override {
    ScratchArrays arrays(memory);
    const GlaTileScratch scratch(spec(), arrays);
    std::fill_n(states, block_floats(), 0.0F);
    std::fill_n(logs, spec().state_dim, 0.0F);
    for_each_chunk(task, work_tile, scratch, false,
                   [&](const GlaTileHead& head) { tile_ops_.accumulate(scratch.tiles, head, states, logs); });
  }

  void finish_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* memory, float* state) const override {
    ScratchArrays arrays(memory);
    const GlaTileScratch scratch(spec(), arrays);
    tile_ops_.round_state(scratch.tiles, state, scratch.rounded_state);
    for_each_chunk(task, work_tile, scratch, true, [&](const GlaTileHead& head) {
      tile_ops_.finish(scratch.tiles, head, state, scratch.rounded_state);
    });
  }

  void join(const SsmTask&, int, const float* logs, const float* before, const float* local,
            float* result) const override {
    join_gla_states(ops(), logs, spec().state_dim, width(), before, local, result);
  }

  // Calls process(head) for each chunk, in ascending order.
  template <class Process>
  void for_each_chunk(const SsmTask& task, const SsmWorkTile& work_tile, const GlaTileScratch& scratch, bool finishes,
                      const Process& process) const {
    const int head = work_tile.first_head_block;
    for (int begin = 0; begin < work_tile.tokens; begin += kChunkRows) {
      const int tokens = std::min(kChunkRows, work_tile.tokens - begin);
      const std::int64_t row = work_tile.row + begin;
      GlaTileHead tile_head;
      tile_head.tokens = tokens;
      tile_head.next_tokens = std::min(kChunkRows, work_tile.tokens - begin - tokens);
      tile_head.k = load_bc_rows(task.rotation, task.b, row, tokens, group_of(head), scratch.rotated_k);
      if (finishes) tile_head.q = load_bc_rows(task.rotation, task.c, row, tokens, group_of(head), scratch.rotated_q);
      tile_head.log_decays = {task.dt.at(row, head), task.dt.token_stride * 4};
      tile_head.v = {task.x.at(row, head), task.x.token_stride * 2};
      if (finishes) {
        tile_head.scale = spec().scale;
        tile_head.y = task.y.at(row, head);
        tile_head.y_stride = task.y.token_stride * 2;
      }
      process(tile_head);
    }
  }

  const GlaTileOps& tile_ops_;
};

}  // namespace

std::vector<std::string> cpu_gla_amx_missing(const SsmSpec& spec) {
  std::vector<std::string> missing = cpu_gla_missing(spec);
  require_amx_tiles(missing, spec.dtype, {{"head_dim", spec.head_dim}, {"state_dim", spec.state_dim}});
  return missing;
}

std::string amx_gla_unavailable() { return gla_tile_ops() != nullptr ? std::string() : amx_unavailable(); }

// A rate of one core of a Sapphire Rapids, heads of 128 (bench/notes/ssm.md).
HostWork cpu_gla_amx_work(const SsmSpec& spec, const Backend& backend, std::int64_t tokens) {
  return run_work(spec, /*heads_per_tile=*/1, backend, tokens, 8e10);
}

std::unique_ptr<SsmKernel> make_cpu_gla_amx(const SsmSpec& spec, Backend& backend) {
  return std::make_unique<CpuGlaAmx>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
