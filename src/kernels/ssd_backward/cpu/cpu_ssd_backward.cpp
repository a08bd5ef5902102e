// SPDX-License-Identifier: Apache-2.0
// Gradients of SSD on the CPU. States before segments and gradients after them are computed by two SsdLevels. A head's
// segment is then processed twice: ascending, to keep the state before each chunk, and descending, for the gradients.
//
// The sums over all later tokens of a chunk are products with a lower triangle, with the chunk's rows in reverse order.
#include "kernels/ssd_backward/cpu/cpu_ssd_backward.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/common/registry.hpp"
#include "kernels/ssm/cpu/cpu_ssd.hpp"
#include "kernels/ssm/cpu/ssd_levels.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kHeadsPerSet = 8;
constexpr int kChunksOfSegment = static_cast<int>(kSegmentTokens / kChunkTokens);

float* floats_of(const Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

float dot(const float* a, const float* b, int count) {
  float sum = 0.0F;
  for (int i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// target [columns, target_stride] ← sourceᵀ; source: [rows, source_stride].
void transpose(const float* source, int rows, int columns, int source_stride, int target_stride, float* target) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) target[c * target_stride + r] = source[r * source_stride + c];
  }
}

// Rows in reverse order.
void reverse_rows(const float* source, int rows, int width, float* target) {
  for (int r = 0; r < rows; ++r) std::copy_n(source + (rows - 1 - r) * width, width, target + r * width);
}

// The lower triangle of source, [kChunkRows, kChunkRows], mirrored at the other diagonal: row r is column rows − 1 − r,
// in reverse order.
void mirror(const float* source, int rows, float* target) {
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k <= r; ++k) {
      target[r * kChunkRows + k] = source[(rows - 1 - k) * kChunkRows + rows - 1 - r];
    }
  }
}

// States of all segments, for the backward kernel.
class States final : public SsdLevels {
 public:
  States(const SsmSpec& spec, const CpuBackend& backend) : SsdLevels(spec, backend, kHeadsPerSet, 0) {}
  int heads_together() const override { return kHeadsPerSet; }
  double cost_of_two_ranges(double) const override { return 0.0; }

  using SsdLevels::accumulate_chunk;
  using SsdLevels::load_b;
  using SsdLevels::load_head;

 private:
  void finish_tile(const SsmTask&, const SsmWorkTile&, float*, float*) const override {}  // never finished
};

// One thread's scratch for a head of a segment, in addition to SsdScratch. Arrays of rows of B and C are padded to
// `state_width` with zeros.
struct GradientScratch {
  float* states = nullptr;        // [kChunksOfSegment, state_dim, width]: before each chunk
  float* across = nullptr;        // [width, state_width]: a transposed state, or gradient of one
  float* b = nullptr;             // [kChunkRows, state_width]
  float* c = nullptr;             // [kChunkRows, state_width]
  float* transposed = nullptr;    // [state_dim or width, kChunkRows]
  float* x = nullptr;             // [kChunkRows, width]
  float* g = nullptr;             // [kChunkRows, width]: gradient of y before the gate
  float* dy = nullptr;            // [kChunkRows, width]
  float* y = nullptr;             // [kChunkRows, width]
  float* z = nullptr;             // [kChunkRows, width]
  float* rows = nullptr;          // [kChunkRows, width]
  float* rows_b = nullptr;        // [kChunkRows, state_width]
  float* result = nullptr;        // [kChunkRows, width]
  float* result_b = nullptr;      // [kChunkRows, state_width]
  float* scores = nullptr;        // [kChunkRows, kChunkRows]: C · Bᵀ
  float* products = nullptr;      // [kChunkRows, kChunkRows]: g · xᵀ
  float* weights = nullptr;       // [kChunkRows, kChunkRows]: products with decays and dt
  float* decayed = nullptr;       // [kChunkRows, kChunkRows]: scores with decays
  float* mirrored = nullptr;      // [kChunkRows, kChunkRows]
  float* ones = nullptr;          // [kChunkRows]
  float* up_to = nullptr;         // [kChunkRows]: decays of the tokens up to each
  float* after = nullptr;         // [kChunkRows]: decays of the tokens after each
  float* scales = nullptr;        // [kChunkRows]
  float* slopes = nullptr;        // [kChunkRows]: derivatives of dt by the dt that is given
  float* dx_dt = nullptr;         // [kChunkRows]: x · G · B
  float* to_end = nullptr;        // [kChunkRows]: a token's term of the state after the chunk, times its gradient
  float* from_begin = nullptr;    // [kChunkRows]: a row's term from the state before the chunk, times its gradient
  float* pairs = nullptr;         // [kChunkRows]
  float* log_gradient = nullptr;  // [kChunkRows]: q
  SsdScratch levels;

