// SPDX-License-Identifier: Apache-2.0
// Linear attention with a decay per key dim. With g_i the sums of a chunk's log-decays up to token i, a vector of the
// key dims, its intra-chunk scores are Σ_n q_i[n] · k_j[n] · exp2(g_i[n] − g_j[n]). No factor of them may be an exp2 of
// a positive number, which overflows where decays are strong. So a chunk is cut into sub-chunks of 16 tokens:
//
//   - below the diagonal, with r the sums before the sub-chunk of i: a product of q_i · exp2(g_i − r), k_j · exp2(r −
//   g_j);
//   - on the diagonal, the sum itself.
#include "kernels/ssm/cpu/cpu_gla.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/ssm/cpu/ssd_levels.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kSubChunk = 16;
// Exponentials of the diagonal dominate.
constexpr double kGlaPart = 1.4;  // of SsmOps::flops_per_second

// One thread's scratch for a chunk. A row has state_dim elements.
struct GlaScratch {
  float* q = nullptr;         // [kChunkRows, state_dim]
  float* k = nullptr;         // likewise, zeros after the last token
  float* sums = nullptr;      // likewise: g
  float* scaled_q = nullptr;  // likewise
  float* scaled_k = nullptr;  // [state_dim, kChunkRows]: transposed
  float* row = nullptr;       // [state_dim]
  float* v = nullptr;         // [kChunkRows, width]
  float* scores = nullptr;    // [kChunkRows, kChunkRows]
  float* ones = nullptr;      // [kChunkRows]
  float* added = nullptr;     // [state_dim, width]: the chunk's contribution to the state
  float* y = nullptr;         // [kChunkRows, width]

  GlaScratch(int state_dim, int width, ScratchArrays& arrays) {
    for (float** rows : {&q, &k, &sums, &scaled_q}) arrays.take(*rows, kChunkRows, state_dim);
    arrays.take(scaled_k, state_dim, kChunkRows);
    arrays.take(row, 1, state_dim);
    arrays.take(v, kChunkRows, width);
    arrays.take(scores, kChunkRows, kChunkRows);
    arrays.take(ones, 1, kChunkRows);
    arrays.take(added, state_dim, width);
    arrays.take(y, kChunkRows, width);
  }
  static std::size_t floats(const SsmSpec& spec, int width) {
    ScratchArrays arrays(nullptr);
    GlaScratch(spec.state_dim, width, arrays);
    return arrays.floats();
  }
};

class CpuGla final : public SsdLevels {
 public:
  CpuGla(const SsmSpec& spec, const CpuBackend& backend)
      : SsdLevels(spec, backend, 1, GlaScratch::floats(spec, width_of(spec)), /*descending=*/false, spec.state_dim) {}

  int heads_together() const override { return 1; }
  double cost_of_two_ranges(double) const override { return 0.0; }

 private:
  GlaScratch gla_scratch(float* memory) const {
    ScratchArrays arrays(memory);
    scratch_of(arrays);
    const GlaScratch scratch(spec().state_dim, width(), arrays);
    std::fill_n(scratch.v, kChunkRows * width(), 0.0F);  // the padding stays zero
    std::fill_n(scratch.ones, kChunkRows, 1.0F);
    return scratch;
  }
  // The last token's sums: the log-decays of the chunk.
  const float* chunk_log(const GlaScratch& scratch, int tokens) const {
    return scratch.sums + (tokens - 1) * spec().state_dim;
  }

