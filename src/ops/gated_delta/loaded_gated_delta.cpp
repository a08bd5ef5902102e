// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_delta/loaded_gated_delta.hpp"

#include <span>

#include "base/failpoint.hpp"
#include "ops/common/non_finite.hpp"
#include "ops/common/staging.hpp"

namespace ringattn {

TensorView GatedDeltaResult::o_view(const GatedDeltaSpec& spec) const {
  return dense_view(static_cast<const void*>(o.data()), spec.dtype, rows, spec.value_heads, spec.value_dim);
}

TensorView GatedDeltaResult::states_view(const GatedDeltaSpec& spec) const {
  return dense_view(static_cast<const void*>(states.data()), Dtype::kF32, total_tokens(sequences), spec.value_heads,
                    std::int64_t{spec.key_dim} * spec.value_dim);
}

LoadedGatedDelta::LoadedGatedDelta(const GatedDeltaInput& input, GatedDelta& rule, const Collective& collective,
                                   const ProgressCallback& on_progress)
    : input_(input), rule_(rule), collective_(collective) {
  collective.run_collectively([&] { load(on_progress); });
}

TensorView LoadedGatedDelta::load_rows(DeltaTensor tensor, const ProgressCallback& on_progress) {
  failpoint("staging");
  const GatedDeltaInput::RowShape shape = input_.row_shape(tensor);
  Backend& backend = rule_.backend();
  const MutableTensorView rows =
      make_rows(backend, shape.dtype, result_.rows, shape.heads, shape.dim, buffers_.emplace_back());
  if (input_.made_by_backend(tensor)) {
    backend.fill_synthetic(*input_.seed(), GatedDeltaInput::synthetic(tensor), result_.runs, rows, backend.stream());
    return rows;
  }
  const auto fill = [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
    input_.read(tensor, piece, host, rule_.options().threads);
    result_.non_finite += count_non_finite(host);
  };
  const std::int64_t before = static_cast<std::int64_t>(tensor) * result_.rows;
  const std::int64_t all = std::ssize(kDeltaTensors) * result_.rows;
  Staging(backend, collective_.timeouts()).load(result_.runs, rows, fill, [&](std::int64_t done) {
    if (on_progress) on_progress("row of input", {before + done, all});
  });
  return rows;
}

void LoadedGatedDelta::load(const ProgressCallback& on_progress) {
  const GatedDeltaJob& job = input_.job();
  const GatedDeltaSpec& spec = job.spec;
  Backend& backend = rule_.backend();
  result_.runs = packed_runs(rule_.layout().runs(collective_.rank()), input_.origins());
  result_.rows = rule_.layout().tokens(collective_.rank());
  inputs_.q = load_rows(DeltaTensor::kQ, on_progress);
  inputs_.k = load_rows(DeltaTensor::kK, on_progress);
  inputs_.v = load_rows(DeltaTensor::kV, on_progress);
  inputs_.log_decay = load_rows(DeltaTensor::kLogDecay, on_progress);
  inputs_.beta = load_rows(DeltaTensor::kBeta, on_progress);
  if (job.initial_states && !rule_.beginning().empty()) {
    std::vector<float> states(rule_.beginning().size() * static_cast<std::size_t>(state_floats(spec)));
    input_.read_initial(rule_.beginning(), states);
    buffers_.push_back(upload(backend, std::span<const float>(states)));
    await(backend, collective_.timeouts());
    inputs_.initial_states = reinterpret_cast<const float*>(buffers_.back().data());
  }
  outputs_.out = make_rows(backend, spec.dtype, result_.rows, spec.value_heads, spec.value_dim, result_.o);
  if (job.final_states) {
    for (const std::int32_t s : rule_.ending()) result_.sequences.push_back({s, std::int64_t{s} + 1});
    result_.states = backend.allocate(rule_.ending().size() * static_cast<std::size_t>(state_bytes(spec)));
  }
  mark_unwritten(backend, {&result_.o, &result_.states});
  await(backend, collective_.timeouts());
  if (!job.final_states || rule_.ending().empty()) return;
  outputs_.final_states = reinterpret_cast<float*>(result_.states.data());
  if (!job.update) return;
  states_before_ = inputs_.initial_states;
  inputs_.initial_states = outputs_.final_states;
}

SsmStats LoadedGatedDelta::run() {
  Backend& backend = rule_.backend();
  if (states_before_ != nullptr) {
    const auto bytes = static_cast<std::int64_t>(result_.states.bytes());
    backend.copy_rows(outputs_.final_states, bytes, states_before_, bytes, bytes, 1, backend.stream());
  }
  collective_.barrier();
  return rule_.run(inputs_, outputs_, backend.stream());
}

GatedDeltaResult LoadedGatedDelta::fetch(const SsmStats& stats) {
  result_.stats = stats;
  collective_.run_collectively([&] {
    bring_to_host(rule_.backend(), collective_.timeouts(), {&result_.o, &result_.states});
  });
  return std::move(result_);
}

}  // namespace ringattn
