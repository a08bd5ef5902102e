// SPDX-License-Identifier: Apache-2.0
#include "kernels/gated_delta/cpu/delta_segments.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/rank_liveness.hpp"
#include "kernels/common/cpu/thread_number.hpp"
#include "kernels/ssm/cpu/ssm_rows.hpp"

namespace ringattn::cpu {

namespace {

constexpr std::int64_t kItemsPerHeartbeat = 4;  // segments of heads per thread, between heartbeats

// Value heads of a work item. They are heads of one key head, and only one if there were too few items otherwise.
int heads_of_item(const GatedDeltaSpec& spec, std::int64_t segments, int heads, int max_heads, int threads) {
  constexpr std::int64_t kItemsPerThread = 4;
  const int most = std::min(spec.heads_per_key(), max_heads);
  return segments * heads / most < kItemsPerThread * threads ? 1 : most;
}

}  // namespace

HostWork delta_work(const GatedDeltaSpec& spec, const Backend& backend, std::int64_t tokens, int max_heads,
                    double flops_per_second, double transition) {
  const int threads = static_cast<const CpuBackend&>(backend).threads();
  const std::int64_t count = (tokens + kSegmentTokens - 1) / kSegmentTokens;
  const auto segments = static_cast<double>(count);
  const double flops = 6.0 * spec.value_heads * spec.key_dim * spec.value_dim * static_cast<double>(tokens);
  const int heads = heads_of_item(spec, count, spec.value_heads, max_heads, threads);
  const int items_of_key = (spec.heads_per_key() + heads - 1) / heads;
  WorkPhase finish{.tiles = segments * spec.key_heads * items_of_key, .vector_seconds = flops / flops_per_second};
  finish.regions = std::ceil(finish.tiles / static_cast<double>(kItemsPerHeartbeat * threads));
  WorkPhase accumulate = finish;
  accumulate.vector_seconds *= 1.0 + transition * (segments - 1.0) / segments;
  return {threads, flops, {accumulate, finish}};
}

float delta_log_decay(float log_decay) {
  const float log = log_decay * kLog2E;
  return log < kMinLogDecay ? kMinLogDecay : log;  // NaN stays NaN
}

int DeltaSegments::padded_dim(int dim) {
  const int lanes = best_ssm_ops().lanes;
  return (dim + lanes - 1) / lanes * lanes;
}

DeltaSegments::DeltaSegments(const GatedDeltaSpec& spec, const CpuBackend& backend, int max_heads,
                             std::size_t scratch_floats)
    : spec_(spec),
      scale_(scale_of(spec)),
      value_width_(padded_dim(spec.value_dim)),
      key_width_(padded_dim(spec.key_dim)),
      max_heads_(max_heads),
      rows_(backend.tile_ops()),
      ops_(best_ssm_ops()),
      threads_(backend.threads()) {
  const std::size_t floats = std::max(scratch_floats, 2 * state_floats_padded());  // carry() has two states
  thread_floats_ = (floats + kVectorAlignment - 1) / kVectorAlignment * kVectorAlignment;
}

// The first segment of a sequence has no state before it, so nothing is multiplied for it.
double DeltaSegments::carry_seconds(std::int64_t runs, std::int64_t segments) const {
  const std::int64_t products = runs * std::max<std::int64_t>(0, segments - 1);
  return 2.0 * spec_.key_dim * static_cast<double>(state_floats(spec_) * products) / (ops_.flops_per_second * threads_);
}

std::size_t DeltaSegments::scratch_bytes(const GatedDeltaLimits& limits) const {
  return segment_bytes(limits) + static_cast<std::size_t>(threads_) * thread_floats_ * sizeof(float);
}

void DeltaSegments::reserve(const GatedDeltaLimits& limits) {
  limits_ = limits;
  segments_ = allocate_host(segment_bytes(limits));
  scratch_ = allocate_host(static_cast<std::size_t>(threads_) * thread_floats_ * sizeof(float));
}

void DeltaSegments::accumulate_states(const GatedDeltaTask& task, const HeadRange& heads, Stream,
                                      const Progress& progress) {
  check_gated_delta_task(spec_, limits_, task);
  for_each_segment(task, heads, progress, [&](const DeltaSegment& segment, float* memory) {
    if (segment.needs_state) accumulate_segment(task, segment, memory);
  });
}

void DeltaSegments::finish(const GatedDeltaTask& task, const HeadRange& heads, Stream, const Progress& progress) {
  for_each_segment(task, heads, progress,
                   [&](const DeltaSegment& segment, float* memory) { finish_segment(task, segment, memory); });
}

// Leaves the state before each segment in place of U.
void DeltaSegments::carry(const GatedDeltaTask& task, const HeadRange& heads, int step, Stream) {
  heartbeat();
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
  for (int head = heads.first; head < heads.end(); ++head) {
    float* before = thread_memory();
    float* after = before + state_floats_padded();
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
          ops_.product_onto(transition_at(index, head), key_width_, spec_.key_dim, spec_.key_dim, before, value_width_,
                            after);
        }
        std::swap(before, after);
      }
      if (run.final != nullptr) store_state(before, head, run.final);
    }
  }
}

