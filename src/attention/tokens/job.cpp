// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/tokens/balance.hpp"
#include "base/error.hpp"
#include "base/size.hpp"
#include "kernels/common/cache_view.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kFar = std::int64_t{1} << 62;

// Checks that the positions have the batch's keys.
void check_positions(const Job& job) {
  if (job.spec.positions != (job.positions == nullptr ? 0 : job.positions->heads())) {
    fail(ErrorCode::kUsage,
         fmt::format("the job has {}", job.positions == nullptr ? "no positions of keys" : "positions of keys"),
         "its spec says otherwise", "set_positions() sets both.");
  }
  if (job.positions == nullptr) return;
  const std::span<const KeptSequence> kept = job.positions->sequences();
  bool fits = kept.size() == job.batch.sequences.size();
  for (std::size_t s = 0; fits && s < kept.size(); ++s) fits = kept[s].keys == job.batch.sequences[s].k_len;
  if (fits) return;
  fail(ErrorCode::kUsage, "the positions of keys are those of other sequences", "their lengths differ from the batch's",
       "Give one position for each key of the batch, or for each key and K/V head.");
}

}  // namespace

std::vector<MaskedSequence> masked_sequences(const Batch& batch) {
  std::vector<MaskedSequence> listed;
  for (const Sequence& s : batch.sequences) listed.push_back({s.q_offset, s.q_len, s.k_len});
  return listed;
}

void set_block_mask(Job& job, std::shared_ptr<const BlockMask> block_mask) {
  job.spec.block_mask = block_mask == nullptr ? BlockMaskShape{} : block_mask->shape();
  job.block_mask = std::move(block_mask);
}

void set_positions(Job& job, std::shared_ptr<const KeyPositions> positions) {
  job.spec.positions = positions == nullptr ? 0 : positions->heads();
  job.positions = std::move(positions);
  if (job.positions == nullptr) return;
  check_positions(job);
  std::vector<Sequence> moved(job.batch.sequences.begin(), job.batch.sequences.end());
  for (std::size_t s = 0; s < moved.size(); ++s) {
    const auto position = position_without_gaps(job.spec.mask, *job.positions, s, moved[s].q_offset, moved[s].q_len);
    if (!position) return;
    moved[s].q_offset = *position;
  }
  job.batch.sequences = std::move(moved);
  job.spec.positions = 0;
  job.positions = nullptr;
}

double visible_pairs(const Job& job) {
  const QueryWork pairs_of = query_work(job);
  double pairs = 0.0;
  for (std::size_t i = 0; i < job.batch.sequences.size(); ++i) {
    pairs += pairs_of({static_cast<std::int32_t>(i), 0, job.batch.sequences[i].q_len});
  }
  return pairs;
}

std::string describe(const Job& job) {
  const std::size_t count = job.batch.sequences.size();
  const std::int64_t queries = job.batch.q_tokens();
  const std::int64_t keys = job.batch.k_tokens();
  const std::string tokens =
      queries == keys ? counted(static_cast<std::uint64_t>(queries), "token")
                      : fmt::format("{}, {} keys", queries == 1 ? "1 query" : fmt::format("{} queries", queries), keys);
  std::string text = fmt::format("{}, scale {}; {} sequence{}, {}", describe(job.spec), job.spec.softmax_scale, count,
                                 count == 1 ? "" : "s", tokens);
  if (!job.format.is_plain()) text += fmt::format("; {}", describe(job.format));
  if (job.block_mask == nullptr) return text;
  Job dense = job;
  set_block_mask(dense, nullptr);
  const double all = visible_pairs(dense);
  return text + fmt::format("; {:.4g} % of the pairs", all > 0.0 ? 100.0 * visible_pairs(job) / all : 100.0);
}

void check_mask(const Mask& mask) {
  if (mask.left >= -1 && mask.right >= -1 && mask.left <= kFar && mask.right <= kFar) return;
  fail(ErrorCode::kUsage, fmt::format("window {},{}", mask.left, mask.right),
       "each side is a number of tokens, or -1 for unlimited", "Use -1, or 0 to 2^62 tokens.");
}

void check_job(const Job& job) {
  check_heads(job.spec);
  check_mask(job.spec.mask);
  if (job.page_size != 0) check_page_size(job.page_size);
  check_batch(job.batch);
  check_format("k", job.format.k, {job.spec.dtype, job.spec.kv_heads, job.spec.head_dim});
  check_format("v", job.format.v, {job.spec.dtype, job.spec.kv_heads, job.spec.head_dim_v});
  if (job.spec.block_mask != (job.block_mask == nullptr ? BlockMaskShape{} : job.block_mask->shape())) {
    fail(ErrorCode::kUsage, fmt::format("the job has {}", job.block_mask == nullptr ? "no block mask" : "a block mask"),
         "its spec says otherwise", "set_block_mask() sets both.");
  }
  if (job.block_mask != nullptr && !std::ranges::equal(job.block_mask->sequences(), masked_sequences(job.batch))) {
    fail(ErrorCode::kUsage, "the job's block mask is that of other sequences",
         "their lengths, or where their queries begin, differ from the batch's",
         "Make the block mask from masked_sequences().");
  }
  check_positions(job);
}

QueryWork query_work(const Batch& batch, const Mask& mask, const BlockMask* block_mask, const KeyPositions* positions) {
  return [&batch, &mask, block_mask, positions](const TokenRun& queries) {
    const Sequence& s = batch.sequences[static_cast<std::size_t>(queries.sequence)];
    const std::int64_t position = s.q_offset + queries.begin;
    if (block_mask == nullptr) {
      return SequenceVisibility(mask, s.k_len, positions, static_cast<std::size_t>(queries.sequence))
          .pairs(position, queries.tokens(), {0, s.k_len});
    }
    return masked_pairs(*block_mask, mask, static_cast<std::size_t>(queries.sequence), position, queries.tokens(),
                        {0, s.k_len});
  };
}

QueryWork query_work(const Job& job) {
  return query_work(job.batch, job.spec.mask, job.block_mask.get(), job.positions.get());
}

JobLayout make_layout(const Batch& batch, const QueryWork& work, bool listed, int world, const LayoutRequest& request,
                      int query_tile, int key_tile) {
  JobLayout layout = make_layout(batch, work, world, request, query_tile, key_tile);
  return listed ? balance_stripes(batch, work, std::move(layout)) : std::move(layout);
}

JobLayout make_layout(const Job& job, int world, const LayoutRequest& request, int query_tile, int key_tile) {
  return make_layout(job.batch, query_work(job), job.block_mask != nullptr, world, request, query_tile, key_tile);
}

}  // namespace ringattn