  GradientScratch(const SsmSpec& spec, int width, int state_width, ScratchArrays& arrays) {
    arrays.take(states, kChunksOfSegment * spec.state_dim, width);
    arrays.take(across, width, state_width);
    for (float** rows_of_b : {&b, &c, &rows_b, &result_b}) arrays.take(*rows_of_b, kChunkRows, state_width);
    arrays.take(transposed, std::max(spec.state_dim, width), kChunkRows);
    for (float** rows_of_x : {&x, &g, &dy, &y, &z, &rows, &result}) arrays.take(*rows_of_x, kChunkRows, width);
    for (float** square : {&scores, &products, &weights, &decayed, &mirrored}) {
      arrays.take(*square, kChunkRows, kChunkRows);
    }
    for (float** tokens :
         {&ones, &up_to, &after, &scales, &slopes, &dx_dt, &to_end, &from_begin, &pairs, &log_gradient}) {
      arrays.take(*tokens, 1, kChunkRows);
    }
  }
  static std::size_t floats(const SsmSpec& spec, int width, int state_width) {
    ScratchArrays arrays(nullptr);
    GradientScratch(spec, width, state_width, arrays);
    return arrays.floats();
  }
};

// Computes gradients of states and, in finish(), all other gradients from them.
class Gradients final : public SsdLevels {
 public:
  Gradients(const SsdBackwardSpec& spec, const CpuBackend& backend, const States& states)
      : SsdLevels(spec.forward, backend, kHeadsPerSet,
                  GradientScratch::floats(spec.forward, width_of(spec.forward), state_width_of(spec.forward)), true),
        spec_(spec),
        states_(states),
        state_width_(state_width_of(spec.forward)),
        sets_(head_sets(spec.forward, kHeadsPerSet)) {}

  int heads_together() const override { return kHeadsPerSet; }
  double cost_of_two_ranges(double) const override { return 0.0; }

  const std::vector<HeadRange>& sets() const { return sets_; }
  std::size_t partial_bytes(std::int64_t rows) const {
    return sets_.size() * static_cast<std::size_t>(rows * spec().state_dim) * sizeof(float);
  }
  void reserve_partials(std::int64_t rows) {
    partial_rows_ = rows;
    partial_db_ = allocate_host(partial_bytes(rows));
    partial_dc_ = allocate_host(partial_bytes(rows));
  }
  // The partial dB or dC of a set and row, [state_dim].
  float* partial_db(std::size_t set, std::int64_t row) const { return partial(partial_db_, set, row); }
  float* partial_dc(std::size_t set, std::int64_t row) const { return partial(partial_dc_, set, row); }

  void finish(const SsdBackwardTask& task, const SsmTask& states, const SsmTask& gradients, const HeadRange& heads,
              const Progress& progress) {
    task_ = &task;
    state_task_ = &states;
    SsmLevels::finish(gradients, heads, {}, progress);
  }

 private:
  static int state_width_of(const SsmSpec& spec) { return padded(spec.state_dim, best_ssm_ops().lanes); }

  float* partial(const Buffer& buffer, std::size_t set, std::int64_t row) const {
    return floats_of(buffer) + (static_cast<std::int64_t>(set) * partial_rows_ + row) * std::int64_t{spec().state_dim};
  }

  // The first chunk's rows, and the chunk's tokens and head.
  struct Chunk {
    std::int64_t row = 0;
    int tokens = 0;
    int head = 0;
    std::size_t set = 0;
    bool first_of_set = false;
  };

