// SPDX-License-Identifier: Apache-2.0
#include "ops/ssd_backward/loaded_ssd_backward.hpp"

#include <utility>

#include "attention/tokens/ssm_layout.hpp"
#include "base/failpoint.hpp"
#include "ops/common/non_finite.hpp"
#include "ops/common/staging.hpp"

namespace ringattn {

std::vector<SsdGradientRows> gradient_rows(const SsmSpec& spec) {
  std::vector<SsdGradientRows> rows{{"dx", spec.heads, spec.head_dim, &SsdBackwardOutputs::dx},
                                    {"ddt", spec.heads, 1, &SsdBackwardOutputs::ddt},
                                    {"dB", spec.groups, spec.state_dim, &SsdBackwardOutputs::db},
                                    {"dC", spec.groups, spec.state_dim, &SsdBackwardOutputs::dc}};
  if (spec.gate) rows.push_back({"dz", spec.heads, spec.head_dim, &SsdBackwardOutputs::dz});
  return rows;
}

std::vector<SsdGradientParameter> gradient_parameters(const SsmSpec& spec) {
  std::vector<SsdGradientParameter> parameters{{"dA", &SsdParameterGradients::da}};
  if (spec.skip) parameters.push_back({"dD", &SsdParameterGradients::dd});
  if (spec.dt_bias) parameters.push_back({"ddt_bias", &SsdParameterGradients::ddt_bias});
  return parameters;
}

TensorView SsdBackwardRankResult::rows_view(const SsdBackwardJob& job, std::size_t tensor) const {
  const SsdGradientRows of = gradient_rows(job.forward.spec)[tensor];
  return dense_view(static_cast<const void*>(rows[tensor].data()), job.gradients, tokens(), of.heads, of.dim);
}

TensorView SsdBackwardRankResult::initial_view(const SsdBackwardJob& job) const {
  return carried_view(job.forward, initial_gradients.data(), total_tokens(sequences));
}

LoadedSsdBackward::LoadedSsdBackward(const SsdBackwardInput& input, SsdBackward& backward, const Collective& collective,
                                     const ProgressCallback& on_progress)
    : input_(input), backward_(backward), collective_(collective) {
  collective_.run_collectively([&] { load(on_progress); });
}

const float* LoadedSsdBackward::load_array(std::span<const float> values) {
  if (values.empty()) return nullptr;
  buffers_.push_back(upload(backward_.backend(), values));
  await(backward_.backend(), collective_.timeouts());
  return reinterpret_cast<const float*>(buffers_.back().data());
}

void LoadedSsdBackward::load(const ProgressCallback& on_progress) {
  const SsdBackwardJob& job = input_.job();
  const SsmSpec& spec = job.forward.spec;
  const SsmInput& forward = input_.forward();
  Backend& backend = backward_.backend();
  const int threads = backward_.options().threads;
  result_.runs = packed_runs(backward_.layout().runs(collective_.rank()), forward.origins());
  const std::int64_t rows = result_.tokens();
  const std::int64_t all = rows * (spec.gate ? 6 : 5);
  std::int64_t before = 0;
  const auto load = [&](std::int64_t heads, std::int64_t dim, const Staging::Fill& read) {
    failpoint("staging");
    const MutableTensorView view = make_rows(backend, spec.dtype, rows, heads, dim, buffers_.emplace_back());
    const auto fill = [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
      read(piece, host);
      result_.non_finite += count_non_finite(host);
    };
    Staging(backend, collective_.timeouts()).load(result_.runs, view, fill, [&](std::int64_t done) {
      if (on_progress) on_progress("row of input", {before + done, all});
    });
    before += rows;
    return view;
  };
  const auto load_forward = [&](SsmTensorKind which) {
    const SsmInput::RowShape shape = forward.row_shape(which);
    return load(shape.heads, shape.dim, [&, which](std::span<const PackedRun> piece, const MutableTensorView& host) {
      forward.read(which, piece, host, threads);
    });
  };
  inputs_.x = load_forward(SsmTensorKind::kX);
  inputs_.dt = load_forward(SsmTensorKind::kDt);
  inputs_.b = load_forward(SsmTensorKind::kB);
  inputs_.c = load_forward(SsmTensorKind::kC);
  if (spec.gate) inputs_.z = load_forward(SsmTensorKind::kZ);
  inputs_.dy = load(spec.heads, spec.head_dim, [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
    input_.read_dy(piece, host, threads);
  });
  inputs_.a = load_array(forward.a());
  inputs_.d = load_array(forward.d());
  inputs_.dt_bias = load_array(forward.dt_bias());
  const auto state = static_cast<std::size_t>(state_bytes(spec));
  const auto states_of = [&](const std::vector<std::int32_t>& sequences, const auto& read) {
    std::vector<float> states(sequences.size() * state / sizeof(float));
    read(sequences, std::span<float>(states));
    return load_array(states);
  };
  if (job.forward.initial_states) {
    inputs_.initial_states =
        states_of(backward_.beginning(), [&](const auto& of, std::span<float> to) { forward.read_initial(of, to); });
  }
  if (job.final_gradients) {
    inputs_.final_gradients = states_of(
        backward_.ending(), [&](const auto& of, std::span<float> to) { input_.read_final_gradients(of, to); });
  }
  for (const SsdGradientRows& tensor : gradient_rows(spec)) {
    outputs_.*tensor.view =
        make_rows(backend, job.gradients, rows, tensor.heads, tensor.dim, result_.rows.emplace_back());
    mark_unwritten(backend, {&result_.rows.back()});
  }
  if (job.forward.initial_states) {
    for (const std::int32_t s : backward_.beginning()) result_.sequences.push_back({s, s + 1});
    result_.initial_gradients = backend.allocate(backward_.beginning().size() * state);
    mark_unwritten(backend, {&result_.initial_gradients});
    if (!backward_.beginning().empty()) {
      outputs_.initial_gradients = reinterpret_cast<float*>(result_.initial_gradients.data());
    }
  }
  await(backend, collective_.timeouts());
}

SsmStats LoadedSsdBackward::run() {
  collective_.barrier();
  SsmStats stats;
  result_.parameters = backward_.run(inputs_, outputs_, backward_.backend().stream(), &stats);
  return stats;
}

SsdBackwardRankResult LoadedSsdBackward::fetch(const SsmStats& stats) {
  result_.stats = stats;
  collective_.run_collectively([&] {
    for (Buffer& rows : result_.rows) bring_to_host(backward_.backend(), collective_.timeouts(), {&rows});
    bring_to_host(backward_.backend(), collective_.timeouts(), {&result_.initial_gradients});
  });
  return std::move(result_);
}

}  // namespace ringattn
