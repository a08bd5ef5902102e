// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/cpu/cpu_ssd_amx.hpp"

#include <algorithm>

#include "kernels/common/cpu/amx.hpp"
#include "kernels/common/cpu/amx_spec.hpp"
#include "kernels/ssm/cpu/cpu_ssd.hpp"
#include "kernels/ssm/cpu/ssd_levels.hpp"
#include "kernels/ssm/cpu/ssd_tiles.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kTileHeads = 4;  // heads that share the packed B and C, and whose states fit into the L2 cache

// One thread's scratch.
struct TileScratch {
  SsdTiles tiles;
  SsdDecays decays;
  std::byte* rounded_states = nullptr;  // [kTileHeads, state_dim · head_dim] of bf16
  std::byte* rotated_b = nullptr;       // [kChunkRows, state_dim] of bf16, with RoPE
  std::byte* rotated_c = nullptr;

  TileScratch(const SsmSpec& spec, ScratchArrays& arrays) {
    tiles.state_dim = spec.state_dim;
    tiles.head_dim = spec.head_dim;
    for (std::byte** group : {&tiles.c, &tiles.b_pairs, &tiles.b}) arrays.take(*group, kChunkRows, 2 * spec.state_dim);
    arrays.take(tiles.scores, kChunkRows, kChunkRows);
    arrays.take(tiles.weights, kChunkRows, 2 * kChunkRows);
    arrays.take(tiles.x, kChunkRows, 2 * spec.head_dim);
    arrays.take(tiles.scaled_x, kChunkRows, 4 * spec.head_dim);
    arrays.take(tiles.products, kChunkRows, kChunkRows / 2);
    decays.lay_out(arrays);
    arrays.take(rounded_states, kTileHeads * spec.state_dim, 2 * spec.head_dim);
    for (std::byte** rows : {&rotated_b, &rotated_c}) arrays.take(*rows, kChunkRows, 2 * spec.state_dim);
  }
  static std::size_t floats(const SsmSpec& spec) {
    ScratchArrays arrays(nullptr);
    const TileScratch scratch(spec, arrays);
    return arrays.floats();
  }
};

class CpuSsdAmx final : public SsdLevels {
 public:
  CpuSsdAmx(const SsmSpec& spec, const CpuBackend& backend)
      : SsdLevels(spec, backend, kTileHeads, TileScratch::floats(spec)), tile_ops_(*ssd_tile_ops()) {}

  int heads_together() const override { return 1; }
  double cost_of_two_ranges(double) const override { return 0.0; }

 private:
  static SsdRows rows_of(const TensorView& view, std::int64_t row, int head) {
    return {view.at(row, head), view.token_stride * 2};
  }

  void accumulate_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* memory, float* states,
                       float* logs) const override {
    ScratchArrays arrays(memory);
    const TileScratch scratch(spec(), arrays);
    std::fill_n(states, static_cast<std::size_t>(work_tile.head_blocks) * block_floats(), 0.0F);
    std::fill_n(logs, work_tile.head_blocks, 0.0F);
    for_each_chunk(task, work_tile, scratch, false, [&](int nth, const SsdTileHead& head, bool) {
      tile_ops_.accumulate(scratch.tiles, head, states + static_cast<std::size_t>(nth) * block_floats());
      logs[nth] += head.sums[head.tokens - 1];
    });
  }

  void finish_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* memory, float* states) const override {
    ScratchArrays arrays(memory);
    const TileScratch scratch(spec(), arrays);
    for_each_chunk(task, work_tile, scratch, true, [&](int nth, const SsdTileHead& head, bool first) {
      float* const state = states + static_cast<std::size_t>(nth) * block_floats();
      std::byte* const rounded = scratch.rounded_states + static_cast<std::size_t>(nth) * block_floats() * 2;
      if (first) tile_ops_.round_state(scratch.tiles, state, rounded);
      tile_ops_.finish(scratch.tiles, head, state, rounded);
    });
  }

  // Calls process(head of the work tile, its chunk, whether this is its first chunk) in ascending order of chunks.
  template <class Process>
  void for_each_chunk(const SsmTask& task, const SsmWorkTile& work_tile, TileScratch scratch, bool finishes,
                      const Process& process) const {
    const int group = group_of(work_tile.first_head_block);
    for (int begin = 0; begin < work_tile.tokens; begin += kChunkRows) {
      const int tokens = std::min(kChunkRows, work_tile.tokens - begin);
      const std::int64_t row = work_tile.row + begin;
      const SsdRows b = load_bc_rows(task.rotation, task.b, row, tokens, group, scratch.rotated_b);
      SsdRows c;
      if (finishes) c = load_bc_rows(task.rotation, task.c, row, tokens, group, scratch.rotated_c);
      tile_ops_.load_group(scratch.tiles, b, c, tokens);
      for (int nth = 0; nth < work_tile.head_blocks; ++nth) {
        const int head = work_tile.first_head_block + nth;
        load_decays(task, row, tokens, head, scratch.decays);
        SsdTileHead tile_head;
        tile_head.tokens = tokens;
        tile_head.next_tokens = std::min(kChunkRows, work_tile.tokens - begin - tokens);
        tile_head.dt = scratch.decays.dt;
        tile_head.sums = scratch.decays.sums;
        tile_head.x = rows_of(task.x, row, head);
        if (spec().skip) tile_head.d = task.d + head;
        if (finishes) {
          if (spec().gate) tile_head.z = rows_of(task.z, row, head);
          tile_head.scale = spec().scale;
          tile_head.y = task.y.at(row, head);
          tile_head.y_stride = task.y.token_stride * 2;
        }
        process(nth, tile_head, begin == 0);
      }
    }
  }

  const SsdTileOps& tile_ops_;
};

}  // namespace

std::vector<std::string> cpu_ssd_amx_missing(const SsmSpec& spec) {
  std::vector<std::string> missing = cpu_ssd_missing(spec);
  require_amx_tiles(missing, spec.dtype, {{"head_dim", spec.head_dim}, {"state_dim", spec.state_dim}});
  return missing;
}

std::string amx_ssd_unavailable() { return ssd_tile_ops() != nullptr ? std::string() : amx_unavailable(); }

// A rate of one core of a Sapphire Rapids, fitted as in cpu_ssd.cpp. Its time is mostly that of vector instructions.
HostWork cpu_ssd_amx_work(const SsmSpec& spec, const Backend& backend, std::int64_t tokens) {
  return run_work(spec, kTileHeads, backend, tokens, 1.15e11);
}

std::unique_ptr<SsmKernel> make_cpu_ssd_amx(const SsmSpec& spec, Backend& backend) {
  return std::make_unique<CpuSsdAmx>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
