// SPDX-License-Identifier: Apache-2.0
#include "kernels/gated_delta/cpu/cpu_gated_delta.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/rank_liveness.hpp"
#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/ssm/cpu/ssd_levels.hpp"
#include "kernels/ssm/cpu/ssm_ops.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr int kMaxDeltaDim = 256;
constexpr std::int64_t kHeadsPerHeartbeat = 4;  // segments of a head per thread, between heartbeats
constexpr int kSubChunk = static_cast<int>(kSubChunkTokens);

int delta_thread() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

int padded_dim(int dim) {
  const int lanes = best_ssm_ops().lanes;
  return (dim + lanes - 1) / lanes * lanes;
}

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

  void lay_out(const GatedDeltaSpec& spec, ScratchArrays& arrays) {
    const int dim = spec.key_dim;
    const int width = padded_dim(spec.value_dim) + padded_dim(dim);
    for (float** array : {&q, &k, &decays, &decayed_q, &decayed_k, &transposed}) arrays.take(*array, kChunkRows, dim);
    arrays.take(sums, kChunkRows, spec.key_decays ? dim : 1);
    for (float** array : {&kk, &qk, &products}) arrays.take(*array, kChunkRows, kChunkRows);
    for (float** array : {&beta, &ones}) arrays.take(*array, 1, kChunkRows);
    for (float** array : {&x, &u}) arrays.take(*array, kChunkRows, width);
    arrays.take(o, kChunkRows, padded_dim(spec.value_dim));
    for (float** array : {&added, &state}) arrays.take(*array, dim, width);
  }
};

// A segment of a run.
struct DeltaSegment {
  std::int64_t row = 0;
  int tokens = 0;
  bool needs_state = false;
  bool needs_transition = false;
};

class CpuGatedDelta final : public GatedDeltaKernel {
 public:
  CpuGatedDelta(const GatedDeltaSpec& spec, const CpuBackend& backend)
      : spec_(spec),
        scale_(scale_of(spec)),
        value_width_(padded_dim(spec.value_dim)),
        key_width_(padded_dim(spec.key_dim)),
        rows_(backend.tile_ops()),
        ops_(best_ssm_ops()),
        threads_(backend.threads()) {}

  int heads_together() const override { return 1; }
  double cost_of_two_ranges(double) const override { return 0.0; }
  double carry_seconds(std::int64_t runs, std::int64_t segments) const override {
    return 2.0 * spec_.key_dim * static_cast<double>(state_floats(spec_) * runs * segments) /
           (ops_.flops_per_second * threads_);
  }

  std::size_t scratch_bytes(const GatedDeltaLimits& limits) const override {
    return segment_bytes(limits) + static_cast<std::size_t>(threads_) * thread_floats() * sizeof(float);
  }

  void reserve(const GatedDeltaLimits& limits) override {
    limits_ = limits;
    segments_ = allocate_host(segment_bytes(limits));
    scratch_ = allocate_host(static_cast<std::size_t>(threads_) * thread_floats() * sizeof(float));
  }

  void accumulate_states(const GatedDeltaTask& task, const HeadRange& heads, Stream,
                         const Progress& progress) override {
    check_gated_delta_task(spec_, limits_, task);
    for_each_head(task, heads, progress, [&](const DeltaSegment& segment, std::int64_t index, int head, float* memory) {
      if (!segment.needs_state) return;
      DeltaScratch scratch = scratch_in(memory);
      const int width = value_width_ + (segment.needs_transition ? key_width_ : 0);
      std::fill_n(scratch.state, spec_.key_dim * width, 0.0F);
      std::fill_n(scratch.x, kChunkRows * width, 0.0F);
      for (int d = 0; segment.needs_transition && d < spec_.key_dim; ++d) {
        scratch.state[d * width + value_width_ + d] = 1.0F;
      }
      for_each_chunk(segment, [&](std::int64_t row, int tokens, bool) {
        load_chunk(task, row, tokens, head, width, scratch);
        solve_chunk(tokens, width, scratch);
        advance_state(tokens, width, scratch);
      });
      float* const u = state_at(index, head);
      float* const m = transition_at(index, head);
      for (int d = 0; d < spec_.key_dim; ++d) {
        std::copy_n(scratch.state + d * width, value_width_, u + d * value_width_);
        if (segment.needs_transition)
          std::copy_n(scratch.state + d * width + value_width_, key_width_, m + d * key_width_);
      }
    });
  }

