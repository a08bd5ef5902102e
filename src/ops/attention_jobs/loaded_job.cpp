// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/loaded_job.hpp"

#include <algorithm>
#include <span>

#include "base/failpoint.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "ops/common/staging.hpp"
#include "ops/mla/fp8_latents.hpp"

namespace ringattn {

TensorView RankResult::out_view(const AttentionSpec& spec) const {
  return dense_view(static_cast<const void*>(out.data()), spec.dtype, rows, spec.heads, spec.head_dim_v);
}

RowView RankResult::lse_view(const AttentionSpec& spec) const {
  return {reinterpret_cast<float*>(lse.data()), spec.heads, 1};
}

std::vector<PackedRun> LoadedJob::query_runs(const JobInput& input) const {
  return packed_runs(ring_.layout.queries.runs(collective_.rank()), input.job().batch.cu_q());
}

std::vector<PackedRun> LoadedJob::key_runs(const JobInput& input) const {
  return packed_runs(ring_.layout.keys.runs(collective_.rank()), input.job().batch.cu_k());
}

void LoadedJob::load(const JobInput& input, const std::vector<Tensor>& tensors, const ProgressCallback& on_progress) {
  const AttentionSpec& spec = input.job().spec;
  result_.runs = query_runs(input);
  result_.rows = total_tokens(result_.runs);
  std::int64_t all = 0;  // rows of all tensors
  for (const Tensor& tensor : tensors) all += total_tokens(tensor.runs);
  Backend& backend = ring_.backend;
  for (const Tensor& tensor : tensors) {
    inputs_.push_back(
        make_rows(backend, spec.dtype, total_tokens(tensor.runs), tensor.heads, tensor.dim, buffers_.emplace_back()));
  }
  out_ = make_rows(backend, spec.dtype, result_.rows, spec.heads, spec.head_dim_v, result_.out);
  make_rows(backend, Dtype::kF32, result_.rows, spec.heads, 1, result_.lse);
  lse_ = result_.lse_view(spec);
  workspace_ = backend.allocate(ring_.workspace_bytes);
  mark_unwritten(backend, {&result_.out, &result_.lse});

  Staging staging(backend, collective_.timeouts());
  std::int64_t before = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    failpoint("staging");
    if (input.is_made(tensor.tensor)) {
      backend.fill_synthetic(*input.seed(), tensor.tensor, input.made_tokens(tensor.tensor, tensor.runs), inputs_[i],
                             backend.stream());
    } else {
      const auto fill = [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
        if (tensor.packed) {
          result_.non_finite.*tensor.non_finite += load_fp8_latents(input, piece, host, ring_.options.threads);
          return;
        }
        input.read(tensor.tensor, piece, host, ring_.options.threads);
        result_.non_finite.*tensor.non_finite += count_non_finite(host);
      };
      staging.load(tensor.runs, inputs_[i], fill, [&](std::int64_t done) {
        if (on_progress) on_progress("row of input", {before + done, all});
      });
    }
    before += inputs_[i].tokens;
  }
  await(backend, collective_.timeouts());
}

const float* LoadedJob::load_sinks(const JobInput& input) {
  if (!input.job().spec.sinks) return nullptr;
  sinks_ = upload<float>(ring_.backend, input.sinks());
  await(ring_.backend, collective_.timeouts());
  return reinterpret_cast<const float*>(sinks_.data());
}

CompressedRows LoadedJob::load_compressed(const JobInput& input, const CompressedSource& source) {
  Backend& backend = ring_.backend;
  const std::vector<PackedRun> runs = key_runs(input);
  const std::int64_t rows = total_tokens(runs);
  const auto keep = [&](const std::vector<std::byte>& host) {
    buffers_.push_back(upload<std::byte>(backend, host));
    await(backend, collective_.timeouts());
    return buffers_.back().data();
  };
  failpoint("staging");
  CompressedRows there, here;
  here.tables = source.table_pointers();
  std::vector<std::vector<std::byte>> host;
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(source.format, source.shape)) {
    const std::int64_t bytes = stream.token_bytes(source.shape.dtype);
    host.emplace_back(static_cast<std::size_t>(rows * bytes));
    source.read_stream(at, runs, host.back());
    here.streams[at] = {host.back().data(), bytes, bytes / stream.heads};
    there.streams[at] = {keep(host.back()), bytes, bytes / stream.heads};
    ++at;
  }
  source.check(here, runs);
  at = 0;
  for (const std::vector<std::byte>& table : source.tables()) there.tables[at++] = keep(table);
  return there;
}

