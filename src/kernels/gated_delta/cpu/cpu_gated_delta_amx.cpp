// SPDX-License-Identifier: Apache-2.0
#include "kernels/gated_delta/cpu/cpu_gated_delta_amx.hpp"

#include <algorithm>

#include "kernels/common/cpu/amx.hpp"
#include "kernels/common/cpu/amx_spec.hpp"
#include "kernels/gated_delta/cpu/cpu_gated_delta.hpp"
#include "kernels/gated_delta/cpu/delta_segments.hpp"
#include "kernels/gated_delta/cpu/delta_tiles.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kDeltaTileHeads = 4;  // value heads that share the products of keys, and whose states fit into L2

// Value heads that a work item may have. With decays of key dims, each head has its own products of keys.
int max_heads_of(const GatedDeltaSpec& spec) { return spec.key_decays ? 1 : kDeltaTileHeads; }

// One thread's scratch.
struct DeltaTileScratch {
  DeltaTiles tiles;
  float* sums = nullptr;                // [kChunkRows]: G in GDN
  float* beta = nullptr;                // [kChunkRows]
  std::byte* rounded_states = nullptr;  // [kDeltaTileHeads, state and transition] of bf16

  DeltaTileScratch(const GatedDeltaSpec& spec, ScratchArrays& arrays) {
    const int dim = spec.key_dim;
    DecayedTiles& keys = tiles.keys;
    keys.dim = dim;
    for (std::byte** factor : {&keys.k_rows, &keys.q_rows, &keys.k_transposed}) {
      arrays.take(*factor, kChunkRows, 2 * dim);
    }
    for (float** scores : {&keys.kk, &keys.qk, &tiles.a, &tiles.inverse}) arrays.take(*scores, kChunkRows, kChunkRows);
    arrays.take(keys.chunk_decays, 1, dim);
    if (spec.key_decays) {
      for (float** rows : {&keys.k, &keys.q, &keys.decays, &keys.scaled_k}) arrays.take(*rows, kChunkRows, dim);
      arrays.take(keys.diagonal, dim, kChunkRows / 4);
      for (std::byte** factor : {&keys.near_k, &keys.near_q}) arrays.take(*factor, kChunkRows, 2 * dim);
      arrays.take(keys.far_k, 6 * kChunkRows / 4, 2 * dim);
    } else {
      arrays.take(tiles.k_columns, kChunkRows, 2 * dim);
    }
    for (std::byte** factor : {&tiles.t, &tiles.t_lo, &tiles.weights}) arrays.take(*factor, kChunkRows, 2 * kChunkRows);
    for (float** values : {&tiles.row_decays, &tiles.after_decays, &sums, &beta}) arrays.take(*values, 1, kChunkRows);
    for (std::byte** factor : {&tiles.w, &tiles.u, &tiles.scaled_u}) arrays.take(*factor, kChunkRows, kChunkRows);
    arrays.take(tiles.products, kChunkRows, kChunkRows);
    arrays.take(rounded_states, kDeltaTileHeads * dim, 2 * (spec.value_dim + dim));
  }
  static std::size_t floats(const GatedDeltaSpec& spec) {
    ScratchArrays arrays(nullptr);
    const DeltaTileScratch scratch(spec, arrays);
    return arrays.floats();
  }
};

class CpuGatedDeltaAmx final : public DeltaSegments {
 public:
  CpuGatedDeltaAmx(const GatedDeltaSpec& spec, const CpuBackend& backend)
      : DeltaSegments(spec, backend, max_heads_of(spec), DeltaTileScratch::floats(spec)),
        tile_ops_(*delta_tile_ops()) {}

 private:
  void accumulate_segment(const GatedDeltaTask& task, const DeltaSegment& segment, float* memory) const override {
    ScratchArrays arrays(memory);
    const DeltaTileScratch scratch(spec(), arrays);
    for (int nth = 0; nth < segment.heads; ++nth) {
      float* const u = state_at(segment.index, segment.first_head + nth);
      std::fill_n(u, state_floats_padded(), 0.0F);
      tile_ops_.round_state(scratch.tiles, u, spec().value_dim, rounded_state(scratch, nth));
      if (!segment.needs_transition) continue;
      float* const m = transition_at(segment.index, segment.first_head + nth);
      std::fill_n(m, spec().key_dim * spec().key_dim, 0.0F);
      for (int d = 0; d < spec().key_dim; ++d) m[d * spec().key_dim + d] = 1.0F;
      tile_ops_.round_state(scratch.tiles, m, spec().key_dim, rounded_transition(scratch, nth));
    }
    for_each_head_chunk(task, segment, scratch, false, [&](int nth, DeltaTileHead& head) {
      tile_ops_.advance(scratch.tiles, head, state_at(segment.index, segment.first_head + nth), spec().value_dim,
                        rounded_state(scratch, nth));
      if (!segment.needs_transition) return;
      head.v = {};
      tile_ops_.advance(scratch.tiles, head, transition_at(segment.index, segment.first_head + nth), spec().key_dim,
                        rounded_transition(scratch, nth));
    });
  }