  // Leaves the state before each segment in place of U.
  void carry(const GatedDeltaTask& task, const HeadRange& heads, int step, Stream) override {
    heartbeat();
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
    for (int head = heads.first; head < heads.end(); ++head) {
      DeltaScratch scratch = scratch_in(thread_memory());
      float* before = scratch.state;
      float* after = scratch.added;
      std::int64_t index = 0;
      for (const GatedDeltaRun& run : task.runs) {
        if (run.step != step) {
          index += run.segments();
          continue;
        }
        load_state(run.initial, head, before);
        for (std::int64_t i = 0; i < run.segments(); ++i, ++index) {
          float* const stored = state_at(index, head);
          std::copy_n(stored, state_floats_padded(), after);
          std::copy_n(before, state_floats_padded(), stored);
          if (!run.needs_state(i)) continue;
          if (run.needs_transition(i)) {
            ops_.product_onto(transition_at(index, head), key_width_, spec_.key_dim, spec_.key_dim, before,
                              value_width_, after);
          }
          std::swap(before, after);
        }
        if (run.final != nullptr) store_state(before, head, run.final);
      }
    }
  }

  void finish(const GatedDeltaTask& task, const HeadRange& heads, Stream, const Progress& progress) override {
    for_each_head(task, heads, progress, [&](const DeltaSegment& segment, std::int64_t index, int head, float* memory) {
      DeltaScratch scratch = scratch_in(memory);
      std::copy_n(state_at(index, head), state_floats_padded(), scratch.state);
      std::fill_n(scratch.x, kChunkRows * value_width_, 0.0F);
      for_each_chunk(segment, [&](std::int64_t row, int tokens, bool last) {
        load_chunk(task, row, tokens, head, value_width_, scratch);
        solve_chunk(tokens, value_width_, scratch);
        write_rows(task, row, tokens, head, scratch);
        if (!last) advance_state(tokens, value_width_, scratch);
      });
    });
  }

  void update(const GatedDeltaUpdate& update, Stream) override {
    check_gated_delta_update(spec_, update);
    const std::int64_t items = update.q.tokens * spec_.value_heads;
#pragma omp parallel for num_threads(threads_) schedule(static)
    for (std::int64_t item = 0; item < items; ++item) {
      const std::int64_t sequence = item / spec_.value_heads;
      const int head = static_cast<int>(item % spec_.value_heads);
      const std::int64_t slot = update.slots == nullptr ? sequence : update.slots[sequence];
      if (slot >= 0) {
        float* const states = update.states + slot * state_floats(spec_);
        update_head(update, sequence, head, states + std::int64_t{head} * spec_.key_dim * spec_.value_dim);
      } else {
        std::memset(update.o.at(sequence, head), 0, static_cast<std::size_t>(spec_.value_dim) * size_of(spec_.dtype));
      }
    }
  }

 private:
  using HeadWork = std::function<void(const DeltaSegment&, std::int64_t index, int head, float* memory)>;

  std::size_t thread_floats() const {
    ScratchArrays arrays(nullptr);
    DeltaScratch().lay_out(spec_, arrays);
    return (arrays.floats() + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment;
  }
  float* thread_memory() const {
    return reinterpret_cast<float*>(scratch_.data()) + static_cast<std::size_t>(delta_thread()) * thread_floats();
  }
  DeltaScratch scratch_in(float* memory) const {
    ScratchArrays arrays(memory);
    DeltaScratch scratch;
    scratch.lay_out(spec_, arrays);
    std::fill_n(scratch.ones, kChunkRows, 1.0F);
    return scratch;
  }

  std::size_t state_floats_padded() const { return static_cast<std::size_t>(spec_.key_dim * value_width_); }
  std::size_t head_floats() const {
    return state_floats_padded() + static_cast<std::size_t>(spec_.key_dim * key_width_);
  }
  std::size_t segment_bytes(const GatedDeltaLimits& limits) const {
    return static_cast<std::size_t>(limits.segments * spec_.value_heads) * head_floats() * sizeof(float);
  }
  // U of a segment, then the state before it: [key_dim, value_width_].
  float* state_at(std::int64_t segment, int head) const {
    return reinterpret_cast<float*>(segments_.data()) +
           static_cast<std::size_t>(segment * spec_.value_heads + head) * head_floats();
  }
  // M of a segment: [key_dim, key_width_].
  float* transition_at(std::int64_t segment, int head) const { return state_at(segment, head) + state_floats_padded(); }

  void load_state(const float* states, int head, float* state) const {
    std::fill_n(state, state_floats_padded(), 0.0F);
    if (states == nullptr) return;
    const float* const source = states + std::int64_t{head} * spec_.key_dim * spec_.value_dim;
    for (int d = 0; d < spec_.key_dim; ++d) {
      std::copy_n(source + d * spec_.value_dim, spec_.value_dim, state + d * value_width_);
    }
  }
  void store_state(const float* state, int head, float* states) const {
    float* const target = states + std::int64_t{head} * spec_.key_dim * spec_.value_dim;
    for (int d = 0; d < spec_.key_dim; ++d) {
      std::copy_n(state + d * value_width_, spec_.value_dim, target + d * spec_.value_dim);
    }
  }

  // Calls `work` for each segment of the task's runs and each head, in parallel.
  void for_each_head(const GatedDeltaTask& task, const HeadRange& heads, const Progress& progress,
                     const HeadWork& work) const {
    std::vector<DeltaSegment> segments;
    for (const GatedDeltaRun& run : task.runs) {
      for (std::int64_t i = 0; i < run.segments(); ++i) {
        const std::int64_t token = i * kSegmentTokens;
        segments.push_back({run.row + token, static_cast<int>(std::min(kSegmentTokens, run.tokens - token)),
                            run.needs_state(i), run.needs_transition(i)});
      }
    }
    const std::int64_t items = std::ssize(segments) * heads.count;
    const std::int64_t at_once = kHeadsPerHeartbeat * threads_;
    for (std::int64_t begin = 0; begin < items; begin += at_once) {
      heartbeat();
      if (progress) progress();
      const std::int64_t end = std::min(items, begin + at_once);
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t index = item / heads.count;
        work(segments[static_cast<std::size_t>(index)], index, heads.first + static_cast<int>(item % heads.count),
             thread_memory());
      }
    }
  }