  void finish_tile(const SsmTask&, const SsmWorkTile& work_tile, float* memory, float* gradients) const override {
    const SsmSpec& spec = spec_.forward;
    ScratchArrays arrays(memory);
    const GradientScratch scratch = cleared_scratch(arrays);
    const auto set = static_cast<std::size_t>(std::ranges::find(sets_, work_tile.first_head_block, &HeadRange::first) -
                                              sets_.begin());
    for (int i = 0; i < work_tile.head_blocks; ++i) {
      const int head = work_tile.first_head_block + i;
      keep_states(work_tile, head, scratch);
      SsdTerms terms;
      const int chunks = (work_tile.tokens + kChunkRows - 1) / kChunkRows;
      for (int chunk = chunks - 1; chunk >= 0; --chunk) {
        const int begin = chunk * kChunkRows;
        differentiate({work_tile.row + begin, std::min(kChunkRows, work_tile.tokens - begin), head, set, i == 0},
                      scratch.states + static_cast<std::size_t>(chunk) * block_floats(),
                      gradients + static_cast<std::size_t>(i) * block_floats(), scratch, terms);
      }
      task_->terms[work_tile.index * spec.heads + head] = terms;
    }
  }

  GradientScratch cleared_scratch(ScratchArrays& arrays) const {
    const SsdScratch levels = scratch_of(arrays);
    GradientScratch scratch(spec(), width(), state_width_, arrays);
    scratch.levels = levels;
    for (float* rows : {scratch.x, scratch.g, scratch.dy, scratch.y, scratch.z}) {
      std::fill_n(rows, kChunkRows * width(), 0.0F);
    }
    for (float* rows : {scratch.b, scratch.c}) std::fill_n(rows, kChunkRows * state_width_, 0.0F);
    std::fill_n(scratch.across, width() * state_width_, 0.0F);
    std::fill_n(scratch.ones, kChunkRows, 1.0F);
    return scratch;
  }

  // Computes the state before each chunk.
  void keep_states(const SsmWorkTile& work_tile, int head, const GradientScratch& scratch) const {
    SsdScratch levels = scratch.levels;
    states_.state_before(*state_task_, work_tile, head, scratch.states);
    for (int begin = 0; begin + kChunkRows < work_tile.tokens; begin += kChunkRows) {
      float* const state = scratch.states + static_cast<std::size_t>(begin / kChunkRows) * block_floats();
      std::copy_n(state, block_floats(), state + block_floats());
      states_.load_b({}, task_->b, work_tile.row + begin, kChunkRows, group_of(head), levels);
      states_.load_head(*state_task_, work_tile.row + begin, kChunkRows, head, levels);
      states_.accumulate_chunk(kChunkRows, state + block_floats(), levels);
    }
  }

  // Writes a chunk's gradients. `state` is the state before the chunk. `gradient` is the gradient of the state after
  // the chunk, and is replaced by that of the state before it.
  void differentiate(const Chunk& chunk, const float* state, float* gradient, const GradientScratch& scratch,
                     SsdTerms& terms) const {
    load_rows(chunk, scratch);
    const int tokens = chunk.tokens;
    const SsdScratch& levels = scratch.levels;
    // Pairs of tokens.
    transpose(scratch.b, tokens, spec().state_dim, state_width_, kChunkRows, scratch.transposed);
    ops().product(scratch.c, state_width_, tokens, spec().state_dim, scratch.transposed, kChunkRows, scratch.scores);
    transpose(scratch.x, tokens, spec().head_dim, width(), kChunkRows, scratch.transposed);
    ops().product(scratch.g, width(), tokens, spec().head_dim, scratch.transposed, kChunkRows, scratch.products);
    ops().intra_chunk_scores(tokens, scratch.products, levels.sums, levels.dt, scratch.weights);
    ops().intra_chunk_scores(tokens, scratch.scores, levels.sums, scratch.ones, scratch.decayed);

    if (spec().gate) write_dz(chunk, state, scratch);
    add_dc(chunk, state, scratch);
    add_db(chunk, gradient, scratch);
    write_dx(chunk, gradient, scratch);
    write_ddt(chunk, state, gradient, scratch, terms);

    SsdScratch own = levels;
    load_b({}, task_->c, chunk.row, tokens, group_of(chunk.head), own);
    own.x = scratch.g;
    accumulate_chunk(tokens, gradient, own);
  }