  void finish_segment(const GatedDeltaTask& task, const DeltaSegment& segment, float* memory) const override {
    ScratchArrays arrays(memory);
    const DeltaTileScratch scratch(spec(), arrays);
    for (int nth = 0; nth < segment.heads; ++nth) {
      tile_ops_.round_state(scratch.tiles, state_at(segment.index, segment.first_head + nth), spec().value_dim,
                            rounded_state(scratch, nth));
    }
    for_each_head_chunk(task, segment, scratch, true, [&](int nth, const DeltaTileHead& head) {
      tile_ops_.advance(scratch.tiles, head, state_at(segment.index, segment.first_head + nth), spec().value_dim,
                        rounded_state(scratch, nth));
    });
  }

  static SsdRows rows_of(const TensorView& view, std::int64_t row, int head) {
    return {view.at(row, head), view.token_stride * static_cast<std::int64_t>(size_of(view.dtype))};
  }
  std::byte* rounded_state(const DeltaTileScratch& scratch, int nth) const {
    return scratch.rounded_states + std::ptrdiff_t{2} * nth * spec().key_dim * (spec().value_dim + spec().key_dim);
  }
  std::byte* rounded_transition(const DeltaTileScratch& scratch, int nth) const {
    return rounded_state(scratch, nth) + std::ptrdiff_t{2} * spec().key_dim * spec().value_dim;
  }

  // Calls process(head of the segment, its chunk), after solve(), in ascending order of chunks.
  template <class Process>
  void for_each_head_chunk(const GatedDeltaTask& task, const DeltaSegment& segment, const DeltaTileScratch& scratch,
                           bool outputs, const Process& process) const {
    const int key_head = segment.first_head / spec().heads_per_key();
    for_each_chunk(segment, [&](std::int64_t row, int tokens, int next_tokens) {
      const SsdRows k = rows_of(task.k, row, key_head);
      const SsdRows q = outputs ? rows_of(task.q, row, key_head) : SsdRows();
      if (!spec().key_decays) {
        tile_ops_.load_keys(scratch.tiles, k, q, tokens, next_tokens, spec().qk_l2norm);
      }
      for (int nth = 0; nth < segment.heads; ++nth) {
        const int head = segment.first_head + nth;
        DeltaTileHead tile_head;
        tile_head.tokens = tokens;
        tile_head.next_tokens = next_tokens;
        load_gates(task, row, tokens, head, scratch);
        tile_head.beta = scratch.beta;
        if (spec().key_decays) {
          tile_ops_.load_decayed_keys(scratch.tiles, k, q, rows_of(task.log_decay, row, head), tokens, next_tokens,
                                      spec().qk_l2norm);
        } else {
          tile_head.sums = scratch.sums;
        }
        tile_head.v = rows_of(task.v, row, head);
        if (outputs) {
          tile_head.outputs = true;
          tile_head.scale = scale();
          tile_head.o = task.o.at(row, head);
          tile_head.o_stride = task.o.token_stride * 2;
        }
        tile_ops_.solve(scratch.tiles, tile_head);
        process(nth, tile_head);
      }
    });
  }

  // beta, and the cumulative log-decays of GDN.
  void load_gates(const GatedDeltaTask& task, std::int64_t row, int tokens, int head,
                  const DeltaTileScratch& scratch) const {
    float sum = 0.0F;
    for (int i = 0; i < kChunkRows; ++i) {
      scratch.beta[i] = i < tokens ? element_at(task.beta, row + i, head) : 0.0F;
      if (spec().key_decays) continue;
      if (i < tokens) sum += delta_log_decay(element_at(task.log_decay, row + i, head));
      scratch.sums[i] = sum;
    }
  }

  const DeltaTileOps& tile_ops_;
};

}  // namespace

std::vector<std::string> cpu_gated_delta_amx_missing(const GatedDeltaSpec& spec) {
  std::vector<std::string> missing = cpu_gated_delta_missing(spec);
  require_amx_tiles(missing, spec.dtype, {{"key_dim", spec.key_dim}, {"value_dim", spec.value_dim}});
  return missing;
}

std::string amx_gated_delta_unavailable() { return delta_tile_ops() != nullptr ? std::string() : amx_unavailable(); }

double cpu_gated_delta_amx_speed(const Backend& backend) {
  GatedDeltaSpec any;
  return host_speed(cpu_gated_delta_amx_work(any, backend, kManyTokens), nullptr);
}

// Measured as in cpu_gated_delta.cpp.
HostWork cpu_gated_delta_amx_work(const GatedDeltaSpec& spec, const Backend& backend, std::int64_t tokens) {
  return delta_work(spec, backend, tokens, max_heads_of(spec), 5e11, 2.0);
}

std::unique_ptr<GatedDeltaKernel> make_cpu_gated_delta_amx(const GatedDeltaSpec& spec, Backend& backend) {
  return std::make_unique<CpuGatedDeltaAmx>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
