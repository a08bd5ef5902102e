// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/loaded_ssm.hpp"

#include <cstring>
#include <span>
#include <utility>

#include "attention/tokens/ssm_layout.hpp"
#include "base/failpoint.hpp"
#include "ops/common/digest.hpp"
#include "ops/common/non_finite.hpp"
#include "ops/common/staging.hpp"

namespace ringattn {

Buffer channels_first(const Buffer& halos, const CausalConv1dSpec& spec) {
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

TensorView SsmRankResult::y_view(const SsmSpec& spec) const {
  return dense_view(static_cast<const void*>(y.data()), spec.dtype, rows, spec.heads, spec.head_dim);
}

TensorView SsmRankResult::carried_view(const SsmJob& job) const {
  return ringattn::carried_view(job, (job.conv1d_only ? halos : states).data(), total_tokens(sequences));
}

SsmResultView SsmRankResult::result_view(const SsmJob& job) const {
  return {runs, y_view(job.spec), sequences, carried_view(job)};
}

LoadedSsm::LoadedSsm(const SsmInput& input, Ssm& scan, const Collective& collective,
                     const ProgressCallback& on_progress)
    : input_(input), ssm_(scan), collective_(collective) {
  collective.run_collectively([&] { load(on_progress); });
}

TensorView LoadedSsm::load_rows(SsmTensorKind which, std::int64_t before, std::int64_t all,
                                const ProgressCallback& on_progress) {
  failpoint("staging");
  const SsmInput::RowShape shape = input_.row_shape(which);
  Backend& backend = ssm_.backend();
  const MutableTensorView rows =
      make_rows(backend, input_.row_dtype(which), result_.rows, shape.heads, shape.dim, buffers_.emplace_back());
  if (input_.made_by_backend(which)) {
    backend.fill_synthetic(*input_.seed(), SsmInput::synthetic(which), result_.runs, rows, backend.stream());
    return rows;
  }
  const auto fill = [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
    input_.read(which, piece, host, ssm_.options().threads);
    result_.non_finite += count_non_finite(host);
  };
  Staging(backend, collective_.timeouts()).load(result_.runs, rows, fill, [&](std::int64_t done) {
    if (on_progress) on_progress("row of input", {before + done, all});
  });
  return rows;
}

// Concatenates rows of several tensors token by token.
TensorView LoadedSsm::side_by_side(std::span<const SsmTensorKind> all,
                                   const std::function<TensorView(SsmTensorKind)>& load) {
  Backend& backend = ssm_.backend();
  const Dtype dtype = input_.job().spec.dtype;
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t channels = input_.job().convolution->channels;
  const MutableTensorView both = make_rows(backend, dtype, result_.rows, 1, channels, buffers_.emplace_back());
  std::byte* to = both.at(0, 0);
  for (const SsmTensorKind which : all) {
    const TensorView rows = load(which);
    const std::int64_t row_bytes = rows.heads * rows.dim * size;
    backend.copy_rows(to, channels * size, rows.data, row_bytes, row_bytes, result_.rows, backend.stream());
    await(backend, collective_.timeouts());
    buffers_.pop_back();
    to += row_bytes;
  }
  return both;
}

const std::byte* LoadedSsm::load_bytes(std::span<const std::byte> values) {
  if (values.empty()) return nullptr;
  buffers_.push_back(upload(ssm_.backend(), values));
  await(ssm_.backend(), collective_.timeouts());
  return buffers_.back().data();
}

const float* LoadedSsm::load_array(std::span<const float> values) {
  return reinterpret_cast<const float*>(load_bytes(std::as_bytes(values)));
}

void LoadedSsm::load(const ProgressCallback& on_progress) {
  const SsmSpec& spec = input_.job().spec;
  const int rank = collective_.rank();
  result_.runs = packed_runs(ssm_.layout().runs(rank), input_.origins());
  result_.rows = ssm_.layout().tokens(rank);
  const std::int64_t all =
      result_.rows * (input_.job().conv1d_only ? 1 : 3 + (spec.gate ? 1 : 0) + (dt_rows(spec).dim > 0 ? 1 : 0));
  std::int64_t tensors = 0;
  const auto rows = [&](SsmTensorKind which) { return load_rows(which, tensors++ * result_.rows, all, on_progress); };
  const std::vector<SsmTensorKind> convolved = input_.convolved();
  inputs_.x = convolved.empty() ? rows(SsmTensorKind::kX) : side_by_side(convolved, rows);
  if (!input_.job().conv1d_only && dt_rows(spec).dim > 0) inputs_.dt = rows(SsmTensorKind::kDt);
  if (convolved.size() < 2 && !input_.job().conv1d_only) {
    inputs_.b = rows(SsmTensorKind::kB);
    inputs_.c = rows(SsmTensorKind::kC);
  }
  if (spec.gate) inputs_.z = rows(SsmTensorKind::kZ);
  inputs_.a = load_array(input_.a());
  inputs_.d = load_array(input_.d());
  inputs_.dt_bias = load_array(input_.dt_bias());
  inputs_.conv_weight = load_array(input_.conv_weight());
  inputs_.conv_bias = load_array(input_.conv_bias());
  if (input_.job().rope) load_positions();
  load_states();
  allocate_outputs();
}

void LoadedSsm::load_positions() {
  std::vector<std::int64_t> positions;
  for (const TokenRun& run : ssm_.layout().runs(collective_.rank())) {
    const std::int64_t first = input_.position_of(static_cast<std::size_t>(run.sequence));
    for (std::int64_t token = run.begin; token < run.end; ++token) positions.push_back(first + token);
  }
  inputs_.positions = {load_bytes(std::as_bytes(std::span(positions))), true};
}

void LoadedSsm::load_states() {
  const SsmJob& job = input_.job();
  if (job.initial_states) {
    std::vector<float> states(ssm_.beginning().size() * static_cast<std::size_t>(state_bytes(job.spec)) /
                              sizeof(float));
    input_.read_initial(ssm_.beginning(), states);
    inputs_.initial_states = load_array(states);
  }
  if (job.initial_halos) {
    std::vector<std::byte> halos(ssm_.beginning().size() * static_cast<std::size_t>(job.convolution->halo_bytes()));
    input_.read_halos(ssm_.beginning(), halos);
    inputs_.initial_halos = load_bytes(halos);
  }
}

void LoadedSsm::allocate_outputs() {
  const SsmJob& job = input_.job();
  const SsmSpec& spec = job.spec;
  Backend& backend = ssm_.backend();
  const std::size_t ending = ssm_.ending().size();
  outputs_.y = make_rows(backend, spec.dtype, result_.rows, spec.heads, spec.head_dim, result_.y);
  if (job.final_states || job.final_halos) {
    const std::vector<std::int64_t> numbers(input_.numbers().begin(), input_.numbers().end());
    for (const std::int32_t s : ssm_.ending()) {
      const std::int64_t number = numbers[static_cast<std::size_t>(s)];
      result_.sequences.push_back({number, number + 1});
    }
  }
  if (job.final_states) result_.states = backend.allocate(ending * static_cast<std::size_t>(state_bytes(spec)));
  if (job.final_halos) {
    result_.halos = backend.allocate(ending * static_cast<std::size_t>(job.convolution->halo_bytes()));
  }
  mark_unwritten(backend, {&result_.y, &result_.states, &result_.halos});
  await(backend, collective_.timeouts());
  if (ending == 0) return;
  if (job.final_states) outputs_.final_states = reinterpret_cast<float*>(result_.states.data());
  if (job.final_halos) outputs_.final_halos = result_.halos.data();
  if (!job.update) return;
  states_before_ = inputs_.initial_states;
  inputs_.initial_states = outputs_.final_states;
}

SsmStats LoadedSsm::run() {
  Backend& backend = ssm_.backend();
  if (states_before_ != nullptr) {
    const auto bytes = static_cast<std::int64_t>(result_.states.bytes());
    backend.copy_rows(outputs_.final_states, bytes, states_before_, bytes, bytes, 1, backend.stream());
  }
  collective_.barrier();
  return ssm_.run(inputs_, outputs_, backend.stream());
}

SsmRankResult LoadedSsm::fetch(const SsmStats& stats) {
  result_.stats = stats;
  collective_.run_collectively([&] {
    bring_to_host(ssm_.backend(), collective_.timeouts(), {&result_.y, &result_.states, &result_.halos});
    if (input_.job().final_halos) result_.halos = channels_first(result_.halos, *input_.job().convolution);
  });
  return std::move(result_);
}

PreparedSsm::PreparedSsm(SsmInput input, Transport& transport, SsmOptions options)
    : collective_(transport, Timeouts(options.timeout_seconds)),
      input_(std::move(input)),
      ssm_(input_.job(), transport, std::move(options)) {}

SsmRankResult PreparedSsm::compute(const ProgressCallback& on_progress) {
  LoadedSsm loaded(input_, ssm_, collective_, on_progress);
  return loaded.fetch(loaded.run());
}

SsmDigests digest_ssm(const SsmInput& input, const SsmRankResult& result, const Collective& collective) {
  const SsmJob& job = input.job();
  SsmDigests digests;
  digests.y = digest(collective, result.y_view(job.spec), result.runs, job.tokens());
  if (job.final_states || (job.conv1d_only && job.final_halos)) {
    digests.final_states =
        digest(collective, result.carried_view(job), result.sequences, static_cast<std::int64_t>(job.lengths.size()));
  }
  return digests;
}

}  // namespace ringattn
