// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_decode.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>

#include "attention/ring/copy_tensor.hpp"
#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/tokens/cost.hpp"
#include "base/error.hpp"
#include "comm/collective.hpp"
#include "ops/common/shard_checks.hpp"
#include "ops/mla/mla_checks.hpp"
#include "ops/mla/mla_gemms.hpp"
#include "ops/mla/mla_ring_steps.hpp"

namespace ringattn {

namespace {

DecodeJob in_latent_of(const MlaDecodeJob& job) {
  return {absorbed_spec(job.spec), job.limits, job.page_size, job.pages, true, {job.format, {}}};
}

MutableTensorView buffer_view(const Buffer& buffer, Dtype dtype, std::int64_t rows, std::int64_t heads,
                              std::int64_t dim) {
  return dense_view(static_cast<void*>(buffer.data()), dtype, rows, heads, dim);
}

}  // namespace

struct MlaDecode::Impl {
  Impl(MlaDecodeJob the_job, Transport& the_transport, double timeout_seconds)
      : job(std::move(the_job)), transport(the_transport), collective(transport, Timeouts(timeout_seconds)) {}

  std::int64_t own_rows(const MlaDecodeInputs& inputs) const {
    return inputs.rows < 1 ? 0 : decode->owned(inputs.q.tokens / inputs.rows).count * inputs.rows;
  }
  std::int64_t max_rows() const { return job.limits.sequences * job.limits.rows; }

  void choose_gemms();
  void allocate();
  void check(const MlaDecodeInputs& inputs, const MlaOutputs& outputs) const;
  DecodeInputs step_of(const MlaDecodeInputs& inputs) const;
  void begin(const MlaDecodeInputs& inputs, Stream stream);
  DecodeOutputs in_latent(const MlaDecodeInputs& inputs, const MlaOutputs& outputs) const;
  void end(const MlaDecodeInputs& inputs, const MlaOutputs& outputs, Stream stream);