LoadedJob::LoadedJob(const JobInput& input, Attention& attention, const Collective& collective,
                     const ProgressCallback& on_progress)
    : LoadedJob(ring_op(attention), collective) {
  collective.run_collectively([&] {
    const AttentionSpec& spec = input.job().spec;
    const CompressedSource* const quantized_k = input.compressed(SyntheticTensor::kK);
    const CompressedSource* const quantized_v = input.compressed(SyntheticTensor::kV);
    std::vector<Tensor> tensors{{SyntheticTensor::kQ, query_runs(input), spec.heads, spec.head_dim, &NonFinite::q}};
    if (quantized_k == nullptr) {
      tensors.push_back({SyntheticTensor::kK, key_runs(input), spec.kv_heads, spec.head_dim, &NonFinite::k});
    }
    if (quantized_v == nullptr) {
      tensors.push_back({SyntheticTensor::kV, key_runs(input), spec.kv_heads, spec.head_dim_v, &NonFinite::v});
    }
    load(input, tensors, on_progress);
    Inputs inputs;
    inputs.q = inputs_[0];
    inputs.sinks = load_sinks(input);
    if (quantized_k == nullptr) inputs.k = inputs_[1];
    if (quantized_v == nullptr) inputs.v = inputs_.back();
    if (quantized_k != nullptr) inputs.quantized_k = load_compressed(input, *quantized_k);
    if (quantized_v != nullptr) inputs.quantized_v = load_compressed(input, *quantized_v);
    run_ = [this, &attention, inputs](const BlockDone& block_done, RunMode mode) {
      return attention.run(inputs, {out_, lse_, std::nullopt}, std::span(workspace_.data(), workspace_.bytes()),
                           ring_.backend.stream(), block_done, mode);
    };
  });
}

LoadedJob::LoadedJob(const JobInput& input, Mla& latent, const Collective& collective,
                     const ProgressCallback& on_progress)
    : LoadedJob(ring_op(latent), collective) {
  collective.run_collectively([&] {
    const MlaSpec& spec = input.mla()->spec;
    const std::int64_t q_dim = spec.head_dim + spec.rope_dim;
    const bool packed = !input.mla()->format.is_plain();
    std::vector<Tensor> tensors{{SyntheticTensor::kQ, query_runs(input), spec.heads, q_dim, &NonFinite::q}};
    if (packed) {
      const std::int64_t halves =
          latent_row_bytes(input.mla()->spec) / static_cast<std::int64_t>(size_of(input.job().spec.dtype));
      tensors.push_back({SyntheticTensor::kLatent, key_runs(input), 1, halves, &NonFinite::k, true});
    } else {
      tensors.push_back({SyntheticTensor::kLatent, key_runs(input), 1, spec.latent_dim, &NonFinite::k});
      tensors.push_back({SyntheticTensor::kKeyRope, key_runs(input), 1, spec.rope_dim, &NonFinite::k});
    }
    load(input, tensors, on_progress);
    weights_ = load_mla_weights(input, ring_.backend, collective, ring_.options.threads);
    result_.non_finite.v += weights_.non_finite;
    MlaInputs inputs;
    inputs.q = inputs_[0];
    inputs.w_uk = weights_.keys;
    inputs.w_uv = weights_.values;
    inputs.sinks = load_sinks(input);
    if (packed) {
      const std::int64_t bytes = latent_row_bytes(input.mla()->spec);
      inputs.fp8_rows = {static_cast<std::byte*>(inputs_[1].data), bytes, bytes};
    } else {
      inputs.latent = inputs_[1];
      inputs.k_rope = inputs_[2];
    }
    run_ = [this, &latent, inputs](const BlockDone& block_done, RunMode mode) {
      return latent.run(inputs, {out_, lse_}, std::span(workspace_.data(), workspace_.bytes()), ring_.backend.stream(),
                        block_done, mode);
    };
  });
}

RunStats LoadedJob::run(RunMode mode, const ProgressCallback& on_progress) {
  BlockDone block_done;
  if (on_progress) {
    block_done = [&on_progress](const StepCount& blocks) { on_progress("block", blocks); };
  }
  collective_.barrier();
  const RunStats stats = run_(block_done, mode);
  // If the ranks' sequences are independent, they may end at very different times.
  collective_.barrier(ring_.time_estimate.seconds);
  return stats;
}

RankResult LoadedJob::fetch(const RunStats& stats) {
  result_.stats = stats;
  collective_.run_collectively([&] {
    bring_to_host(ring_.backend, collective_.timeouts(), {&result_.out, &result_.lse});
  });
  return std::move(result_);
}

}  // namespace ringattn
