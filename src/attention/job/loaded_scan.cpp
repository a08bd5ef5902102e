// SPDX-License-Identifier: Apache-2.0
#include "attention/job/loaded_scan.hpp"

#include <cstring>
#include <span>

#include "attention/job/non_finite.hpp"
#include "attention/job/staging.hpp"
#include "attention/tokens/scan_deal.hpp"
#include "base/moment.hpp"

namespace ringattn {

namespace {

// [sequences, channels, width − 1] of [sequences, width − 1, channels].
Buffer channels_first(const Buffer& halos, const ConvolutionSpec& spec) {
  Buffer turned = allocate_host(halos.bytes());
  const std::size_t size = size_of(spec.dtype);
  const auto channels = static_cast<std::size_t>(spec.channels);
  const auto tokens = static_cast<std::size_t>(spec.halo_tokens());
  for (std::size_t i = 0; i < halos.bytes() / size; ++i) {
    const std::size_t sequence = i / (channels * tokens);
    const std::size_t token = i / channels % tokens;
    const std::size_t at = (sequence * channels + i % channels) * tokens + token;
    std::memcpy(turned.data() + at * size, halos.data() + i * size, size);
  }
  return turned;
}

}  // namespace

TensorView ScanRankResult::y_view(const ScanSpec& spec) const {
  return dense_view(static_cast<const void*>(y.data()), spec.dtype, rows, spec.heads, spec.head_dim);
}

TensorView ScanRankResult::carried_view(const ScanJob& job) const {
  return ringattn::carried_view(job, (job.alone ? halos : states).data(), total_tokens(sequences));
}

CheckedScan ScanRankResult::checked_view(const ScanJob& job) const {
  return {runs, y_view(job.spec), sequences, carried_view(job)};
}

LoadedScan::LoadedScan(const ScanInput& input, Scan& scan, const Meeting& meeting, const StepDone& step_done)
    : input_(input), scan_(scan), meeting_(meeting) {
  meeting.together([&] { load(step_done); });
}

TensorView LoadedScan::load_rows(ScanRows which, std::int64_t before, std::int64_t all, const StepDone& step_done) {
  moment("staging");
  const ScanSpec& spec = input_.job().spec;
  const ScanInput::RowShape shape = input_.row_shape(which);
  Backend& backend = scan_.backend();
  const MutableTensorView rows =
      make_rows(backend, spec.dtype, result_.rows, shape.heads, shape.dim, buffers_.emplace_back());
  if (input_.seed()) {
    backend.fill_synthetic(*input_.seed(), ScanInput::synthetic(which), result_.runs, rows, backend.stream());
    return rows;
  }
  const auto fill = [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
    input_.read(which, piece, host, scan_.options().threads);
    result_.non_finite += count_non_finite(host);
  };
  Staging(backend, meeting_.patience()).load(result_.runs, rows, fill, [&](std::int64_t done) {
    if (step_done) step_done("row of input", {before + done, all});
  });
  return rows;
}

// Rows of several tensors, each token's one behind the other.
TensorView LoadedScan::side_by_side(std::span<const ScanRows> all, const std::function<TensorView(ScanRows)>& load) {
  Backend& backend = scan_.backend();
  const Dtype dtype = input_.job().spec.dtype;
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t channels = input_.job().convolution->channels;
  const MutableTensorView both = make_rows(backend, dtype, result_.rows, 1, channels, buffers_.emplace_back());
  std::byte* to = both.at(0, 0);
  for (const ScanRows which : all) {
    const TensorView rows = load(which);
    const std::int64_t row_bytes = rows.heads * rows.dim * size;
    backend.copy_rows(to, channels * size, rows.data, row_bytes, row_bytes, result_.rows, backend.stream());
    await(backend, meeting_.patience());
    buffers_.pop_back();
    to += row_bytes;
  }
  return both;
}

const std::byte* LoadedScan::load_bytes(std::span<const std::byte> values) {
  if (values.empty()) return nullptr;
  buffers_.push_back(upload(scan_.backend(), values));
  await(scan_.backend(), meeting_.patience());
  return buffers_.back().data();
}

const float* LoadedScan::load_array(std::span<const float> values) {
  return reinterpret_cast<const float*>(load_bytes(std::as_bytes(values)));
}

void LoadedScan::load(const StepDone& step_done) {
  const ScanSpec& spec = input_.job().spec;
  const int rank = meeting_.rank();
  result_.runs = packed_runs(scan_.layout().runs(rank), input_.origins());
  result_.rows = scan_.layout().tokens(rank);
  const std::int64_t all = result_.rows * (input_.job().alone ? 1 : spec.gate ? 5 : 4);
  std::int64_t tensors = 0;
  const auto rows = [&](ScanRows which) { return load_rows(which, tensors++ * result_.rows, all, step_done); };
  const std::vector<ScanRows> convolved = input_.convolved();
  inputs_.x = convolved.empty() ? rows(ScanRows::kX) : side_by_side(convolved, rows);
  if (!input_.job().alone) inputs_.dt = rows(ScanRows::kDt);
  if (convolved.size() < 2 && !input_.job().alone) {
    inputs_.b = rows(ScanRows::kB);
    inputs_.c = rows(ScanRows::kC);
  }
  if (spec.gate) inputs_.z = rows(ScanRows::kZ);
  inputs_.a = load_array(input_.a());
  inputs_.d = load_array(input_.d());
  inputs_.dt_bias = load_array(input_.dt_bias());
  inputs_.conv_weight = load_array(input_.conv_weight());
  inputs_.conv_bias = load_array(input_.conv_bias());
  load_states();
  make_room();
}

void LoadedScan::load_states() {
  const ScanJob& job = input_.job();
  if (job.initial_states) {
    std::vector<float> states(scan_.beginning().size() * static_cast<std::size_t>(state_bytes(job.spec)) /
                              sizeof(float));
    input_.read_initial(scan_.beginning(), states);
    inputs_.initial_states = load_array(states);
  }
  if (job.initial_halos) {
    std::vector<std::byte> halos(scan_.beginning().size() * static_cast<std::size_t>(job.convolution->halo_bytes()));
    input_.read_halos(scan_.beginning(), halos);
    inputs_.initial_halos = load_bytes(halos);
  }
}

void LoadedScan::make_room() {
  const ScanJob& job = input_.job();
  const ScanSpec& spec = job.spec;
  Backend& backend = scan_.backend();
  const std::size_t ending = scan_.ending().size();
  outputs_.y = make_rows(backend, spec.dtype, result_.rows, spec.heads, spec.head_dim, result_.y);
  if (job.final_states || job.final_halos) {
    const std::vector<std::int64_t> numbers(input_.numbers().begin(), input_.numbers().end());
    for (const std::int32_t s : scan_.ending()) {
      const std::int64_t number = numbers[static_cast<std::size_t>(s)];
      result_.sequences.push_back({number, number + 1});
    }
  }
  if (job.final_states) result_.states = backend.allocate(ending * static_cast<std::size_t>(state_bytes(spec)));
  if (job.final_halos) {
    result_.halos = backend.allocate(ending * static_cast<std::size_t>(job.convolution->halo_bytes()));
  }
  mark_unwritten(backend, {&result_.y, &result_.states, &result_.halos});
  await(backend, meeting_.patience());
  if (ending == 0) return;
  if (job.final_states) outputs_.final_states = reinterpret_cast<float*>(result_.states.data());
  if (job.final_halos) outputs_.final_halos = result_.halos.data();
  if (!job.update) return;
  states_before_ = inputs_.initial_states;
  inputs_.initial_states = outputs_.final_states;
}

ScanStats LoadedScan::run() {
  Backend& backend = scan_.backend();
  if (states_before_ != nullptr) {
    const auto bytes = static_cast<std::int64_t>(result_.states.bytes());
    backend.copy_rows(outputs_.final_states, bytes, states_before_, bytes, bytes, 1, backend.stream());
  }
  meeting_.barrier();
  return scan_.run(inputs_, outputs_, backend.stream());
}

ScanRankResult LoadedScan::fetch(const ScanStats& stats) {
  result_.stats = stats;
  meeting_.together([&] {
    bring_to_host(scan_.backend(), meeting_.patience(), {&result_.y, &result_.states, &result_.halos});
    if (input_.job().final_halos) result_.halos = channels_first(result_.halos, *input_.job().convolution);
  });
  return std::move(result_);
}

}  // namespace ringattn
