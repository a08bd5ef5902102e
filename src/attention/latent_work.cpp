// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_work.hpp"

#include <algorithm>

#include "attention/tokens/cost.hpp"

namespace ringattn {

RowStreams latent_streams(const LatentSpec& spec) {
  return {{"latent", latent_token_bytes(spec)}, {"k_rope", k_rope_token_bytes(spec)}};
}

std::int64_t gathered_row_bytes(const LatentSpec& spec, LatentForm form, int heads) {
  if (form == LatentForm::kAbsorbed) return latent_token_bytes(spec) + k_rope_token_bytes(spec);
  return kv_token_bytes(expanded_spec(spec, heads));
}

std::size_t latent_state_stride(const FoldKernel& fold, std::int64_t rows) {
  return (fold.state_bytes(rows) + 255) / 256 * 256;
}

RingJob ring_job(const LatentJob& job, const Options& options, const LatentRoom& room, const LatentKernels& kernels) {
  const LatentSpec& spec = job.spec;
  const bool expanded = *job.form == LatentForm::kExpanded;
  const double products = latent_product_flops(spec);
  const FoldSpec all_heads = form_spec(spec, *job.form, spec.heads);
  RingJob ring;
  ring.work = {job.batch, spec.mask, latent_streams(spec), pair_flops(all_heads), nullptr};
  (expanded ? ring.work.key_flops : ring.work.query_flops) = products;
  ring.kernel = {kernels.fold.key_tile(), kernels.fold.query_tile()};
  ring.most_block_tokens = room.most_block_tokens;
  ring.query_bytes = query_bytes(expanded_spec(spec, spec.heads));
  if (!expanded) ring.query_bytes += q_token_bytes(all_heads) + out_token_bytes(all_heads);
  // A block ends at a tile's end, so it may have some keys more.
  const std::int64_t block = std::max(options.block_tokens, room.most_block_tokens);
  const std::int64_t keys = job.batch.k_tokens();
  const std::int64_t rows = block == 0 || block >= keys ? keys : std::min(keys, block + ring.kernel.key_tile);
  ring.fixed_bytes =
      static_cast<std::size_t>(rows * gathered_row_bytes(spec, *job.form, room.heads) + latent_weight_bytes(spec)) +
      kernels.keys.scratch_bytes(room.heads) + kernels.values.scratch_bytes(room.heads);
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