  template <typename Work>
  static void for_each_chunk(const DeltaSegment& segment, const Work& work) {
    for (int begin = 0; begin < segment.tokens; begin += kChunkRows) {
      const int tokens = std::min(kChunkRows, segment.tokens - begin);
      work(segment.row + begin, tokens, begin + tokens == segment.tokens);
    }
  }

  // Multiplies a row by 1 / sqrt(Σ x² + eps). The sum is made in kChannelBlock columns.
  void normalize(float* row) const {
    float columns[kChannelBlock] = {};
    for (int d = 0; d < spec_.key_dim; ++d) columns[d % kChannelBlock] += row[d] * row[d];
    float sum = 0.0F;
    for (const float column : columns) sum += column;
    const float factor = 1.0F / std::sqrt(sum + kQkL2NormEps);
    for (int d = 0; d < spec_.key_dim; ++d) row[d] *= factor;
  }

  void load_key_row(const TensorView& view, std::int64_t row, int head, float* target) const {
    widen_row(rows_, view, row, head / spec_.heads_per_key(), spec_.key_dim, target);
    if (spec_.qk_l2norm) normalize(target);
  }

  static float clamped(float log_decay) {
    const float log = log_decay * kLog2E;
    return log < kMinLogDecay ? kMinLogDecay : log;  // NaN stays NaN
  }

  // Loads rows [row, row + tokens) of a head, with zeros after them, and computes what does not depend on the state: G,
  // the decayed rows and the products of keys.
  void load_chunk(const GatedDeltaTask& task, std::int64_t row, int tokens, int head, int width,
                  DeltaScratch& scratch) const {
    const int dim = spec_.key_dim;
    for (int i = 0; i < kChunkRows; ++i) {
      if (i < tokens) {
        load_key_row(task.q, row + i, head, scratch.q + i * dim);
        load_key_row(task.k, row + i, head, scratch.k + i * dim);
        widen_row(rows_, task.v, row + i, head, spec_.value_dim, scratch.x + i * width);
        scratch.beta[i] = element_at(task.beta, row + i, head);
      } else {
        std::fill_n(scratch.q + i * dim, dim, 0.0F);
        std::fill_n(scratch.k + i * dim, dim, 0.0F);
      }
    }
    const int decay_dim = spec_.decay_dim();
    for (int i = 0; i < kChunkRows; ++i) {
      const float* const log_decay =
          i < tokens ? reinterpret_cast<const float*>(task.log_decay.at(row + i, head)) : nullptr;
      float* const sums = scratch.sums + i * decay_dim;
      for (int d = 0; d < decay_dim; ++d) {
        const float log = log_decay == nullptr ? 0.0F : clamped(log_decay[d]);
        sums[d] = (i == 0 ? 0.0F : sums[d - decay_dim]) + log;
      }
    }
    spec_.key_decays ? multiply_decayed_keys(tokens, scratch) : multiply_keys(tokens, scratch);
  }

