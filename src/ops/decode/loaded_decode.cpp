// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/loaded_decode.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "ops/common/staging.hpp"
#include "ops/decode/decode_inputs.hpp"

namespace ringattn {

namespace {

constexpr double kLongDecode = 0.1;  // seconds that a device takes to read all of its memory

}  // namespace

LoadedDecode::LoadedDecode(const JobInput& input, Decode& decode, const Collective& collective,
                           const ProgressCallback& on_progress, int caches)
    : LoadedDecode(input, decode, nullptr, collective, on_progress, caches) {}

LoadedDecode::LoadedDecode(const JobInput& input, MlaDecode& decode, const Collective& collective,
                           const ProgressCallback& on_progress, int caches)
    : LoadedDecode(input, decode.in_latent(), &decode, collective, on_progress, caches) {}

LoadedDecode::LoadedDecode(const JobInput& input, Decode& decode, MlaDecode* latents, const Collective& collective,
                           const ProgressCallback& on_progress, int caches)
    : decode_(decode), latents_(latents), collective_(collective) {
  const AttentionSpec& spec = input.job().spec;  // for MLA, too: q and O have its dims
  const auto sequences = static_cast<std::int64_t>(input.job().batch.sequences.size());
  const std::int64_t rows = input.job().batch.q_tokens();
  const SequenceRange owned = decode.owned(sequences);
  inputs_.rows = static_cast<int>(rows / sequences);
  result_.rows = owned.count * inputs_.rows;
  if (owned.count > 0) result_.runs = {{owned.first * inputs_.rows, owned.end() * inputs_.rows}};
  collective.run_collectively([&] {
    Backend& backend = decode.backend();
    cache_.emplace(input, decode, collective, on_progress);
    for (int i = 1; i < caches; ++i) more_.push_back(cache_->copy());
    result_.non_finite = cache_->non_finite();

    const MutableTensorView q = make_rows(backend, spec.dtype, rows, spec.heads, spec.head_dim, q_);
    const PackedRun all[] = {{0, rows}};
    const auto fill = [&](std::span<const PackedRun> runs, const MutableTensorView& host) {
      input.read(SyntheticTensor::kQ, runs, host, decode.options().threads);
      // Every rank has all queries, but each value counts once.
      if (collective.rank() == 0) result_.non_finite.q += count_non_finite(host);
    };
    Staging(backend, collective.timeouts()).load(all, q, fill, {});
    if (latents_ != nullptr) {
      weights_ = load_mla_weights(input, backend, collective, decode.options().threads);
      result_.non_finite.v += weights_.non_finite;
    }
    if (spec.sinks) sinks_ = upload<float>(backend, input.sinks());
    outputs_.out = make_rows(backend, spec.dtype, result_.rows, spec.heads, spec.head_dim_v, result_.out);
    make_rows(backend, Dtype::kF32, result_.rows, spec.heads, 1, result_.lse);
    outputs_.lse = result_.lse_view(spec);
    mark_unwritten(backend, {&result_.out, &result_.lse});
    await(backend, collective.timeouts());
    marks_ = backend.make_events(2, true);
    inputs_.q = q;
    inputs_.sinks = spec.sinks ? reinterpret_cast<const float*>(sinks_.data()) : nullptr;
    cache_->bind_tables(inputs_);
    cache_->bind_host_tables(inputs_);
    if (input.job().block_mask != nullptr) {
      const DecodeBlockMaskArrays block_mask = block_mask_of_heads(
          decode_block_mask(*input.job().block_mask, spec.mask, inputs_.rows, 1), spec, decode.kv_heads());
      mask_indices_ = upload<std::int32_t>(backend, block_mask.blocks);
      mask_counts_ = upload<std::int32_t>(backend, block_mask.counts);
      await(backend, collective.timeouts());
      inputs_.block_mask = {reinterpret_cast<const std::int32_t*>(mask_indices_.data()),
                            reinterpret_cast<const std::int32_t*>(mask_counts_.data()), block_mask.stride};
    }
  });
}

const CachePools& LoadedDecode::pools_of(int step) const {
  const std::size_t cache = static_cast<std::size_t>(step) % (more_.size() + 1);
  return cache == 0 ? cache_->pools() : more_[cache - 1];
}

void LoadedDecode::enqueue(int step, bool captured) {
  const CachePools& pools = pools_of(step);
  const Stream stream = decode_.backend().stream();
  DecodeInputs inputs = inputs_;
  if (captured) {
    inputs.host_lengths = nullptr;
    inputs.host_table = {};
    inputs.host_prefixes = {};
  }
  cache_->bind_pools(pools, inputs);
  if (latents_ == nullptr) {
    decode_.enqueue(inputs, outputs_, stream);
    return;
  }
  latents_->enqueue(mla_decode_inputs(inputs, weights_), {outputs_.out, outputs_.lse}, stream);
}

void LoadedDecode::wait() {
  if (latents_ != nullptr) return latents_->wait();
  decode_.wait();
}

RunStats LoadedDecode::run() {
  Backend& backend = decode_.backend();
  collective_.barrier();
  marks_->record(0, backend.stream());
  enqueue(0, false);
  marks_->record(1, backend.stream());
  wait();
  marks_->synchronize(1, collective_.timeouts().for_peer(), {});
  RunStats stats;
  stats.seconds = marks_->elapsed(0, 1);
  collective_.barrier();
  return stats;
}

double LoadedDecode::run_many(int count) {
  Backend& backend = decode_.backend();
  const Stream stream = backend.stream();
  const bool graph = collective_.size() == 1 && backend.enqueues();
  if (graph && replayed_ != count) {
    replay_ = backend.replay(stream, [&] {
      for (int i = 0; i < count; ++i) enqueue(i, true);
    });
    replayed_ = count;
  }
  collective_.barrier();
  marks_->record(0, stream);
  if (graph) {
    replay_->launch();
  } else {
    for (int i = 0; i < count; ++i) enqueue(i, false);
  }
  marks_->record(1, stream);
  if (!graph) wait();
  marks_->synchronize(1, collective_.timeouts().for_work(count * kLongDecode), {});
  if (graph) wait();
  collective_.barrier();
  return marks_->elapsed(0, 1) / count;
}

RankResult LoadedDecode::fetch(const RunStats& stats) {
  result_.stats = stats;
  collective_.run_collectively([&] {
    bring_to_host(decode_.backend(), collective_.timeouts(), {&result_.out, &result_.lse});
  });
  return std::move(result_);
}

}  // namespace ringattn