  void load_rows(const Chunk& chunk, const GradientScratch& scratch) const {
    const int group = group_of(chunk.head);
    SsdScratch levels = scratch.levels;
    states_.load_head(*state_task_, chunk.row, chunk.tokens, chunk.head, levels);
    std::copy_n(levels.x, kChunkRows * width(), scratch.x);
    for (int i = 0; i < chunk.tokens; ++i) {
      const std::int64_t row = chunk.row + i;
      widen_row(rows(), task_->b, row, group, spec().state_dim, scratch.b + i * state_width_);
      widen_row(rows(), task_->c, row, group, spec().state_dim, scratch.c + i * state_width_);
      float* const dy = scratch.dy + i * width();
      float* const g = scratch.g + i * width();
      widen_row(rows(), task_->dy, row, chunk.head, spec().head_dim, dy);
      std::copy_n(dy, width(), g);
      if (!spec().gate) continue;
      float* const z = scratch.z + i * width();
      widen_row(rows(), task_->z, row, chunk.head, spec().head_dim, z);
      ops().finish(spec().head_dim, nullptr, g, z, g);
    }
    const float last = levels.sums[chunk.tokens - 1];
    std::copy_n(levels.sums, kChunkRows, scratch.up_to);
    for (int j = 0; j < kChunkRows; ++j) scratch.after[j] = last - levels.sums[j];
    ops().exp2(scratch.up_to, kChunkRows);
    ops().exp2(scratch.after, kChunkRows);
  }

  // The derivative of z / (1 + exp(−z)). It is 1 at +∞ and 0 at −∞, for which the product would be ∞ · 0.
  static float silu_slope(float z, float sigmoid) {
    return std::isinf(z) ? sigmoid : sigmoid * (1.0F + z * (1.0F - sigmoid));
  }

  void write_dz(const Chunk& chunk, const float* state, const GradientScratch& scratch) const {
    const SsdScratch& levels = scratch.levels;
    ops().product(scratch.c, state_width_, chunk.tokens, spec().state_dim, state, width(), scratch.y);
    ops().intra_chunk_scores(chunk.tokens, scratch.scores, levels.sums, levels.dt, scratch.mirrored);
    ops().add_lower(scratch.mirrored, kChunkRows, chunk.tokens, scratch.up_to, scratch.x, width(), scratch.y);
    const float d = spec().skip ? task_->d[chunk.head] : 0.0F;
    for (int i = 0; i < chunk.tokens; ++i) {
      const float* const z = scratch.z + i * width();
      float* const sigmoid = scratch.rows + i * width();
      std::copy_n(z, width(), sigmoid);
      ops().logistic(sigmoid, spec().head_dim);
      float* const dz = scratch.y + i * width();
      for (int p = 0; p < spec().head_dim; ++p) {
        const float y = spec().skip ? dz[p] + d * scratch.x[i * width() + p] : dz[p];
        dz[p] = scratch.dy[i * width() + p] * y * silu_slope(z[p], sigmoid[p]);
      }
      narrow_row(ops(), dz, spec().head_dim, spec_.gradients, task_->dz.at(chunk.row + i, chunk.head));
    }
  }

  void add_rows(const Chunk& chunk, const float* rows, float* partial) const {
    for (int i = 0; i < chunk.tokens; ++i, partial += spec().state_dim) {
      const float* const row = rows + i * state_width_;
      for (int n = 0; n < spec().state_dim; ++n) partial[n] = chunk.first_of_set ? row[n] : partial[n] + row[n];
    }
  }

  void add_dc(const Chunk& chunk, const float* state, const GradientScratch& scratch) const {
    transpose(state, spec().state_dim, spec().head_dim, width(), state_width_, scratch.across);
    ops().product(scratch.g, width(), chunk.tokens, spec().head_dim, scratch.across, state_width_, scratch.result_b);
    for (int i = 0; i < chunk.tokens; ++i) {
      scratch.from_begin[i] =
          scratch.up_to[i] * dot(scratch.c + i * state_width_, scratch.result_b + i * state_width_, spec().state_dim);
    }
    ops().add_lower(scratch.weights, kChunkRows, chunk.tokens, scratch.up_to, scratch.b, state_width_,
                    scratch.result_b);
    add_rows(chunk, scratch.result_b, partial_dc(chunk.set, chunk.row));
  }

