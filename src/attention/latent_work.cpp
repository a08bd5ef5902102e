// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_work.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "attention/tokens/cost.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

// Of expanded rows, where no memory budget says less.
constexpr std::int64_t kMostExpandedBytes = std::int64_t{256} << 20;
// At 32,768 keys a block, reading and writing the state is about one percent of its fold. Absorbed, queries are few and
// a state is four times as large.
constexpr std::int64_t kExpandedTokens = std::int64_t{1} << 15;
constexpr std::int64_t kAbsorbedTokens = std::int64_t{1} << 17;
constexpr std::int64_t kLeastTokens = 1024;

int largest_divisor(int number, std::int64_t limit) {
  int divisor = static_cast<int>(std::clamp<std::int64_t>(limit, 1, number));
  while (number % divisor != 0) --divisor;
  return divisor;
}

}  // namespace

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

LatentRoom latent_room(const LatentJob& job, const Options& options, int heads_at_a_time) {
  if (heads_at_a_time < 0) {
    fail(ErrorCode::kUsage, fmt::format("{} heads at a time", heads_at_a_time), "at least one is expanded at a time",
         "0 chooses from the memory budget.");
  }
  const LatentSpec& spec = job.spec;
  const bool expanded = *job.form == LatentForm::kExpanded;
  const std::int64_t keys = std::max<std::int64_t>(1, job.batch.k_tokens());
  const std::int64_t quarter = options.memory_budget > 0 ? static_cast<std::int64_t>(options.memory_budget / 4)
                                                         : std::numeric_limits<std::int64_t>::max();
  std::int64_t tokens = options.block_tokens > 0 ? options.block_tokens : expanded ? kExpandedTokens : kAbsorbedTokens;
  LatentRoom room;
  room.heads = spec.heads;
  if (expanded && heads_at_a_time > 0) {
    room.heads = largest_divisor(spec.heads, heads_at_a_time);
  } else if (expanded) {
    const std::int64_t of_one_head = std::min(tokens, keys) * gathered_row_bytes(spec, *job.form, 1);
    room.heads = largest_divisor(spec.heads, std::min(kMostExpandedBytes, quarter) / of_one_head);
  }
  if (options.block_tokens > 0) return room;
  const std::int64_t row_bytes = gathered_row_bytes(spec, *job.form, room.heads);
  while (tokens > kLeastTokens && std::min(tokens, keys) > quarter / row_bytes) tokens /= 2;
  if (tokens < keys) room.most_block_tokens = tokens;
  return room;
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