  // scratch.decays ← exp2(G_i − G_s) for rows i, where G_s is 0 if `s` is negative. With `after`, exp2(G_s − G_i).
  void make_decays(int first, int end, int s, bool after, DeltaScratch& scratch) const {
    const int dim = spec_.decay_dim();
    for (int i = first; i < end; ++i) {
      for (int d = 0; d < dim; ++d) {
        const float base = s < 0 ? 0.0F : scratch.sums[s * dim + d];
        const float sum = scratch.sums[i * dim + d];
        scratch.decays[i * dim + d] = after ? base - sum : sum - base;
      }
    }
    const int count = (end - first) * dim;
    ops_.exp2(scratch.decays + first * dim, (count + kChannelBlock - 1) / kChannelBlock * kChannelBlock);
  }
  // target[i, d] = source[i, d] · scratch.decays
  void decay_rows(int first, int end, const float* source, float* target, const DeltaScratch& scratch) const {
    const int dim = spec_.key_dim;
    for (int i = first; i < end; ++i) {
      for (int d = 0; d < dim; ++d) {
        const float decay = spec_.key_decays ? scratch.decays[i * dim + d] : scratch.decays[i];
        target[i * dim + d] = source[i * dim + d] * decay;
      }
    }
  }
  // transposed[d, i] = source[i, d], and zeros for rows from `end` on.
  void transpose(int end, const float* source, DeltaScratch& scratch) const {
    for (int d = 0; d < spec_.key_dim; ++d) {
      float* const row = scratch.transposed + d * kChunkRows;
      for (int i = 0; i < end; ++i) row[i] = source[i * spec_.key_dim + d];
      std::fill(row + end, row + kChunkRows, 0.0F);
    }
  }

  void multiply_keys(int tokens, DeltaScratch& scratch) const {
    const int dim = spec_.key_dim;
    transpose(tokens, scratch.k, scratch);
    ops_.product(scratch.k, dim, tokens, dim, scratch.transposed, kChunkRows, scratch.products);
    ops_.intra_chunk_scores(tokens, scratch.products, scratch.sums, scratch.ones, scratch.kk);
    ops_.product(scratch.q, dim, tokens, dim, scratch.transposed, kChunkRows, scratch.products);
    ops_.intra_chunk_scores(tokens, scratch.products, scratch.sums, scratch.ones, scratch.qk);
    make_decays(0, kChunkRows, -1, false, scratch);
    decay_rows(0, tokens, scratch.q, scratch.decayed_q, scratch);
    decay_rows(0, tokens, scratch.k, scratch.decayed_k, scratch);
  }

