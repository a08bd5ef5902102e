// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/growing_decode.hpp"

#include <cstring>
#include <utility>

#include "attention/ring/handshake.hpp"
#include "attention/tokens/cost.hpp"
#include "kernels/decode/decode_block_mask.hpp"
#include "ops/attention_jobs/prepared_job.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/staging.hpp"
#include "ops/decode/decode_inputs.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

// Every `rows`-th row of a dense array, from row `first` on.
template <class View>
View every(View all, std::int64_t first, std::int64_t rows) {
  all.data = const_cast<std::byte*>(TensorView(all).at(first, 0));
  all.tokens /= rows;
  all.token_stride *= rows;
  return all;
}

// The tables of these steps have not been checked before, so the step checks them, on a device too.
DecodeOptions checking_options(const Options& options) {
  DecodeOptions decoding = decode_options(options);
  decoding.check_tables = true;
  return decoding;
}

}  // namespace

HostRows::HostRows(std::int64_t rows, const AttentionSpec& spec)
    : out(static_cast<std::size_t>(rows * out_token_bytes(spec))),
      lse(static_cast<std::size_t>(rows * lse_token_bytes(spec))) {}

void HostRows::take(const std::byte* other_out, const std::byte* other_lse, std::int64_t from, std::int64_t to,
                    std::int64_t count, const AttentionSpec& spec) {
  const auto copy = [&](std::vector<std::byte>& target, const std::byte* source, std::int64_t bytes) {
    std::memcpy(target.data() + to * bytes, source + from * bytes, static_cast<std::size_t>(count * bytes));
  };
  if (count == 0) return;
  copy(out, other_out, out_token_bytes(spec));
  copy(lse, other_lse, lse_token_bytes(spec));
}

GrowingDecode::GrowingDecode(const JobInput& input, std::int64_t rows, const JobInput& whole,
                             std::span<const std::int64_t> sequences, const Options& options, Transport& world,
                             const Collective& collective)
    : input_(input), rows_(rows), collective_(collective) {
  const DecodeJob job = job_of(options, world);
  if (const MlaJob* const mla = input.mla()) {
    latents_.emplace(MlaDecodeJob{mla->spec, job.limits, job.page_size, job.pages}, world, checking_options(options));
  } else {
    decode_.emplace(job, world, checking_options(options));
  }
  handshake(collective, {block_mask_config_entry(whole.job().block_mask.get())});
  collective.run_collectively([&] {
    cache_.emplace(input, decode(), collective, ProgressCallback(), rows);
    load();
    if (whole.job().block_mask != nullptr) load_block_mask(whole.job(), sequences);
  });
}

DecodeJob GrowingDecode::job_of(const Options& options, Transport& world) const {
  DecodeJob job;
  collective_.run_collectively([&] {
    const DecodeSpec spec = decode_spec(input_);
    const DecodeChoice choice = choose_kernel(spec, compatible_request(options.kernel, world));
    const auto backend = choice.row->make_backend({1, kNoDevice});
    job = decode_job(input_, world.size(), *choice.row->make_kernel(spec, *backend));
    job.limits.rows = 1;  // per step
  });
  return job;
}

// Loads the rows' queries and the new keys and values, sequence by sequence, and allocates the results.
void GrowingDecode::load() {
  const AttentionSpec& spec = input_.job().spec;
  Backend& backend = decode().backend();
  std::vector<PackedRun> queries;
  std::vector<PackedRun> keys;
  const std::vector<std::int64_t> cu_k = input_.job().batch.cu_k();
  for (std::int64_t s = 0; s < sequences(); ++s) {
    queries.push_back({s * rows_, (s + 1) * rows_});
    keys.push_back({cu_k[static_cast<std::size_t>(s) + 1] - rows_, cu_k[static_cast<std::size_t>(s) + 1]});
  }
  const int threads = decode().options().threads;
  Staging staging(backend, collective_.timeouts());
  const auto fill = [&](SyntheticTensor tensor, const std::vector<PackedRun>& runs, int heads, int dim,
                        Buffer& memory) {
    const MutableTensorView view = make_rows(backend, spec.dtype, sequences() * rows_, heads, dim, memory);
    staging.load(runs, view,
                 [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
                   input_.read(tensor, piece, host, threads);
                 },
                 {});
    return view;
  };
  if (latents_) {
    const MlaSpec& latent = input_.mla()->spec;
    q_view_ = fill(SyntheticTensor::kQ, queries, spec.heads, spec.head_dim, q_);
    k_view_ = fill(SyntheticTensor::kLatent, keys, 1, latent.latent_dim, k_);
    v_view_ = fill(SyntheticTensor::kKeyRope, keys, 1, latent.rope_dim, v_);
    weights_ = load_mla_weights(input_, backend, collective_, threads);
  } else {
    q_view_ = fill(SyntheticTensor::kQ, queries, spec.heads, spec.head_dim, q_);
    k_view_ = fill(SyntheticTensor::kK, keys, spec.kv_heads, spec.head_dim, k_);
    v_view_ = fill(SyntheticTensor::kV, keys, spec.kv_heads, spec.head_dim_v, v_);
  }
  out_view_ = make_rows(backend, spec.dtype, owned().count * rows_, spec.heads, spec.head_dim_v, out_);
  make_rows(backend, Dtype::kF32, owned().count * rows_, spec.heads, 1, lse_);
  if (spec.sinks) sinks_ = upload<float>(backend, input_.sinks());
  await(backend, collective_.timeouts());
}