  void accumulate_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* memory, float* states,
                       float* logs) const override {
    const GlaScratch scratch = gla_scratch(memory);
    std::fill_n(states, block_floats(), 0.0F);
    std::fill_n(logs, spec().state_dim, 0.0F);
    for (int begin = 0; begin < work_tile.tokens; begin += kChunkRows) {
      const int tokens = std::min(kChunkRows, work_tile.tokens - begin);
      load(task, work_tile.row + begin, tokens, work_tile.first_head_block, scratch);
      accumulate(tokens, states, scratch);
      for (int n = 0; n < spec().state_dim; ++n) logs[n] += chunk_log(scratch, tokens)[n];
    }
  }

  void finish_tile(const SsmTask& task, const SsmWorkTile& work_tile, float* memory, float* state) const override {
    const GlaScratch scratch = gla_scratch(memory);
    const int head = work_tile.first_head_block;
    for (int begin = 0; begin < work_tile.tokens; begin += kChunkRows) {
      const int tokens = std::min(kChunkRows, work_tile.tokens - begin);
      const std::int64_t row = work_tile.row + begin;
      load(task, row, tokens, head, scratch);
      for (int i = 0; i < tokens; ++i) {
        load_bc(task.rotation, task.c, row + i, group_of(head), scratch.q + i * spec().state_dim);
      }
      write_rows(task, row, tokens, head, state, scratch);
      if (begin + tokens < work_tile.tokens) accumulate(tokens, state, scratch);
    }
  }

  void join(const SsmTask&, int, const float* logs, const float* before, const float* local,
            float* result) const override {
    join_gla_states(ops(), logs, spec().state_dim, width(), before, local, result);
  }

  // Loads k and v, and computes the sums of log-decays.
  void load(const SsmTask& task, std::int64_t row, int tokens, int head, const GlaScratch& scratch) const {
    const int dims = spec().state_dim;
    for (int j = 0; j < kChunkRows; ++j) {
      float* const k = scratch.k + j * dims;
      float* const sums = scratch.sums + j * dims;
      if (j >= tokens) {  // only to be finite
        std::fill_n(k, dims, 0.0F);
        std::copy_n(sums - dims, dims, sums);
        continue;
      }
      load_bc(task.rotation, task.b, row + j, group_of(head), k);
      widen_row(rows(), task.x, row + j, head, spec().head_dim, scratch.v + j * width());
      widen_row(rows(), task.dt, row + j, head, dims, sums);
      for (int n = 0; n < dims; ++n) {
        const float log = sums[n] * kLog2E;
        const float clamped = log < kMinLogDecay ? kMinLogDecay : log;
        sums[n] = j == 0 ? clamped : sums[n - dims] + clamped;
      }
    }
  }

  // target ← row · exp2(to − from); `from` may be null: 0.
  void scale_by_decay(const float* row, const float* to, const float* from, float* target) const {
    const int dims = spec().state_dim;
    for (int n = 0; n < dims; ++n) target[n] = from == nullptr ? to[n] : to[n] - from[n];
    ops().exp2(target, dims);
    for (int n = 0; n < dims; ++n) target[n] *= row[n];
  }

  // Scales the keys of tokens [0, end) by the decays from there to a token with these sums, transposed.
  void scale_keys(int end, const float* to, const GlaScratch& scratch) const {
    const int dims = spec().state_dim;
    for (int j = 0; j < end; ++j) {
      scale_by_decay(scratch.k + j * dims, to, scratch.sums + j * dims, scratch.row);
      for (int n = 0; n < dims; ++n) scratch.scaled_k[n * kChunkRows + j] = scratch.row[n];
    }
  }

  void compute_scores(int tokens, const GlaScratch& scratch) const {
    const int dims = spec().state_dim;
    for (int first = 0; first < tokens; first += kSubChunk) {
      const int count = std::min(kSubChunk, tokens - first);
      float* const scores = scratch.scores + first * kChunkRows;
      if (first > 0) {
        const float* const before = scratch.sums + (first - 1) * dims;
        for (int i = 0; i < count; ++i) {
          const std::ptrdiff_t at = std::ptrdiff_t{first + i} * dims;
          scale_by_decay(scratch.q + at, scratch.sums + at, before, scratch.scaled_q + i * dims);
        }
        scale_keys(first, before, scratch);
        ops().product(scratch.scaled_q, dims, count, dims, scratch.scaled_k, kChunkRows, scores);
      }
      for (int i = 0; i < count; ++i) {
        const std::ptrdiff_t at = std::ptrdiff_t{first + i} * dims;
        for (int j = first; j <= first + i; ++j) {
          scores[i * kChunkRows + j] =
              ops().decayed_dot(dims, scratch.q + at, scratch.k + j * dims, scratch.sums + at, scratch.sums + j * dims);
        }
      }
    }
  }

  void write_rows(const SsmTask& task, std::int64_t row, int tokens, int head, const float* state,
                  const GlaScratch& scratch) const {
    const int dims = spec().state_dim;
    compute_scores(tokens, scratch);
    for (int i = 0; i < tokens; ++i) {
      const std::ptrdiff_t at = std::ptrdiff_t{i} * dims;
      scale_by_decay(scratch.q + at, scratch.sums + at, nullptr, scratch.scaled_q + at);
    }
    ops().product(scratch.scaled_q, dims, tokens, dims, state, width(), scratch.y);
    ops().add_lower(scratch.scores, kChunkRows, tokens, scratch.ones, scratch.v, width(), scratch.y);
    for (int i = 0; i < tokens; ++i) {
      float* const y = scratch.y + i * width();
      scale_row(spec().scale, spec().head_dim, y);
      narrow_row(ops(), y, spec().head_dim, spec().dtype, task.y.at(row + i, head));
    }
  }

  // state ← fma(a(chunk), state, Σ_j a(tokens after j) · v_j ⊗ k_j)
  void accumulate(int tokens, float* state, const GlaScratch& scratch) const {
    const float* const log = chunk_log(scratch, tokens);
    scale_keys(tokens, log, scratch);
    ops().product(scratch.scaled_k, kChunkRows, spec().state_dim, tokens, scratch.v, width(), scratch.added);
    join({}, 0, log, state, scratch.added, state);
  }
};

}  // namespace

void join_gla_states(const SsmOps& ops, const float* logs, int state_dim, int width, const float* before,
                     const float* local, float* result) {
  std::vector<float> decays(logs, logs + state_dim);
  ops.exp2(decays.data(), state_dim);
  for (int n = 0; n < state_dim; ++n) {
    const std::ptrdiff_t at = std::ptrdiff_t{n} * width;
    ops.join(decays[static_cast<std::size_t>(n)], before + at, local + at, width, result + at);
  }
}

std::vector<std::string> cpu_gla_missing(const SsmSpec& spec) {
  std::vector<std::string> missing;
  if (spec.decay != SsmDecay::kDim) missing.push_back("a decay per head (supported: a decay per key dim)");
  const auto check = [&missing](const char* name, int dim) {
    if (dim >= 8 && dim <= kMaxSsdDim && dim % 8 == 0) return;
    missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, kMaxSsdDim));
  };
  check("head_dim", spec.head_dim);
  check("state_dim", spec.state_dim);
  return missing;
}

HostWork cpu_gla_work(const SsmSpec& spec, const Backend& backend, std::int64_t tokens) {
  return run_work(spec, /*heads_per_tile=*/1, backend, tokens, kGlaPart * best_ssm_ops().flops_per_second);
}

std::unique_ptr<SsmKernel> make_cpu_gla(const SsmSpec& spec, Backend& backend) {
  return std::make_unique<CpuGla>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