  // By sub-chunks: 4 of gated_delta.hpp.
  void multiply_decayed_keys(int tokens, DeltaScratch& scratch) const {
    const int dim = spec_.key_dim;
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
          ops_.product(rows + first * dim, dim, end - first, dim, scratch.transposed, kChunkRows,
                       scores + first * kChunkRows);
        };
        product(scratch.decayed_k, scratch.kk);
        product(scratch.decayed_q, scratch.qk);
      }
      const int at = first * kChunkRows + first;
      ops_.decayed_scores(end - first, dim, scratch.q + first * dim, scratch.k + first * dim,
                          scratch.sums + first * dim, scratch.kk + at, scratch.qk + at);
    }
    make_decays(0, tokens, -1, false, scratch);
    decay_rows(0, tokens, scratch.q, scratch.decayed_q, scratch);
    decay_rows(0, tokens, scratch.k, scratch.decayed_k, scratch);
  }

  // u, by substitution.
  void solve_chunk(int tokens, int width, DeltaScratch& scratch) const {
    ops_.product(scratch.decayed_k, spec_.key_dim, tokens, spec_.key_dim, scratch.state, width, scratch.u);
    ops_.solve_lower(tokens, scratch.kk, scratch.beta, scratch.x, width, scratch.u);
  }

  // The state after the chunk.
  void advance_state(int tokens, int width, DeltaScratch& scratch) const {
    const int dim = spec_.key_dim;
    const int last = tokens - 1;
    make_decays(0, spec_.key_decays ? tokens : kChunkRows, last, true, scratch);
    decay_rows(0, tokens, scratch.k, scratch.decayed_k, scratch);
    transpose(tokens, scratch.decayed_k, scratch);
    ops_.product(scratch.transposed, kChunkRows, dim, tokens, scratch.u, width, scratch.added);
    float decays[kMaxDeltaDim] = {};
    std::copy_n(scratch.sums + last * spec_.decay_dim(), spec_.decay_dim(), decays);
    ops_.exp2(decays, (spec_.decay_dim() + kChannelBlock - 1) / kChannelBlock * kChannelBlock);
    for (int d = 0; d < dim; ++d) {
      const float decay = decays[spec_.key_decays ? d : 0];
      float* const state = scratch.state + d * width;
      ops_.join(decay, state, scratch.added + d * width, width, state);
    }
  }

  void write_rows(const GatedDeltaTask& task, std::int64_t row, int tokens, int head, DeltaScratch& scratch) const {
    const int dim = spec_.key_dim;
    ops_.product(scratch.decayed_q, dim, tokens, dim, scratch.state, value_width_, scratch.o);
    ops_.add_lower(scratch.qk, kChunkRows, tokens, scratch.ones, scratch.u, value_width_, scratch.o);
    for (int i = 0; i < tokens; ++i) {
      float* const o = scratch.o + i * value_width_;
      for (int c = 0; c < spec_.value_dim; ++c) o[c] *= scale_;
      narrow_row(o, spec_.value_dim, spec_.dtype, task.o.at(row + i, head));
    }
  }

  // One token by the recurrence.
  void update_head(const GatedDeltaUpdate& update, std::int64_t sequence, int head, float* state) const {
    const int width = spec_.value_dim;
    float q[kMaxDeltaDim], k[kMaxDeltaDim], decays[kMaxDeltaDim] = {};
    float v[kMaxDeltaDim], sums[kMaxDeltaDim] = {}, o[kMaxDeltaDim] = {};
    constexpr float kZeros[kMaxDeltaDim] = {};
    load_key_row(update.q, sequence, head, q);
    load_key_row(update.k, sequence, head, k);
    widen_row(rows_, update.v, sequence, head, width, v);
    const auto* const log_decay = reinterpret_cast<const float*>(update.log_decay.at(sequence, head));
    for (int d = 0; d < spec_.decay_dim(); ++d) decays[d] = clamped(log_decay[d]);
    ops_.exp2(decays, (spec_.decay_dim() + kChannelBlock - 1) / kChannelBlock * kChannelBlock);
    for (int d = 0; d < spec_.key_dim; ++d) {
      float* const row = state + d * width;
      ops_.join(decays[spec_.key_decays ? d : 0], row, kZeros, width, row);
      ops_.join(k[d], row, sums, width, sums);
    }
    const float beta = element_at(update.beta, sequence, head);
    for (int c = 0; c < width; ++c) sums[c] = beta * (v[c] - sums[c]);
    for (int d = 0; d < spec_.key_dim; ++d) {
      float* const row = state + d * width;
      ops_.join(k[d], sums, row, width, row);
      ops_.join(q[d], row, o, width, o);
    }
    for (int c = 0; c < width; ++c) o[c] *= scale_;
    narrow_row(o, width, spec_.dtype, update.o.at(sequence, head));
  }

  GatedDeltaSpec spec_;
  float scale_;
  int value_width_;
  int key_width_;
  const TileOps& rows_;
  const SsmOps& ops_;
  int threads_;
  GatedDeltaLimits limits_;
  Buffer segments_;  // [segments, value_heads, head_floats()]
  Buffer scratch_;   // [threads, thread_floats()]
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

HostWork cpu_gated_delta_work(const GatedDeltaSpec& spec, const Backend& backend, std::int64_t tokens) {
  const int threads = static_cast<const CpuBackend&>(backend).threads();
  const double rows = static_cast<double>(tokens);
  const double segments = std::ceil(rows / static_cast<double>(kSegmentTokens));
  const double flops = 6.0 * spec.value_heads * spec.key_dim * spec.value_dim * rows;
  // Measured with four heads of 128, 2k to 16k tokens and one thread: the rate of one pass over the rows, and how much
  // longer a segment takes whose transition is computed as well, which is that of any but the first.
  constexpr double kPassRate = 12.5;  // of SsmOps::flops_per_second
  constexpr double kTransition = 2.9;
  const double pass = flops / (kPassRate * best_ssm_ops().flops_per_second);
  WorkPhase finish{.tiles = segments * spec.value_heads, .vector_seconds = pass};
  finish.regions = std::ceil(finish.tiles / static_cast<double>(kHeadsPerHeartbeat * threads));
  WorkPhase accumulate = finish;
  accumulate.vector_seconds *= 1.0 + kTransition * (segments - 1.0) / segments;
  return {threads, flops, {accumulate, finish}};
}

std::unique_ptr<GatedDeltaKernel> make_cpu_gated_delta(const GatedDeltaSpec& spec, Backend& backend) {
  return std::make_unique<CpuGatedDelta>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
