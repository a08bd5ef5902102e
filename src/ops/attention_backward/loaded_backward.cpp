// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/loaded_backward.hpp"

#include <cmath>
#include <cstring>
#include <span>
#include <utility>

#include "base/failpoint.hpp"
#include "ops/attention/attention.hpp"
#include "ops/common/staging.hpp"

namespace ringattn {

namespace {

// Counts non-finite values. −∞ doesn't count: it is the LSE of a row without keys.
std::int64_t count_unusual(std::span<const float> lse) {
  std::int64_t count = 0;
  for (const float value : lse) count += std::isnan(value) || (std::isinf(value) && value > 0.0F) ? 1 : 0;
  return count;
}

std::span<float> floats_of(const MutableTensorView& rows) {
  return {static_cast<float*>(rows.data), static_cast<std::size_t>(rows.tokens * rows.heads * rows.dim)};
}

}  // namespace

TensorView BackwardRankResult::dq_view(const BackwardJob& job) const {
  const AttentionSpec& spec = job.forward.spec;
  return dense_view(static_cast<const void*>(dq.data()), job.gradients, q_rows(), spec.heads, spec.head_dim);
}

TensorView BackwardRankResult::dk_view(const BackwardJob& job) const {
  const AttentionSpec& spec = job.forward.spec;
  return dense_view(static_cast<const void*>(dk.data()), job.gradients, k_rows(), spec.kv_heads, spec.head_dim);
}

TensorView BackwardRankResult::dv_view(const BackwardJob& job) const {
  const AttentionSpec& spec = job.forward.spec;
  return dense_view(static_cast<const void*>(dv.data()), job.gradients, k_rows(), spec.kv_heads, spec.head_dim_v);
}

TensorView BackwardRankResult::out_view(const AttentionSpec& spec) const {
  return dense_view(static_cast<const void*>(out.data()), spec.dtype, q_rows(), spec.heads, spec.head_dim_v);
}

RowView BackwardRankResult::lse_view(const AttentionSpec& spec) const {
  return {reinterpret_cast<float*>(lse.data()), spec.heads, 1};
}

LoadedBackward::LoadedBackward(const BackwardInput& input, AttentionBackward& backward, const Collective& collective,
                               Transport& transport, const ProgressCallback& on_progress)
    : backward_(backward), collective_(collective) {
  collective_.run_collectively([&] { load(input, on_progress); });
  if (input.is_synthetic()) {
    const std::string backend(backward_.kernel().row->backend);
    forward_.emplace(input.forward().job(), transport, options_over(backward_.options(), backward_.layout(), backend));
    collective_.run_collectively(
        [&] { forward_workspace_ = backward_.backend().allocate(forward_->workspace_bytes()); });
    run_forward(RunMode::kWhole, on_progress);
    if (!input.with_forward()) {
      forward_.reset();
      forward_workspace_ = {};
    }
  }
  collective_.run_collectively([&] {
    const BackwardJob& job = input.job();
    const AttentionSpec& spec = job.forward.spec;
    Backend& backend = backward_.backend();
    const std::int64_t q_rows = result_.q_rows();
    const std::int64_t k_rows = result_.k_rows();
    outputs_.dq = make_rows(backend, job.gradients, q_rows, spec.heads, spec.head_dim, result_.dq);
    outputs_.dk = make_rows(backend, job.gradients, k_rows, spec.kv_heads, spec.head_dim, result_.dk);
    outputs_.dv = make_rows(backend, job.gradients, k_rows, spec.kv_heads, spec.head_dim_v, result_.dv);
    if (spec.sinks) {
      outputs_.dsinks = static_cast<float*>(make_rows(backend, Dtype::kF32, 1, spec.heads, 1, dsinks_).data);
      mark_unwritten(backend, {&dsinks_});
    }
    workspace_ = backend.allocate(backward_.workspace_bytes());
    mark_unwritten(backend, {&result_.dq, &result_.dk, &result_.dv});
    await(backend, collective_.timeouts());
  });
}

void LoadedBackward::load(const BackwardInput& input, const ProgressCallback& on_progress) {
  const JobInput& forward = input.forward();
  const Job& job = forward.job();
  const AttentionSpec& spec = job.spec;
  Backend& backend = backward_.backend();
  const int threads = backward_.options().threads;
  result_.q_runs = packed_runs(backward_.layout().queries.runs(collective_.rank()), job.batch.cu_q());
  result_.k_runs = packed_runs(backward_.layout().keys.runs(collective_.rank()), job.batch.cu_k());
  const std::int64_t q_rows = result_.q_rows();
  const std::int64_t k_rows = result_.k_rows();
  const std::int64_t all = ((input.is_synthetic() ? 2 : 4) + (input.has_dlse() ? 1 : 0)) * q_rows + 2 * k_rows;
  std::int64_t before = 0;
  Staging staging(backend, collective_.timeouts());
  // Fills rows of the backend's memory: [total_tokens(runs), heads, dim].
  const auto fill = [&](std::span<const PackedRun> runs, const MutableTensorView& rows, const Staging::Fill& read) {
    failpoint("staging");
    staging.load(runs, rows, read, [&](std::int64_t done) {
      if (on_progress) on_progress("row of input", {before + done, all});
    });
    before += rows.tokens;
  };
  const auto read_forward = [&](SyntheticTensor tensor, std::int64_t& non_finite) {
    return [&, tensor](std::span<const PackedRun> piece, const MutableTensorView& host) {
      forward.read(tensor, piece, host, threads);
      non_finite += count_non_finite(host);
    };
  };
  NonFinite& non_finite = result_.non_finite;
  const MutableTensorView q = make_rows(backend, spec.dtype, q_rows, spec.heads, spec.head_dim, q_);
  const MutableTensorView k = make_rows(backend, spec.dtype, k_rows, spec.kv_heads, spec.head_dim, k_);
  const MutableTensorView v = make_rows(backend, spec.dtype, k_rows, spec.kv_heads, spec.head_dim_v, v_);
  const MutableTensorView dout = make_rows(backend, spec.dtype, q_rows, spec.heads, spec.head_dim_v, dout_);
  const MutableTensorView out = make_rows(backend, spec.dtype, q_rows, spec.heads, spec.head_dim_v, result_.out);
  const MutableTensorView lse = make_rows(backend, Dtype::kF32, q_rows, spec.heads, 1, result_.lse);
  fill(result_.q_runs, q, read_forward(SyntheticTensor::kQ, non_finite.q));
  fill(result_.k_runs, k, read_forward(SyntheticTensor::kK, non_finite.k));
  fill(result_.k_runs, v, read_forward(SyntheticTensor::kV, non_finite.v));
  fill(result_.q_runs, dout, [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
    input.read_dout(piece, host, threads);
    non_finite.dout += count_non_finite(host);
  });
  inputs_ = {q, k, v, out, {static_cast<float*>(lse.data), spec.heads, 1}, dout};
  if (spec.sinks) {
    sinks_ = upload<float>(backend, forward.sinks());
    inputs_.sinks = reinterpret_cast<const float*>(sinks_.data());
  }
  if (!input.is_synthetic()) {
    fill(result_.q_runs, out, [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
      input.read_out(piece, host);
      non_finite.out += count_non_finite(host);
    });
    fill(result_.q_runs, lse, [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
      input.read_lse(piece, floats_of(host));
      non_finite.lse += count_unusual(floats_of(host));
    });
  }
  if (input.has_dlse()) {
    const MutableTensorView dlse = make_rows(backend, Dtype::kF32, q_rows, spec.heads, 1, dlse_);
    fill(result_.q_runs, dlse, [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
      input.read_dlse(piece, floats_of(host), threads);
      non_finite.dout += count_non_finite(host);
    });
    inputs_.dlse = {static_cast<float*>(dlse.data), spec.heads, 1};
  }
  await(backend, collective_.timeouts());
}

RunStats LoadedBackward::run_forward(RunMode mode, const ProgressCallback& on_progress) {
  const AttentionSpec& spec = backward_.job().forward.spec;
  const MutableTensorView out =
      dense_view(static_cast<void*>(result_.out.data()), spec.dtype, result_.q_rows(), spec.heads, spec.head_dim_v);
  BlockDone block_done;
  if (on_progress) {
    block_done = [&on_progress](const StepCount& blocks) { on_progress("block of the forward", blocks); };
  }
  return forward_->run({inputs_.q, inputs_.k, inputs_.v, inputs_.sinks}, {out, inputs_.lse, std::nullopt},
                       std::span(forward_workspace_.data(), forward_workspace_.bytes()), forward_->backend().stream(),
                       block_done, mode);
}

RunStats LoadedBackward::run(RunMode mode, const ProgressCallback& on_progress) {
  BlockDone block_done;
  if (on_progress) {
    block_done = [&on_progress](const StepCount& blocks) { on_progress("block", blocks); };
  }
  collective_.barrier();
  const RunStats forward = forward_ ? run_forward(mode, on_progress) : RunStats{};
  RunStats stats = backward_.run(inputs_, outputs_, std::span(workspace_.data(), workspace_.bytes()),
                                 backward_.backend().stream(), block_done, mode);
  collective_.barrier(backward_.time_estimate().seconds);
  stats.seconds += forward.seconds;
  stats.exposed_comm_seconds += forward.exposed_comm_seconds;
  return stats;
}

BackwardRankResult LoadedBackward::fetch(const RunStats& stats) {
  result_.stats = stats;
  collective_.run_collectively([&] {
    bring_to_host(backward_.backend(), collective_.timeouts(),
                  {&result_.dq, &result_.dk, &result_.dv, &result_.out, &result_.lse, &dsinks_});
    const auto* const dsinks = reinterpret_cast<const float*>(dsinks_.data());
    result_.dsinks.assign(dsinks, dsinks + dsinks_.bytes() / sizeof(float));
  });
  return std::move(result_);
}

}  // namespace ringattn
