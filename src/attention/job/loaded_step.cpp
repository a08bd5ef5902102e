// SPDX-License-Identifier: Apache-2.0
#include "attention/job/loaded_step.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "attention/decode_inputs.hpp"
#include "attention/job/staging.hpp"

namespace ringattn {

namespace {

constexpr double kLongStep = 0.1;  // seconds in which a device reads all of its memory

}  // namespace

LoadedStep::LoadedStep(const JobInput& input, Decode& decode, const Meeting& meeting, const StepDone& step_done,
                       int caches)
    : LoadedStep(input, decode, nullptr, meeting, step_done, caches) {}

LoadedStep::LoadedStep(const JobInput& input, LatentDecode& decode, const Meeting& meeting, const StepDone& step_done,
                       int caches)
    : LoadedStep(input, decode.in_latent(), &decode, meeting, step_done, caches) {}

LoadedStep::LoadedStep(const JobInput& input, Decode& decode, LatentDecode* latents, const Meeting& meeting,
                       const StepDone& step_done, int caches)
    : decode_(decode), latents_(latents), meeting_(meeting) {
  const FoldSpec& spec = input.job().spec;  // of latents, too, q and O have its dims
  const auto sequences = static_cast<std::int64_t>(input.job().batch.sequences.size());
  const std::int64_t rows = input.job().batch.q_tokens();
  const SequenceRange owned = decode.owned(sequences);
  inputs_.rows = static_cast<int>(rows / sequences);
  result_.rows = owned.count * inputs_.rows;
  if (owned.count > 0) result_.runs = {{owned.first * inputs_.rows, owned.end() * inputs_.rows}};
  meeting.together([&] {
    Backend& backend = decode.backend();
    cache_.emplace(input, decode, meeting, step_done);
    for (int i = 1; i < caches; ++i) more_.push_back(cache_->copy());
    result_.non_finite = cache_->non_finite();

    const MutableTensorView q = make_rows(backend, spec.dtype, rows, spec.heads, spec.head_dim, q_);
    const PackedRun all[] = {{0, rows}};
    const auto fill = [&](std::span<const PackedRun> runs, const MutableTensorView& host) {
      input.read(SyntheticTensor::kQ, runs, host, decode.options().threads);
      // Every rank has all queries; each value is to be counted once.
      if (meeting.rank() == 0) result_.non_finite.q += count_non_finite(host);
    };
    Staging(backend, meeting.patience()).load(all, q, fill, {});
    if (latents_ != nullptr) {
      weights_ = load_latent_weights(input, backend, meeting, decode.options().threads);
      result_.non_finite.v += weights_.non_finite;
    }
    if (spec.sinks) sinks_ = upload<float>(backend, input.sinks());
    outputs_.out = make_rows(backend, spec.dtype, result_.rows, spec.heads, spec.head_dim_v, result_.out);
    make_rows(backend, Dtype::kF32, result_.rows, spec.heads, 1, result_.lse);
    outputs_.lse = result_.lse_view(spec);
    mark_unwritten(backend, {&result_.out, &result_.lse});
    await(backend, meeting.patience());
    marks_ = backend.make_marks(2, true);
    inputs_.q = q;
    inputs_.sinks = spec.sinks ? reinterpret_cast<const float*>(sinks_.data()) : nullptr;
    cache_->place(inputs_);
    cache_->place_host_copies(inputs_);
    if (input.job().lists != nullptr) {
      const DecodeListArrays lists =
          lists_of_heads(decode_lists(*input.job().lists, spec.mask, inputs_.rows, 1), spec, decode.kv_heads());
      list_blocks_ = upload<std::int32_t>(backend, lists.blocks);
      list_counts_ = upload<std::int32_t>(backend, lists.counts);
      await(backend, meeting.patience());
      inputs_.lists = {reinterpret_cast<const std::int32_t*>(list_blocks_.data()),
                       reinterpret_cast<const std::int32_t*>(list_counts_.data()), lists.stride};
    }
  });
}

const CachePools& LoadedStep::pools_of(int step) const {
  const std::size_t cache = static_cast<std::size_t>(step) % (more_.size() + 1);
  return cache == 0 ? cache_->pools() : more_[cache - 1];
}

void LoadedStep::enqueue(int step, bool captured) {
  const CachePools& pools = pools_of(step);
  const Stream stream = decode_.backend().stream();
  DecodeInputs inputs = inputs_;
  if (captured) {
    inputs.host_lengths = nullptr;
    inputs.host_table = {};
    inputs.host_prefixes = {};
  }
  cache_->give(pools, inputs);
  if (latents_ == nullptr) {
    decode_.enqueue(inputs, outputs_, stream);
    return;
  }
  latents_->enqueue(latent_step(inputs, weights_), {outputs_.out, outputs_.lse}, stream);
}

void LoadedStep::wait() {
  if (latents_ != nullptr) return latents_->wait();
  decode_.wait();
}

RunStats LoadedStep::run() {
  Backend& backend = decode_.backend();
  meeting_.barrier();
  marks_->record(0, backend.stream());
  enqueue(0, false);
  marks_->record(1, backend.stream());
  wait();
  marks_->synchronize(1, meeting_.patience().for_peer(), {});
  RunStats stats;
  stats.seconds = marks_->elapsed(0, 1);
  meeting_.barrier();
  return stats;
}

double LoadedStep::run_many(int count) {
  Backend& backend = decode_.backend();
  const Stream stream = backend.stream();
  const bool graph = meeting_.size() == 1 && backend.enqueues();
  if (graph && replayed_ != count) {
    replay_ = backend.replay(stream, [&] {
      for (int i = 0; i < count; ++i) enqueue(i, true);
    });
    replayed_ = count;
  }
  meeting_.barrier();
  marks_->record(0, stream);
  if (graph) {
    replay_->launch();
  } else {
    for (int i = 0; i < count; ++i) enqueue(i, false);
  }
  marks_->record(1, stream);
  if (!graph) wait();
  marks_->synchronize(1, meeting_.patience().for_work(count * kLongStep), {});
  if (graph) wait();
  meeting_.barrier();
  return marks_->elapsed(0, 1) / count;
}

RankResult LoadedStep::fetch(const RunStats& stats) {
  result_.stats = stats;
  meeting_.together([&] { bring_to_host(decode_.backend(), meeting_.patience(), {&result_.out, &result_.lse}); });
  return std::move(result_);
}

}  // namespace ringattn