// Loads the block masks of all steps, step by step.
void GrowingDecode::load_block_mask(const Job& whole, std::span<const std::int64_t> numbers) {
  std::vector<MaskedStep> steps;
  for (std::int64_t row = 0; row < rows_; ++row) {
    for (const std::int64_t number : numbers) {
      const Sequence& of = whole.batch.sequences[static_cast<std::size_t>(number)];
      steps.push_back({static_cast<std::size_t>(number), of.q_offset + of.q_len - rows_ + row + 1});
    }
  }
  const DecodeBlockMaskArrays block_mask = block_mask_of_heads(
      decode_block_mask(*whole.block_mask, whole.spec.mask, 1, steps, 1), whole.spec, decode().kv_heads());
  mask_stride_ = block_mask.stride;
  mask_rows_of_step_ = static_cast<std::int64_t>(block_mask.counts.size()) / rows_;
  Backend& backend = decode().backend();
  mask_indices_ = upload<std::int32_t>(backend, block_mask.blocks);
  mask_counts_ = upload<std::int32_t>(backend, block_mask.counts);
  await(backend, collective_.timeouts());
}

HostRows GrowingDecode::run() {
  DecodeInputs inputs;
  cache_->bind_pools(cache_->pools(), inputs);
  if (input_.job().spec.sinks) inputs.sinks = reinterpret_cast<const float*>(sinks_.data());
  cache_->bind_growing_tables(inputs);
  for (std::int64_t row = 0; row < rows_; ++row) enqueue(inputs, row);
  if (latents_) {
    latents_->wait();
  } else {
    decode_->wait();
  }
  bring_to_host(decode().backend(), collective_.timeouts(), {&out_, &lse_});
  const AttentionSpec& spec = input_.job().spec;
  const std::int64_t mine = owned().count * rows_;
  HostRows results(mine, spec);
  results.take(out_.data(), lse_.data(), 0, 0, mine, spec);
  return results;
}

// Enqueues the step that decodes row `row` of each sequence.
void GrowingDecode::enqueue(DecodeInputs inputs, std::int64_t row) {
  const AttentionSpec& spec = input_.job().spec;
  const Stream stream = decode().backend().stream();
  const MutableTensorView all_out =
      dense_view(static_cast<void*>(out_.data()), spec.dtype, owned().count * rows_, spec.heads, spec.head_dim_v);
  const MutableTensorView out = every(all_out, row, rows_);
  const RowView lse{reinterpret_cast<float*>(lse_.data()) + row * spec.heads, rows_ * spec.heads, 1};
  inputs.q = every(q_view_, row, rows_);
  const TensorView k_new = every(k_view_, row, rows_);
  const TensorView v_new = every(v_view_, row, rows_);
  if (latents_) {
    MlaDecodeInputs step = mla_decode_inputs(inputs, weights_);
    step.latent = k_new;
    step.k_rope = v_new;
    latents_->enqueue(step, {out, lse}, stream);
    return;
  }
  inputs.k_new = k_new;
  inputs.v_new = v_new;
  if (mask_stride_ > 0) {
    inputs.block_mask = {
        reinterpret_cast<const std::int32_t*>(mask_indices_.data()) + row * mask_rows_of_step_ * mask_stride_,
        reinterpret_cast<const std::int32_t*>(mask_counts_.data()) + row * mask_rows_of_step_, mask_stride_};
  }
  decode_->enqueue(inputs, {out, lse}, stream);
}

}  // namespace ringattn
