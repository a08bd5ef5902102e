// SPDX-License-Identifier: Apache-2.0
#include "ops/conv1d_backward/loaded_conv1d_backward.hpp"

#include <functional>
#include <utility>

#include "attention/tokens/ssm_layout.hpp"
#include "base/failpoint.hpp"
#include "ops/common/non_finite.hpp"
#include "ops/common/staging.hpp"
#include "ops/ssm/loaded_ssm.hpp"

namespace ringattn {

namespace {

std::vector<float> floats_in(const Buffer& values) {
  const auto* const first = reinterpret_cast<const float*>(values.data());
  return {first, first + values.bytes() / sizeof(float)};
}

}  // namespace

TensorView Conv1dBackwardRankResult::dx_view(const CausalConv1dSpec& spec) const {
  return dense_view(static_cast<const void*>(dx.data()), spec.dtype, tokens(), spec.channels, 1);
}

TensorView Conv1dBackwardRankResult::dinitial_view(const CausalConv1dSpec& spec) const {
  return dense_view(static_cast<const void*>(dinitial.data()), spec.dtype, total_tokens(sequences), spec.channels,
                    spec.halo_tokens());
}

LoadedConv1dBackward::LoadedConv1dBackward(const Conv1dBackwardInput& input, CausalConv1dBackward& backward,
                                           const Collective& collective, const ProgressCallback& on_progress)
    : input_(input), backward_(backward), collective_(collective), marks_(backward.backend().make_events(2, true)) {
  collective_.run_collectively([&] { load(on_progress); });
}

const std::byte* LoadedConv1dBackward::load_bytes(std::span<const std::byte> bytes) {
  if (bytes.empty()) return nullptr;
  buffers_.push_back(upload(backward_.backend(), bytes));
  await(backward_.backend(), collective_.timeouts());
  return buffers_.back().data();
}

void LoadedConv1dBackward::load(const ProgressCallback& on_progress) {
  const int threads = backward_.options().threads;
  const CausalConv1dJob& job = input_.job();
  const CausalConv1dSpec& spec = job.spec;
  const SsmInput& forward = input_.forward();
  Backend& backend = backward_.backend();
  result_.runs = packed_runs(backward_.layout().runs(collective_.rank()), forward.origins());
  const std::int64_t rows = result_.tokens();
  std::int64_t before = 0;
  const auto load_rows = [&](const Staging::Fill& read) -> TensorView {
    failpoint("staging");
    const MutableTensorView view = make_rows(backend, spec.dtype, rows, spec.channels, 1, buffers_.emplace_back());
    const auto fill = [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
      read(piece, host);
      result_.non_finite += count_non_finite(host);
    };
    Staging(backend, collective_.timeouts()).load(result_.runs, view, fill, [&](std::int64_t done) {
      if (on_progress) on_progress("row of input", {before + done, 2 * rows});
    });
    before += rows;
    return dense_view(static_cast<const void*>(view.data), spec.dtype, rows, 1, spec.channels);
  };
  inputs_.x = load_rows([&](std::span<const PackedRun> piece, const MutableTensorView& host) {
    forward.read(SsmTensorKind::kX, piece, host, threads);
  });
  inputs_.dy = load_rows(
      [&](std::span<const PackedRun> piece, const MutableTensorView& host) { input_.read_dy(piece, host, threads); });
  const auto load_array = [&](const std::vector<float>& values) {
    return reinterpret_cast<const float*>(load_bytes(std::as_bytes(std::span(values))));
  };
  inputs_.weight = load_array(forward.conv_weight());
  inputs_.bias = load_array(forward.conv_bias());
  make_rows(backend, spec.dtype, rows, spec.channels, 1, result_.dx);
  outputs_.dx = dense_view(static_cast<void*>(result_.dx.data()), spec.dtype, rows, 1, spec.channels);
  const auto floats = [&](Buffer& memory, std::size_t count) {
    memory = backend.allocate(count * sizeof(float));
    return reinterpret_cast<float*>(memory.data());
  };
  outputs_.dweight = floats(dweight_, forward.conv_weight().size());
  if (spec.bias) outputs_.dbias = floats(dbias_, forward.conv_bias().size());
  if (job.initial_halos) {
    std::vector<std::byte> halos(backward_.beginning().size() * static_cast<std::size_t>(spec.halo_bytes()));
    forward.read_halos(backward_.beginning(), halos);
    inputs_.initial_halos = load_bytes(halos);
    for (const std::int32_t s : backward_.beginning()) result_.sequences.push_back({s, s + 1});
    result_.dinitial = backend.allocate(halos.size());
    if (!halos.empty()) outputs_.dinitial_halos = result_.dinitial.data();
  }
  mark_unwritten(backend, {&result_.dx, &dweight_, &dbias_, &result_.dinitial});
  await(backend, collective_.timeouts());
}

SsmStats LoadedConv1dBackward::run() {
  const Stream stream = backward_.backend().stream();
  collective_.barrier();
  marks_->record(0, stream);
  backward_.enqueue(inputs_, outputs_, stream);
  marks_->record(1, stream);
  backward_.wait();
  marks_->synchronize(1, collective_.timeouts().for_peer(), {});
  SsmStats stats;
  stats.seconds = marks_->elapsed(0, 1);
  collective_.barrier();
  return stats;
}

Conv1dBackwardRankResult LoadedConv1dBackward::fetch(const SsmStats& stats) {
  result_.stats = stats;
  collective_.run_collectively([&] {
    bring_to_host(backward_.backend(), collective_.timeouts(), {&result_.dx, &dweight_, &dbias_, &result_.dinitial});
    result_.dweight = floats_in(dweight_);
    result_.dbias = floats_in(dbias_);
    result_.dinitial = channels_first(result_.dinitial, input_.spec());
  });
  return std::move(result_);
}

}  // namespace ringattn