void DeltaSegments::update(const GatedDeltaUpdate& update, Stream) {
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

float* DeltaSegments::thread_memory() const {
  return reinterpret_cast<float*>(scratch_.data()) + static_cast<std::size_t>(thread_number()) * thread_floats_;
}

float* DeltaSegments::state_at(std::int64_t segment, int head) const {
  return reinterpret_cast<float*>(segments_.data()) +
         static_cast<std::size_t>(segment * spec_.value_heads + head) * head_floats();
}

void DeltaSegments::load_state(const float* states, int head, float* state) const {
  std::fill_n(state, state_floats_padded(), 0.0F);
  if (states == nullptr) return;
  const float* const source = states + std::int64_t{head} * spec_.key_dim * spec_.value_dim;
  for (int d = 0; d < spec_.key_dim; ++d) {
    std::copy_n(source + d * spec_.value_dim, spec_.value_dim, state + d * value_width_);
  }
}
void DeltaSegments::store_state(const float* state, int head, float* states) const {
  float* const target = states + std::int64_t{head} * spec_.key_dim * spec_.value_dim;
  for (int d = 0; d < spec_.key_dim; ++d) {
    std::copy_n(state + d * value_width_, spec_.value_dim, target + d * spec_.value_dim);
  }
}

// Calls `work` for each segment of the task's runs and its heads, in parallel. A work item has several value heads of a
// key head if that leaves enough items for the threads.
void DeltaSegments::for_each_segment(const GatedDeltaTask& task, const HeadRange& heads, const Progress& progress,
                                     const SegmentWork& work) const {
  std::vector<DeltaSegment> segments;
  for (const GatedDeltaRun& run : task.runs) {
    for (std::int64_t i = 0; i < run.segments(); ++i) {
      DeltaSegment segment;
      segment.index = std::ssize(segments);
      segment.row = run.row + i * kSegmentTokens;
      segment.tokens = static_cast<int>(std::min(kSegmentTokens, run.tokens - i * kSegmentTokens));
      segment.needs_state = run.needs_state(i);
      segment.needs_transition = run.needs_transition(i);
      segments.push_back(segment);
    }
  }
  const int of_key = spec_.heads_per_key();
  const int most = heads_of_item(spec_, std::ssize(segments), heads.count, max_heads_, threads_);
  std::vector<HeadRange> items;
  for (int head = heads.first; head < heads.end();) {
    const int next_key = (head / of_key + 1) * of_key;
    const int count = std::min({most, next_key - head, heads.end() - head});
    items.push_back({head, count});
    head += count;
  }
  const std::int64_t all = std::ssize(segments) * std::ssize(items);
  const std::int64_t at_once = kItemsPerHeartbeat * threads_;
  for (std::int64_t begin = 0; begin < all; begin += at_once) {
    heartbeat();
    if (progress) progress();
    const std::int64_t end = std::min(all, begin + at_once);
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1)
    for (std::int64_t item = begin; item < end; ++item) {
      DeltaSegment segment = segments[static_cast<std::size_t>(item / std::ssize(items))];
      const HeadRange& of_item = items[static_cast<std::size_t>(item % std::ssize(items))];
      segment.first_head = of_item.first;
      segment.heads = of_item.count;
      work(segment, thread_memory());
    }
  }
}

// Multiplies a row by 1 / sqrt(Σ x² + eps). The sum is made in kChannelBlock columns.
void DeltaSegments::normalize(float* row) const {
  float columns[kChannelBlock] = {};
  for (int d = 0; d < spec_.key_dim; ++d) columns[d % kChannelBlock] += row[d] * row[d];
  float sum = 0.0F;
  for (const float column : columns) sum += column;
  const float factor = 1.0F / std::sqrt(sum + kQkL2NormEps);
  for (int d = 0; d < spec_.key_dim; ++d) row[d] *= factor;
}

void DeltaSegments::load_key_row(const TensorView& view, std::int64_t row, int head, float* target) const {
  widen_row(rows_, view, row, head / spec_.heads_per_key(), spec_.key_dim, target);
  if (spec_.qk_l2norm) normalize(target);
}

// One token by the recurrence.
void DeltaSegments::update_head(const GatedDeltaUpdate& update, std::int64_t sequence, int head, float* state) const {
  const int width = spec_.value_dim;
  float q[kMaxDeltaDim], k[kMaxDeltaDim], decays[kMaxDeltaDim] = {};
  float v[kMaxDeltaDim], sums[kMaxDeltaDim] = {}, o[kMaxDeltaDim] = {};
  constexpr float kZeros[kMaxDeltaDim] = {};
  load_key_row(update.q, sequence, head, q);
  load_key_row(update.k, sequence, head, k);
  widen_row(rows_, update.v, sequence, head, width, v);
  const auto* const log_decay = reinterpret_cast<const float*>(update.log_decay.at(sequence, head));
  for (int d = 0; d < spec_.decay_dim(); ++d) decays[d] = delta_log_decay(log_decay[d]);
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
  narrow_row(ops_, o, width, spec_.dtype, update.o.at(sequence, head));
}

}  // namespace ringattn::cpu