  void add_db(const Chunk& chunk, const float* gradient, const GradientScratch& scratch) const {
    const int tokens = chunk.tokens;
    transpose(gradient, spec().state_dim, spec().head_dim, width(), state_width_, scratch.across);
    reverse_rows(scratch.x, tokens, width(), scratch.rows);
    ops().product(scratch.rows, width(), tokens, spec().head_dim, scratch.across, state_width_, scratch.rows_b);
    for (int r = 0; r < tokens; ++r) {
      const int j = tokens - 1 - r;
      scratch.scales[r] = scratch.after[j] * scratch.levels.dt[j];
      scratch.to_end[j] =
          scratch.scales[r] * dot(scratch.b + j * state_width_, scratch.rows_b + r * state_width_, spec().state_dim);
    }
    mirror(scratch.weights, tokens, scratch.mirrored);
    reverse_rows(scratch.c, tokens, state_width_, scratch.result_b);
    ops().add_lower(scratch.mirrored, kChunkRows, tokens, scratch.scales, scratch.result_b, state_width_,
                    scratch.rows_b);
    reverse_rows(scratch.rows_b, tokens, state_width_, scratch.result_b);
    add_rows(chunk, scratch.result_b, partial_db(chunk.set, chunk.row));
  }

  void write_dx(const Chunk& chunk, const float* gradient, const GradientScratch& scratch) const {
    const int tokens = chunk.tokens;
    reverse_rows(scratch.b, tokens, state_width_, scratch.rows_b);
    ops().product(scratch.rows_b, state_width_, tokens, spec().state_dim, gradient, width(), scratch.result);
    for (int r = 0; r < tokens; ++r) scratch.scales[r] = scratch.after[tokens - 1 - r];
    mirror(scratch.decayed, tokens, scratch.mirrored);
    reverse_rows(scratch.g, tokens, width(), scratch.rows);
    ops().add_lower(scratch.mirrored, kChunkRows, tokens, scratch.scales, scratch.rows, width(), scratch.result);
    const float d = spec().skip ? task_->d[chunk.head] : 0.0F;
    for (int j = 0; j < tokens; ++j) {
      float* const dx = scratch.result + (tokens - 1 - j) * width();
      scratch.dx_dt[j] = dot(scratch.x + j * width(), dx, spec().head_dim);
      for (int p = 0; p < spec().head_dim; ++p) {
        dx[p] *= scratch.levels.dt[j];
        if (spec().skip) dx[p] += d * scratch.g[j * width() + p];
      }
      narrow_row(ops(), dx, spec().head_dim, spec_.gradients, task_->dx.at(chunk.row + j, chunk.head));
    }
  }

  // q of the chunk's tokens.
  void log_gradients(const Chunk& chunk, const float* state, const float* gradient,
                     const GradientScratch& scratch) const {
    const int tokens = chunk.tokens;
    float* const q = scratch.log_gradient;
    // pairs[i]: the sum of the terms w_ij over the j so far. q_t needs pairs (i, j) with j < t ≤ i, so it is a sum of
    // these.
    std::fill_n(scratch.pairs, kChunkRows, 0.0F);
    for (int t = 0; t < tokens; ++t) {
      q[t] = 0.0F;
      for (int i = t; i < tokens; ++i) q[t] += scratch.pairs[i];
      for (int i = t + 1; i < tokens; ++i) {
        scratch.pairs[i] += scratch.scores[i * kChunkRows + t] * scratch.weights[i * kChunkRows + t];
      }
    }
    float sum = 0.0F;
    for (int i = tokens - 1; i >= 0; --i) q[i] += sum += scratch.from_begin[i];
    sum = scratch.up_to[tokens - 1] * dot(state, gradient, static_cast<int>(block_floats()));
    for (int j = 0; j < tokens; ++j) {
      q[j] += sum;
      sum += scratch.to_end[j];
    }
    const float rate = task_->a[chunk.head] * kLog2E;
    for (int j = 0; j < tokens; ++j) {
      if (scratch.levels.dt[j] * rate < kMinLogDecay) q[j] = 0.0F;
    }
  }

  // The slopes of bias, softplus and limits.
  void dt_slopes(const Chunk& chunk, const GradientScratch& scratch) const {
    float* const given = scratch.scales;
    std::fill_n(given, kChunkRows, 0.0F);
    for (int j = 0; j < chunk.tokens; ++j) {
      given[j] = element_at(task_->dt, chunk.row + j, chunk.head);
      if (spec().dt_bias) given[j] += task_->dt_bias[chunk.head];
    }
    std::fill_n(scratch.slopes, kChunkRows, 1.0F);
    if (spec().dt_softplus) {
      std::copy_n(given, kChunkRows, scratch.slopes);
      ops().logistic(scratch.slopes, kChunkRows);
      ops().softplus(given, kChunkRows);
    }
    for (int j = 0; j < chunk.tokens; ++j) {
      if (given[j] < spec().dt_min || given[j] > spec().dt_max) scratch.slopes[j] = 0.0F;
    }
  }