  MlaDecodeJob job;
  Transport& transport;
  Collective collective;
  std::uint64_t config_hash = 0;  // of handshake()
  std::optional<Decode> decode;
  MlaGemms gemms;
  DecodeMemory memory;
  Buffer queries;  // [sequences · rows, heads, latent_dim + rope_dim]
  Buffer latents;  // [own rows, heads, latent_dim]
  Buffer rows;     // [sequences · rows, 1, latent_dim + rope_dim], new tokens
  std::unique_ptr<Events> ended;
};

void MlaDecode::Impl::choose_gemms() {
  gemms = make_mla_gemms(job.spec, decode->kernel().row->backend, decode->backend());
  memory = mla_decode_memory(decode->memory(), job.spec, job.limits, gemms);
}

void MlaDecode::Impl::allocate() {
  Backend& backend = decode->backend();
  const AttentionSpec spec = absorbed_spec(job.spec);
  if (gemms.queries) {
    gemms.queries->reserve(job.spec.heads);
    queries = backend.allocate(static_cast<std::size_t>(max_rows() * q_token_bytes(spec)));
  }
  if (gemms.values) {
    gemms.values->reserve(job.spec.heads);
    const std::int64_t mine = decode->owned(job.limits.sequences).count * job.limits.rows;
    latents = backend.allocate(static_cast<std::size_t>(mine * out_token_bytes(spec)));
  }
  rows = backend.allocate(static_cast<std::size_t>(max_rows() * k_token_bytes(spec)));
  ended = backend.make_events(1, false);
}

void MlaDecode::Impl::check(const MlaDecodeInputs& inputs, const MlaOutputs& outputs) const {
  const MlaSpec& spec = job.spec;
  const bool has_w_uk = inputs.w_uk.data != nullptr;
  const bool has_w_uv = inputs.w_uv.data != nullptr;
  if (inputs.q.tokens < 0 || inputs.q.tokens > max_rows()) {
    fail(ErrorCode::kUsage, fmt::format("a step has {} query rows", inputs.q.tokens),
         fmt::format("steps were prepared for up to {}", max_rows()), "Prepare for larger steps, or split this one.");
  }
  check_matrices(inputs.w_uk, inputs.w_uv, spec);
  const auto expect = [&](std::string_view name, const TensorView& view, std::int64_t tokens, int heads, int dim) {
    check_shard("MlaDecode", name, view, {spec.dtype, tokens, heads, dim});
  };
  expect("q", inputs.q, inputs.q.tokens, spec.heads, (has_w_uk ? spec.head_dim : spec.latent_dim) + spec.rope_dim);
  expect("out", outputs.out, own_rows(inputs), spec.heads, has_w_uv ? spec.head_dim_v : spec.latent_dim);
  check_apart("out", outputs.out, "q", inputs.q);
  if (inputs.latent.data == nullptr && inputs.k_rope.data == nullptr) return;
  if (inputs.latent.data == nullptr || inputs.k_rope.data == nullptr) {
    fail(ErrorCode::kUsage, "one of latent and k_rope is missing", "a token has a latent and a rotary key",
         "Give both, or neither.");
  }
  expect("latent", inputs.latent, inputs.q.tokens, 1, spec.latent_dim);
  expect("k_rope", inputs.k_rope, inputs.q.tokens, 1, spec.rope_dim);
}

// Inputs of the decode in the latent space, from the results of begin().
DecodeInputs MlaDecode::Impl::step_of(const MlaDecodeInputs& inputs) const {
  const MlaSpec& spec = job.spec;
  const int wide = spec.latent_dim + spec.rope_dim;
  const std::int64_t count = inputs.q.tokens;
  DecodeInputs step;
  step.q =
      inputs.w_uk.data == nullptr ? inputs.q : TensorView(buffer_view(queries, spec.dtype, count, spec.heads, wide));
  step.rows = inputs.rows;
  step.k = step.v = inputs.cache;
  step.v.dim = spec.latent_dim;
  step.quantized_k = inputs.fp8_rows;
  step.block_table = inputs.block_table;
  step.table_pages = inputs.table_pages;
  step.lengths = inputs.lengths;
  step.lengths_before = inputs.lengths_before;
  step.update_lengths = inputs.update_lengths;
  step.sinks = inputs.sinks;
  step.host_lengths = inputs.host_lengths;
  step.host_table = inputs.host_table;
  if (inputs.latent.data == nullptr) return step;
  step.k_new = buffer_view(rows, spec.dtype, count, 1, wide);
  step.v_new = columns_of(step.k_new, 0, spec.latent_dim);  // the same columns of the same memory
  return step;
}

// Work before the decode: maps queries into the latent space, and joins latent and rotary key of new tokens.
void MlaDecode::Impl::begin(const MlaDecodeInputs& inputs, Stream stream) {
  const MlaSpec& spec = job.spec;
  const int wide = spec.latent_dim + spec.rope_dim;
  const std::int64_t count = inputs.q.tokens;
  if (inputs.w_uk.data != nullptr) {
    const MutableTensorView q = buffer_view(queries, spec.dtype, count, spec.heads, wide);
    gemms.queries->multiply(
        {columns_of(inputs.q, 0, spec.head_dim), inputs.w_uk.transposed(), columns_of(q, 0, spec.latent_dim)}, stream,
        {});
    copy_tensor(decode->backend(), columns_of(q, spec.latent_dim, spec.rope_dim),
                columns_of(inputs.q, spec.head_dim, spec.rope_dim), stream);
  }
  if (inputs.latent.data == nullptr) return;
  const MutableTensorView row = buffer_view(rows, spec.dtype, count, 1, wide);
  copy_tensor(decode->backend(), columns_of(row, 0, spec.latent_dim), inputs.latent, stream);
  copy_tensor(decode->backend(), columns_of(row, spec.latent_dim, spec.rope_dim), inputs.k_rope, stream);
}

DecodeOutputs MlaDecode::Impl::in_latent(const MlaDecodeInputs& inputs, const MlaOutputs& outputs) const {
  if (inputs.w_uv.data == nullptr) return {outputs.out, outputs.lse};
  return {buffer_view(latents, job.spec.dtype, own_rows(inputs), job.spec.heads, job.spec.latent_dim), outputs.lse};
}

void MlaDecode::Impl::end(const MlaDecodeInputs& inputs, const MlaOutputs& outputs, Stream stream) {
  if (inputs.w_uv.data != nullptr && own_rows(inputs) > 0) {
    gemms.values->multiply({in_latent(inputs, outputs).out, inputs.w_uv, outputs.out}, stream, {});
  }
  if (!decode->backend().is_capturing(stream)) ended->record(0, stream);
}

MlaDecode::MlaDecode(MlaDecodeJob job, Transport& transport, DecodeOptions options)
    : impl_(std::make_unique<Impl>(std::move(job), transport, options.timeout_seconds)) {
  Impl& impl = *impl_;
  impl.collective.run_collectively([&impl] {
    check_mla_job({impl.job.spec, {}, {}});
    check_latent_format("cached latents", impl.job.format, impl.job.spec);
  });
  impl.decode.emplace(Decode(in_latent_of(impl.job), transport, std::move(options), Decode::KernelOnly{}));
  impl.collective.run_collectively([&impl] {
    impl.choose_gemms();
    check_budget(impl.memory, impl.decode->options().memory_budget);
  });
  impl.decode->prepare();
  impl.config_hash = handshake(impl.collective,
                               {{"MLA job", describe(impl.job.spec)}, {"GEMM kernel", std::string(impl.gemms.kernel)}});
  impl.collective.run_collectively([&impl] { impl.allocate(); });
}

MlaDecode::~MlaDecode() = default;
MlaDecode::MlaDecode(MlaDecode&&) noexcept = default;

const MlaDecodeJob& MlaDecode::job() const { return impl_->job; }
Decode& MlaDecode::in_latent() { return *impl_->decode; }
const Decode& MlaDecode::in_latent() const { return *impl_->decode; }
const DecodeMemory& MlaDecode::memory() const { return impl_->memory; }

void MlaDecode::run(const MlaDecodeInputs& inputs, const MlaOutputs& outputs, Stream stream) {
  Impl& impl = *impl_;
  begin_run(impl.collective, impl.config_hash, "decode steps of " + describe(impl.job.spec), [&] {
    check_not_captured(impl.decode->backend(), stream);
    impl.check(inputs, outputs);
  });
  abandon_on_failure(impl.transport, [&] { impl.begin(inputs, stream); });
  impl.decode->run(impl.step_of(inputs), impl.in_latent(inputs, outputs), stream);
  abandon_on_failure(impl.transport, [&] {
    impl.end(inputs, outputs, stream);
    impl.ended->synchronize(0, impl.collective.timeouts().for_peer(), {});
  });
}

void MlaDecode::enqueue(const MlaDecodeInputs& inputs, const MlaOutputs& outputs, Stream stream) {
  Impl& impl = *impl_;
  impl.check(inputs, outputs);
  const DecodeInputs step = impl.step_of(inputs);
  const DecodeOutputs step_outputs = impl.in_latent(inputs, outputs);
  impl.decode->check(step, step_outputs, stream);
  abandon_on_failure(impl.transport, [&] {
    impl.begin(inputs, stream);
    impl.decode->enqueue_checked(step, step_outputs, stream);
    impl.end(inputs, outputs, stream);
  });
}

void MlaDecode::wait() {
  impl_->decode->wait();
  abandon_on_failure(impl_->transport, [this] {
    impl_->ended->synchronize(0, impl_->collective.timeouts().for_peer(), [this] { impl_->transport.progress(); });
  });
}

}  // namespace ringattn
