// SPDX-License-Identifier: Apache-2.0
#include "kernels/gated_delta/cpu/cpu_gated_delta.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/common/cpu/amx_tiles.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/gated_delta/cpu/delta_segments.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

#if defined(__x86_64__)
// M decays to subnormals, which x86 processors multiply slowly, by microcode.
using DeltaSubnormals = FlushSubnormals;
#else
struct DeltaSubnormals {};
#endif

constexpr int kSubChunk = static_cast<int>(kSubChunkTokens);

// One thread's scratch for a chunk of a value head. `width` is that of the states: padded value_dim, and in
// accumulate_states() the padded key_dim after it, where M is.
struct DeltaScratch {
  float* q = nullptr;           // [kChunkRows, key_dim]
  float* k = nullptr;           // [kChunkRows, key_dim]
  float* sums = nullptr;        // [kChunkRows, decay_dim]: G, the cumulative log-decays
  float* decays = nullptr;      // [kChunkRows, key_dim]
  float* decayed_q = nullptr;   // [kChunkRows, key_dim]: q · exp2(G)
  float* decayed_k = nullptr;   // [kChunkRows, key_dim]: k · exp2(G)
  float* transposed = nullptr;  // [key_dim, kChunkRows]: k, then k · exp2(G_last − G)
  float* kk = nullptr;          // [kChunkRows, kChunkRows]: decayed k · kᵀ
  float* qk = nullptr;          // [kChunkRows, kChunkRows]: decayed q · kᵀ
  float* products = nullptr;    // [kChunkRows, kChunkRows]: without decays
  float* beta = nullptr;        // [kChunkRows]
  float* ones = nullptr;        // [kChunkRows]
  float* x = nullptr;           // [kChunkRows, width]: v, and zeros
  float* u = nullptr;           // [kChunkRows, width]
  float* o = nullptr;           // [kChunkRows, padded value_dim]
  float* added = nullptr;       // [key_dim, width]
  float* state = nullptr;       // [key_dim, width]

  void lay_out(const GatedDeltaSpec& spec, int value_width, int key_width, ScratchArrays& arrays) {
    const int dim = spec.key_dim;
    const int width = value_width + key_width;
    for (float** array : {&q, &k, &decays, &decayed_q, &decayed_k, &transposed}) arrays.take(*array, kChunkRows, dim);
    arrays.take(sums, kChunkRows, spec.key_decays ? dim : 1);
    for (float** array : {&kk, &qk, &products}) arrays.take(*array, kChunkRows, kChunkRows);
    for (float** array : {&beta, &ones}) arrays.take(*array, 1, kChunkRows);
    for (float** array : {&x, &u}) arrays.take(*array, kChunkRows, width);
    arrays.take(o, kChunkRows, value_width);
    for (float** array : {&added, &state}) arrays.take(*array, dim, width);
  }
};

class CpuGatedDelta final : public DeltaSegments {
 public:
  CpuGatedDelta(const GatedDeltaSpec& spec, const CpuBackend& backend)
      : DeltaSegments(spec, backend, /*max_heads=*/1, scratch_floats(spec)) {}

 private:
  void accumulate_segment(const GatedDeltaTask& task, const DeltaSegment& segment, float* memory) const override {
    [[maybe_unused]] const DeltaSubnormals flush{};
    const int head = segment.first_head;
    DeltaScratch scratch = scratch_in(memory);
    const int width = value_width() + (segment.needs_transition ? key_width() : 0);
    std::fill_n(scratch.state, spec().key_dim * width, 0.0F);
    std::fill_n(scratch.x, kChunkRows * width, 0.0F);
    for (int d = 0; segment.needs_transition && d < spec().key_dim; ++d) {
      scratch.state[d * width + value_width() + d] = 1.0F;
    }
    for_each_chunk(segment, [&](std::int64_t row, int tokens, int) {
      load_chunk(task, row, tokens, head, width, scratch);
      solve_chunk(tokens, width, scratch);
      advance_state(tokens, width, scratch);
    });
    float* const u = state_at(segment.index, head);
    float* const m = transition_at(segment.index, head);
    for (int d = 0; d < spec().key_dim; ++d) {
      std::copy_n(scratch.state + d * width, value_width(), u + d * value_width());
      if (segment.needs_transition)
        std::copy_n(scratch.state + d * width + value_width(), key_width(), m + d * key_width());
    }
  }

  void finish_segment(const GatedDeltaTask& task, const DeltaSegment& segment, float* memory) const override {
    [[maybe_unused]] const DeltaSubnormals flush{};
    const int head = segment.first_head;
    DeltaScratch scratch = scratch_in(memory);
    std::copy_n(state_at(segment.index, head), state_floats_padded(), scratch.state);
    std::fill_n(scratch.x, kChunkRows * value_width(), 0.0F);
    for_each_chunk(segment, [&](std::int64_t row, int tokens, int next_tokens) {
      load_chunk(task, row, tokens, head, value_width(), scratch);
      solve_chunk(tokens, value_width(), scratch);
      write_rows(task, row, tokens, head, scratch);
      if (next_tokens > 0) advance_state(tokens, value_width(), scratch);
    });
  }