  void write_ddt(const Chunk& chunk, const float* state, const float* gradient, const GradientScratch& scratch,
                 SsdTerms& terms) const {
    log_gradients(chunk, state, gradient, scratch);
    dt_slopes(chunk, scratch);
    SsdTerms own;
    for (int j = 0; j < chunk.tokens; ++j) {
      const float q = scratch.log_gradient[j];
      float ddt = scratch.dx_dt[j] + task_->a[chunk.head] * q;
      ddt = scratch.slopes[j] == 0.0F ? 0.0F : ddt * scratch.slopes[j];
      narrow_row(ops(), &ddt, 1, spec_.gradients, task_->ddt.at(chunk.row + j, chunk.head));
      own.a += scratch.levels.dt[j] * q;
      if (spec().dt_bias) own.dt_bias += ddt;
      if (spec().skip) own.d += scratch.products[j * kChunkRows + j];
    }
    terms.a += own.a;
    terms.d += own.d;
    terms.dt_bias += own.dt_bias;
  }

  SsdBackwardSpec spec_;
  const States& states_;
  int state_width_;
  std::vector<HeadRange> sets_;
  std::int64_t partial_rows_ = 0;
  Buffer partial_db_;  // [sets, rows, state_dim]
  Buffer partial_dc_;
  const SsdBackwardTask* task_ = nullptr;  // of finish()
  const SsmTask* state_task_ = nullptr;
};

class CpuSsdBackward final : public SsdBackwardKernel {
 public:
  CpuSsdBackward(const SsdBackwardSpec& spec, const CpuBackend& backend)
      : spec_(spec), threads_(backend.threads()), states_(spec.forward, backend), gradients_(spec, backend, states_) {}

  int heads_together() const override { return kHeadsPerSet; }
  double cost_of_two_ranges(double) const override { return 0.0; }

  std::size_t scratch_bytes(const SsdBackwardLimits& limits) const override {
    return states_.scratch_bytes(limits.runs) + gradients_.scratch_bytes(limits.runs) +
           2 * gradients_.partial_bytes(limits.rows);
  }
  void reserve(const SsdBackwardLimits& limits) override {
    limits_ = limits;
    states_.reserve(limits.runs);
    gradients_.reserve(limits.runs);
    gradients_.reserve_partials(limits.rows);
  }

  void accumulate_states(const SsdBackwardTask& task, const HeadRange& heads, Stream stream,
                         const Progress& progress) override {
    check_ssd_backward_task(spec_, limits_, task);
    states_.accumulate_states(StateTask(task), heads, stream, progress);
  }
  void carry_states(const SsdBackwardTask& task, const HeadRange& heads, int step, Stream stream) override {
    states_.carry(StateTask(task), heads, step, stream);
  }
  void accumulate_gradients(const SsdBackwardTask& task, const HeadRange& heads, Stream stream,
                            const Progress& progress) override {
    gradients_.accumulate_states(GradientTask(task), heads, stream, progress);
  }
  void carry_gradients(const SsdBackwardTask& task, const HeadRange& heads, int step, Stream stream) override {
    gradients_.carry(GradientTask(task), heads, step, stream);
  }
  void finish(const SsdBackwardTask& task, const HeadRange& heads, Stream, const Progress& progress) override {
    gradients_.finish(task, StateTask(task), GradientTask(task), heads, progress);
  }

  void sum_sets(const SsdBackwardTask& task, Stream, const Progress& progress) override {
    if (progress) progress();
    for (const SsdBackwardRun& run : task.runs) {
#pragma omp parallel for num_threads(threads_) schedule(static)
      for (std::int64_t row = run.row; row < run.row + run.tokens; ++row) sum_row(task, row);
    }
  }

 private:
  void sum_row(const SsdBackwardTask& task, std::int64_t row) const {
    const int state_dim = spec_.forward.state_dim;
    const int group_heads = spec_.forward.heads / spec_.forward.groups;
    float db[kMaxSsdDim];
    float dc[kMaxSsdDim];
    const std::vector<HeadRange>& sets = gradients_.sets();
    for (std::size_t set = 0; set < sets.size(); ++set) {
      const float* const partial_db = gradients_.partial_db(set, row);
      const float* const partial_dc = gradients_.partial_dc(set, row);
      const bool first = sets[set].first % group_heads == 0;
      for (int n = 0; n < state_dim; ++n) {
        db[n] = first ? partial_db[n] : db[n] + partial_db[n];
        dc[n] = first ? partial_dc[n] : dc[n] + partial_dc[n];
      }
      if (sets[set].end() % group_heads != 0) continue;
      const int group = sets[set].first / group_heads;
      narrow_row(best_ssm_ops(), db, state_dim, spec_.gradients, task.db.at(row, group));
      narrow_row(best_ssm_ops(), dc, state_dim, spec_.gradients, task.dc.at(row, group));
    }
  }

