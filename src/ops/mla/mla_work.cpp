// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_work.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "attention/ring/blocks.hpp"
#include "attention/tokens/cost.hpp"
#include "base/aligned.hpp"
#include "base/error.hpp"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn {

namespace {

std::size_t scratch_bytes(const BatchedGemmKernel* product, int heads) {
  return product == nullptr ? 0 : product->scratch_bytes(heads);
}

}  // namespace

RowStreams latent_streams(const MlaJob& job) {
  if (!job.format.is_plain()) return {{"latent_fp8", latent_row_bytes(job.spec)}};
  return {{"latent", latent_token_bytes(job.spec)}, {"k_rope", k_rope_token_bytes(job.spec)}};
}

std::int64_t dequantized_row_bytes(const MlaJob& job) {
  const bool dequantized = !job.format.is_plain() && *job.form == MlaForm::kExpanded;
  return dequantized ? latent_token_bytes(job.spec) + k_rope_token_bytes(job.spec) : 0;
}

std::int64_t gathered_row_bytes(const MlaSpec& spec, MlaForm form, int heads) {
  if (form == MlaForm::kAbsorbed) return latent_token_bytes(spec) + k_rope_token_bytes(spec);
  return kv_token_bytes(expanded_spec(spec, heads));
}

std::size_t mla_state_stride(const AttentionKernel& attention, std::int64_t rows) {
  return aligned(attention.state_bytes(rows));
}

MlaChoice choose_mla_kernels(const MlaSpec& spec, MlaForm form, const KernelRequest& request, KernelScope scope) {
  const AttentionSpec attention = form_spec(spec, form, spec.heads);
  const std::optional<BatchedGemmSpec> keys = key_gemm(spec, form);
  const std::optional<BatchedGemmSpec> values = value_gemm(spec);
  MlaChoice choice;
  // Chooses all kernels of one backend. Returns the error if the backend can't run the GEMMs.
  const auto choose = [&](const KernelRequest& asked) -> std::optional<Error> {
    choice.attention = choose_kernel(attention, asked, scope);
    const KernelRequest same_backend{std::string(choice.attention.row->backend), "auto"};
    try {
      if (keys) choice.keys = choose_kernel(*keys, same_backend, scope).row;
      if (values) choice.values = choose_kernel(*values, same_backend, scope).row;
    } catch (const Error& error) {
      return error;
    }
    return std::nullopt;
  };
  const std::optional<Error> missing = choose(request);
  if (!missing) return choice;
  const std::string_view name = choice.attention.row->name;
  const std::string_view backend = choice.attention.row->backend;
  if (request.backend == "auto" && request.kernel == "auto" && backend != "cpu" && !choose({"cpu", "auto"})) {
    choice.attention.reason += fmt::format("; not {}: no {} kernel runs the GEMMs", name, backend);
    return choice;
  }
  fail(ErrorCode::kUnsupported,
       fmt::format("{} supports these latents, but no {} kernel runs the GEMMs", name, backend), missing->why(),
       backend == "cpu"
           ? MessageTemplate("Give dtypes and dims that are supported.")
           : MessageTemplate{"Use ", setting("backend", "cpu"), ", or dtypes and dims that are supported."});
}

RingJob ring_job(const MlaJob& job, const Options& options, const MlaBlockSize& block_size, const MlaKernels& kernels) {
  const MlaSpec& spec = job.spec;
  const bool expanded = *job.form == MlaForm::kExpanded;
  const double products = mla_gemm_flops(spec);
  const AttentionSpec all_heads = form_spec(spec, *job.form, spec.heads);
  RingJob ring;
  ring.work = {job.batch, spec.mask, latent_streams(job), pair_flops(all_heads), nullptr};
  (expanded ? ring.work.key_flops : ring.work.query_flops) = products;
  ring.kernel = {kernels.attention.key_tile(), kernels.attention.query_tile()};
  ring.max_block_tokens = block_size.max_block_tokens;
  ring.query_bytes = query_bytes(expanded_spec(spec, spec.heads));
  if (!expanded && !spec.q_in_latent) ring.query_bytes += q_token_bytes(all_heads);
  if (!expanded && !spec.out_in_latent) ring.query_bytes += out_token_bytes(all_heads);
  const std::int64_t rows = max_block_keys(
      job.batch.k_tokens(), std::max(options.block_tokens, block_size.max_block_tokens), ring.kernel.key_tile);
  ring.fixed_bytes = static_cast<std::size_t>(
                         rows * (gathered_row_bytes(spec, *job.form, block_size.heads) + dequantized_row_bytes(job)) +
                         mla_weight_bytes(spec)) +
                     scratch_bytes(kernels.keys, block_size.heads) + scratch_bytes(kernels.values, block_size.heads);
  const auto parts = static_cast<std::size_t>(spec.heads / block_size.heads);
  const AttentionKernel& attention = kernels.attention;
  ring.state_bytes = [&attention, parts](const RowCounts& shard) {
    return parts * mla_state_stride(attention, shard.queries);
  };
  ring.scratch_bytes = [&attention](const AttentionLimits& limits) { return attention.scratch_bytes(limits); };
  return ring;
}

std::int64_t received_rows(const Plan& plan) {
  std::int64_t rows = 0;
  for (const BlockPlan& block : plan.blocks) {
    for (const MessagePart& part : block.parts) rows += part.owner == plan.rank ? 0 : part.rows;
  }
  return rows;
}

}  // namespace ringattn