  static std::size_t scratch_floats(const GatedDeltaSpec& spec) {
    ScratchArrays arrays(nullptr);
    DeltaScratch().lay_out(spec, padded_dim(spec.value_dim), padded_dim(spec.key_dim), arrays);
    return arrays.floats();
  }
  DeltaScratch scratch_in(float* memory) const {
    ScratchArrays arrays(memory);
    DeltaScratch scratch;
    scratch.lay_out(spec(), value_width(), key_width(), arrays);
    std::fill_n(scratch.ones, kChunkRows, 1.0F);
    return scratch;
  }

  // Loads rows [row, row + tokens) of a head, with zeros after them, and computes what does not depend on the state: G,
  // the decayed rows and the products of keys.
  void load_chunk(const GatedDeltaTask& task, std::int64_t row, int tokens, int head, int width,
                  DeltaScratch& scratch) const {
    const int dim = spec().key_dim;
    for (int i = 0; i < kChunkRows; ++i) {
      if (i < tokens) {
        load_key_row(task.q, row + i, head, scratch.q + i * dim);
        load_key_row(task.k, row + i, head, scratch.k + i * dim);
        widen_row(rows(), task.v, row + i, head, spec().value_dim, scratch.x + i * width);
        scratch.beta[i] = element_at(task.beta, row + i, head);
      } else {
        std::fill_n(scratch.q + i * dim, dim, 0.0F);
        std::fill_n(scratch.k + i * dim, dim, 0.0F);
      }
    }
    const int decay_dim = spec().decay_dim();
    for (int i = 0; i < kChunkRows; ++i) {
      const float* const log_decay =
          i < tokens ? reinterpret_cast<const float*>(task.log_decay.at(row + i, head)) : nullptr;
      float* const sums = scratch.sums + i * decay_dim;
      for (int d = 0; d < decay_dim; ++d) {
        const float log = log_decay == nullptr ? 0.0F : delta_log_decay(log_decay[d]);
        sums[d] = (i == 0 ? 0.0F : sums[d - decay_dim]) + log;
      }
    }
    spec().key_decays ? multiply_decayed_keys(tokens, scratch) : multiply_keys(tokens, scratch);
  }

  // scratch.decays ← exp2(G_i − G_s) for rows i, where G_s is 0 if `s` is negative. With `after`, exp2(G_s − G_i).
  void make_decays(int first, int end, int s, bool after, DeltaScratch& scratch) const {
    const int dim = spec().decay_dim();
    for (int i = first; i < end; ++i) {
      for (int d = 0; d < dim; ++d) {
        const float base = s < 0 ? 0.0F : scratch.sums[s * dim + d];
        const float sum = scratch.sums[i * dim + d];
        scratch.decays[i * dim + d] = after ? base - sum : sum - base;
      }
    }
    const int count = (end - first) * dim;
    ops().exp2(scratch.decays + first * dim, (count + kChannelBlock - 1) / kChannelBlock * kChannelBlock);
  }
  // target[i, d] = source[i, d] · scratch.decays
  void decay_rows(int first, int end, const float* source, float* target, const DeltaScratch& scratch) const {
    const int dim = spec().key_dim;
    for (int i = first; i < end; ++i) {
      for (int d = 0; d < dim; ++d) {
        const float decay = spec().key_decays ? scratch.decays[i * dim + d] : scratch.decays[i];
        target[i * dim + d] = source[i * dim + d] * decay;
      }
    }
  }
  // transposed[d, i] = source[i, d], and zeros for rows from `end` on.
  void transpose(int end, const float* source, DeltaScratch& scratch) const {
    for (int d = 0; d < spec().key_dim; ++d) {
      float* const row = scratch.transposed + d * kChunkRows;
      for (int i = 0; i < end; ++i) row[i] = source[i * spec().key_dim + d];
      std::fill(row + end, row + kChunkRows, 0.0F);
    }
  }

  void multiply_keys(int tokens, DeltaScratch& scratch) const {
    const int dim = spec().key_dim;
    transpose(tokens, scratch.k, scratch);
    ops().product(scratch.k, dim, tokens, dim, scratch.transposed, kChunkRows, scratch.products);
    ops().intra_chunk_scores(tokens, scratch.products, scratch.sums, scratch.ones, scratch.kk);
    ops().product(scratch.q, dim, tokens, dim, scratch.transposed, kChunkRows, scratch.products);
    ops().intra_chunk_scores(tokens, scratch.products, scratch.sums, scratch.ones, scratch.qk);
    make_decays(0, kChunkRows, -1, false, scratch);
    decay_rows(0, tokens, scratch.q, scratch.decayed_q, scratch);
    decay_rows(0, tokens, scratch.k, scratch.decayed_k, scratch);
  }