  // A task of the levels. They write no rows: `y` only has a shape.
  struct LevelTask : SsmTask {
    LevelTask(const SsdBackwardTask& task, std::vector<SsmRun> the_runs) : level_runs(std::move(the_runs)) {
      dt = task.dt;
      z = task.z;
      a = task.a;
      d = task.d;
      dt_bias = task.dt_bias;
      runs = level_runs;
      y = {nullptr, task.x.dtype, task.x.tokens, task.x.heads, task.x.dim, 0, 0};
    }
    LevelTask(const LevelTask&) = delete;

    std::vector<SsmRun> level_runs;
  };
  struct StateTask : LevelTask {
    explicit StateTask(const SsdBackwardTask& task) : LevelTask(task, runs_of(task)) {
      x = task.x;
      b = task.b;
      c = task.c;
    }
    static std::vector<SsmRun> runs_of(const SsdBackwardTask& task) {
      std::vector<SsmRun> runs;
      for (const SsdBackwardRun& run : task.runs) {
        runs.push_back({run.begin, run.tokens, run.row, run.initial, run.final, run.step});
      }
      return runs;
    }
  };
  struct GradientTask : LevelTask {
    explicit GradientTask(const SsdBackwardTask& task) : LevelTask(task, runs_of(task)) {
      x = task.dy;
      b = task.c;
      c = task.b;
    }
    static std::vector<SsmRun> runs_of(const SsdBackwardTask& task) {
      std::vector<SsmRun> runs;
      for (const SsdBackwardRun& run : task.runs) {
        runs.push_back({run.begin, run.tokens, run.row, run.final_gradient, run.initial_gradient, run.gradient_step});
      }
      return runs;
    }
  };

  SsdBackwardSpec spec_;
  int threads_;
  SsdBackwardLimits limits_;
  States states_;
  Gradients gradients_;
};

}  // namespace

std::vector<std::string> cpu_ssd_backward_missing(const SsdBackwardSpec& spec) {
  std::vector<std::string> missing = missing_in_ssd_backward(spec);
  if (missing.empty()) missing = cpu_ssd_missing(spec.forward);
  return missing;
}

double cpu_ssd_backward_speed(const Backend& backend) {
  SsdBackwardSpec any;
  any.forward.heads = kHeadsPerSet;
  return host_speed(cpu_ssd_backward_work(any, backend, kManyTokens), nullptr);
}

HostWork cpu_ssd_backward_work(const SsdBackwardSpec& spec, const Backend& backend, std::int64_t tokens) {
  const SsmSpec& forward = spec.forward;
  const int threads = static_cast<const CpuBackend&>(backend).threads();
  const int heads_of_group = forward.heads / forward.groups;
  const int sets = (heads_of_group + kHeadsPerSet - 1) / kHeadsPerSet * forward.groups;
  const double rows = static_cast<double>(tokens);
  const double width = static_cast<double>(forward.heads) * forward.head_dim;
  const double flops = 10.0 * width * forward.state_dim * rows;
  const double core = flops / (2.4 * best_ssm_ops().flops_per_second);  // measured with 8 heads and one thread
  const double x_bytes = rows * width * static_cast<double>(size_of(forward.dtype));
  WorkPhase states{.tiles = std::ceil(rows / static_cast<double>(kSegmentTokens)) * sets};
  states.vector_seconds = core / 5.0;  // its part of the FLOPs
  states.bytes = x_bytes;
  WorkPhase finish = states;
  finish.vector_seconds = core * 3.0 / 5.0;
  finish.bytes = 6.0 * x_bytes;
  return {threads, flops, {states, states, finish}};
}

std::unique_ptr<SsdBackwardKernel> make_cpu_ssd_backward(const SsdBackwardSpec& spec, Backend& backend) {
  return std::make_unique<CpuSsdBackward>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
