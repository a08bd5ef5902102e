// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_work.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "attention/ring/blocks.hpp"
#include "attention/tokens/cost.hpp"
#include "base/aligned.hpp"
#include "base/error.hpp"
#include "kernels/latent_rows.hpp"

namespace ringattn {

namespace {

std::size_t scratch_bytes(const HeadProductKernel* product, int heads) {
  return product == nullptr ? 0 : product->scratch_bytes(heads);
}

}  // namespace

RowStreams latent_streams(const LatentJob& job) {
  if (!job.format.is_plain()) return {{"latent_fp8", latent_row_bytes(job.spec)}};
  return {{"latent", latent_token_bytes(job.spec)}, {"k_rope", k_rope_token_bytes(job.spec)}};
}

std::int64_t unpacked_row_bytes(const LatentJob& job) {
  const bool unpacked = !job.format.is_plain() && *job.form == LatentForm::kExpanded;
  return unpacked ? latent_token_bytes(job.spec) + k_rope_token_bytes(job.spec) : 0;
}

std::int64_t gathered_row_bytes(const LatentSpec& spec, LatentForm form, int heads) {
  if (form == LatentForm::kAbsorbed) return latent_token_bytes(spec) + k_rope_token_bytes(spec);
  return kv_token_bytes(expanded_spec(spec, heads));
}

std::size_t latent_state_stride(const FoldKernel& fold, std::int64_t rows) { return aligned(fold.state_bytes(rows)); }

LatentChoice choose_latent_kernels(const LatentSpec& spec, LatentForm form, const KernelRequest& request,
                                   KernelPlace place) {
  const FoldSpec fold = form_spec(spec, form, spec.heads);
  const std::optional<HeadProductSpec> keys = key_product(spec, form);
  const std::optional<HeadProductSpec> values = value_product(spec);
  LatentChoice choice;
  // Why the backend that folds has no products; nothing: it has.
  const auto choose = [&](const KernelRequest& asked) -> std::optional<Error> {
    choice.fold = choose_kernel(fold, asked, place);
    const KernelRequest beside{std::string(choice.fold.row->backend), "auto"};
    try {
      if (keys) choice.keys = choose_kernel(*keys, beside, place).row;
      if (values) choice.values = choose_kernel(*values, beside, place).row;
    } catch (const Error& error) {
      return error;
    }
    return std::nullopt;
  };
  const std::optional<Error> missing = choose(request);
  if (!missing) return choice;
  const std::string_view name = choice.fold.row->name;
  const std::string_view backend = choice.fold.row->backend;
  if (request.backend == "auto" && request.kernel == "auto" && backend != "cpu" && !choose({"cpu", "auto"})) {
    choice.fold.reason += fmt::format("; passed over {}: no {} kernel multiplies the matrices", name, backend);
    return choice;
  }
  fail(ErrorCode::kUnsupported,
       fmt::format("{} folds these latents, and no {} kernel multiplies the matrices", name, backend), missing->why(),
       backend == "cpu" ? Wording("Give dtypes and dims that are supported.")
                        : Wording{"Use ", setting("backend", "cpu"), ", or dtypes and dims that are supported."});
}

RingJob ring_job(const LatentJob& job, const Options& options, const LatentRoom& room, const LatentKernels& kernels) {
  const LatentSpec& spec = job.spec;
  const bool expanded = *job.form == LatentForm::kExpanded;
  const double products = latent_product_flops(spec);
  const FoldSpec all_heads = form_spec(spec, *job.form, spec.heads);
  RingJob ring;
  ring.work = {job.batch, spec.mask, latent_streams(job), pair_flops(all_heads), nullptr};
  (expanded ? ring.work.key_flops : ring.work.query_flops) = products;
  ring.kernel = {kernels.fold.key_tile(), kernels.fold.query_tile()};
  ring.most_block_tokens = room.most_block_tokens;
  ring.query_bytes = query_bytes(expanded_spec(spec, spec.heads));
  if (!expanded && !spec.q_in_latent) ring.query_bytes += q_token_bytes(all_heads);
  if (!expanded && !spec.out_in_latent) ring.query_bytes += out_token_bytes(all_heads);
  const std::int64_t rows = most_block_keys(
      job.batch.k_tokens(), std::max(options.block_tokens, room.most_block_tokens), ring.kernel.key_tile);
  ring.fixed_bytes =
      static_cast<std::size_t>(rows * (gathered_row_bytes(spec, *job.form, room.heads) + unpacked_row_bytes(job)) +
                               latent_weight_bytes(spec)) +
      scratch_bytes(kernels.keys, room.heads) + scratch_bytes(kernels.values, room.heads);
  const auto parts = static_cast<std::size_t>(spec.heads / room.heads);
  const FoldKernel& fold = kernels.fold;
  ring.state_bytes = [&fold, parts](std::int64_t q_rows) { return parts * latent_state_stride(fold, q_rows); };
  ring.scratch_bytes = [&fold](const FoldLimits& limits) { return fold.scratch_bytes(limits); };
  return ring;
}

std::int64_t received_rows(const Plan& plan) {
  std::int64_t rows = 0;
  for (const BlockPlan& block : plan.blocks) {
    for (const Part& part : block.parts) rows += part.owner == plan.rank ? 0 : part.rows;
  }
  return rows;
}

}  // namespace ringattn