  // By sub-chunks: 4 of gated_delta.hpp.
  void multiply_decayed_keys(int tokens, DeltaScratch& scratch) const {
    const int dim = spec().key_dim;
    for (int first = 0; first < tokens; first += kSubChunk) {
      const int end = std::min(first + kSubChunk, tokens);
      if (first > 0) {
        make_decays(0, first, first - 1, true, scratch);
        decay_rows(0, first, scratch.k, scratch.decayed_k, scratch);
        transpose(first, scratch.decayed_k, scratch);
        make_decays(first, end, first - 1, false, scratch);
        decay_rows(first, end, scratch.q, scratch.decayed_q, scratch);
        decay_rows(first, end, scratch.k, scratch.decayed_k, scratch);
        const auto product = [&](const float* rows, float* scores) {
          ops().product(rows + first * dim, dim, end - first, dim, scratch.transposed, kChunkRows,
                        scores + first * kChunkRows);
        };
        product(scratch.decayed_k, scratch.kk);
        product(scratch.decayed_q, scratch.qk);
      }
      const int at = first * kChunkRows + first;
      ops().decayed_scores(end - first, dim, scratch.q + first * dim, scratch.k + first * dim,
                           scratch.sums + first * dim, scratch.kk + at, scratch.qk + at);
    }
    make_decays(0, tokens, -1, false, scratch);
    decay_rows(0, tokens, scratch.q, scratch.decayed_q, scratch);
    decay_rows(0, tokens, scratch.k, scratch.decayed_k, scratch);
  }

  // u, by substitution.
  void solve_chunk(int tokens, int width, DeltaScratch& scratch) const {
    ops().product(scratch.decayed_k, spec().key_dim, tokens, spec().key_dim, scratch.state, width, scratch.u);
    ops().solve_lower(tokens, scratch.kk, scratch.beta, scratch.x, width, scratch.u);
  }

  // The state after the chunk.
  void advance_state(int tokens, int width, DeltaScratch& scratch) const {
    const int dim = spec().key_dim;
    const int last = tokens - 1;
    make_decays(0, spec().key_decays ? tokens : kChunkRows, last, true, scratch);
    decay_rows(0, tokens, scratch.k, scratch.decayed_k, scratch);
    transpose(tokens, scratch.decayed_k, scratch);
    ops().product(scratch.transposed, kChunkRows, dim, tokens, scratch.u, width, scratch.added);
    float decays[kMaxDeltaDim] = {};
    std::copy_n(scratch.sums + last * spec().decay_dim(), spec().decay_dim(), decays);
    ops().exp2(decays, (spec().decay_dim() + kChannelBlock - 1) / kChannelBlock * kChannelBlock);
    for (int d = 0; d < dim; ++d) {
      const float decay = decays[spec().key_decays ? d : 0];
      float* const state = scratch.state + d * width;
      ops().join(decay, state, scratch.added + d * width, width, state);
    }
  }

  void write_rows(const GatedDeltaTask& task, std::int64_t row, int tokens, int head, DeltaScratch& scratch) const {
    const int dim = spec().key_dim;
    ops().product(scratch.decayed_q, dim, tokens, dim, scratch.state, value_width(), scratch.o);
    ops().add_lower(scratch.qk, kChunkRows, tokens, scratch.ones, scratch.u, value_width(), scratch.o);
    for (int i = 0; i < tokens; ++i) {
      float* const o = scratch.o + i * value_width();
      for (int c = 0; c < spec().value_dim; ++c) o[c] *= scale();
      narrow_row(ops(), o, spec().value_dim, spec().dtype, task.o.at(row + i, head));
    }
  }
};

}  // namespace

std::vector<std::string> cpu_gated_delta_missing(const GatedDeltaSpec& spec) {
  std::vector<std::string> missing;
  const auto check = [&missing](const char* name, int dim) {
    if (dim >= 8 && dim <= kMaxDeltaDim && dim % 8 == 0) return;
    missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, kMaxDeltaDim));
  };
  check("key_dim", spec.key_dim);
  check("value_dim", spec.value_dim);
  return missing;
}

double cpu_gated_delta_speed(const Backend& backend) {
  GatedDeltaSpec any;
  return host_speed(cpu_gated_delta_work(any, backend, kManyTokens), nullptr);
}

// Measured with four heads of 128, 2k to 16k tokens and one thread.
HostWork cpu_gated_delta_work(const GatedDeltaSpec& spec, const Backend& backend, std::int64_t tokens) {
  return delta_work(spec, backend, tokens, /*max_heads=*/1, 12.5 * best_ssm_ops().flops_per_second, 2.9);
}

std::unique_ptr<GatedDeltaKernel> make_cpu_gated_delta(const GatedDeltaSpec& spec, Backend& backend) {
  return std::make_unique<CpuGatedDelta>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
