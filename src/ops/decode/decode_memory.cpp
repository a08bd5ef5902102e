// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/decode_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/job.hpp"
#include "base/error.hpp"
#include "base/size.hpp"
#include "kernels/common/cache_view.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/cache_update.hpp"
#include "ops/decode/head_results.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kMaxKeys = std::numeric_limits<std::int32_t>::max();  // lengths are int32
constexpr std::int64_t kTableEntry = sizeof(std::int32_t);                   // of block tables and lengths

void refuse_limit(const std::string& what, const std::string& why) {
  fail(ErrorCode::kUsage, what, why, "Check the limits of the job.");
}

std::size_t bytes_of(std::int64_t count, std::int64_t each) { return static_cast<std::size_t>(count * each); }

void check_rope_of(const DecodeJob& job) {
  const RopeSpec& rope = *job.rope;
  check_rope(rope);
  if (rope.dtype != job.spec.dtype || rope.head_dim != job.spec.head_dim) {
    fail(ErrorCode::kUsage, fmt::format("RoPE of {} rows with head_dim {}", dtype_name(rope.dtype), rope.head_dim),
         fmt::format("q and k are {} with head_dim {}", dtype_name(job.spec.dtype), job.spec.head_dim),
         "Make the RopeSpec for the dtype and head_dim of the job.");
  }
  if (rope.axis_count() > 1) {
    fail(ErrorCode::kUsage, fmt::format("RoPE of a step has {} axes of positions", rope.axis_count()),
         "a new token has one position, which follows from its sequence's length",
         "Leave mrope_section out for text, or rotate q and k_new before the step.");
  }
  if (job.values_in_keys) {
    fail(ErrorCode::kUsage, "RoPE of keys that have the values in them", "the values would be rotated, too",
         "Rotate the rotary part of a latent before it is appended.");
  }
}

}  // namespace

std::string describe(const DecodeJob& job) {
  const std::string cache = job.is_paged() ? fmt::format("pages of {} tokens", job.page_size) : "a dense cache";
  const std::string prefixes =
      job.limits.prefixes == 0 ? "" : fmt::format(", shared prefixes up to {}", job.limits.prefixes);
  const std::string best = job.top_k_blocks == 0 ? "" : fmt::format(", the top {} blocks", job.top_k_blocks);
  const std::string parts = job.head_parts == 0 ? "" : fmt::format(", K/V heads in {} parts", job.head_parts);
  const std::string rope = job.rope ? fmt::format(", RoPE of {}", describe(*job.rope)) : "";
  return fmt::format("{}; {}, up to {} and {} each, {}{}{}{}{}", describe(job.decode_spec()),
                     counted(static_cast<std::uint64_t>(job.limits.sequences), "sequence"),
                     counted(static_cast<std::uint64_t>(job.limits.keys), "key"),
                     counted(static_cast<std::uint64_t>(job.limits.rows), "row"), cache, prefixes, best, parts, rope);
}

void check_decode_job(const DecodeJob& job) {
  AttentionSpec without_block_mask = job.spec;
  without_block_mask.block_mask = {};
  check_job({without_block_mask, {}, 0, job.format});
  const BlockMaskShape& lists = job.spec.block_mask;
  if (lists.any() && (lists.key_block < 1 || lists.heads < 1 ||
                      (lists.heads <= job.spec.kv_heads && job.spec.kv_heads % lists.heads != 0))) {
    fail(ErrorCode::kUsage, fmt::format("{} block masks of blocks of {} keys", lists.heads, lists.key_block),
         fmt::format("the job has {}, and each mask is shared by an equal number of them",
                     counted(static_cast<std::uint64_t>(job.spec.kv_heads), "KV head")),
         "Use one block mask for all of them, or one for each.");
  }
  const DecodeLimits& limits = job.limits;
  if (limits.sequences < 1 || limits.sequences > kMaxSequences) {
    refuse_limit(fmt::format("steps of up to {} sequences", limits.sequences),
                 fmt::format("1 to {} are supported", kMaxSequences));
  }
  if (limits.rows < 1 || limits.rows > kMaxDecodeRows) {
    refuse_limit(fmt::format("steps of up to {} rows a sequence", limits.rows),
                 fmt::format("1 to {} are supported", kMaxDecodeRows));
  }
  if (limits.keys < 1 || limits.keys > kMaxKeys) {
    refuse_limit(fmt::format("sequences of up to {} keys", limits.keys),
                 fmt::format("1 to {} are supported", kMaxKeys));
  }
  if (job.page_size != 0) check_page_size(job.page_size);
  if (limits.prefixes < 0 || limits.prefixes > limits.sequences) {
    refuse_limit(fmt::format("steps of up to {} shared prefixes", limits.prefixes),
                 fmt::format("there are up to {} sequences", limits.sequences));
  }
  if (limits.prefixes > 0 && !job.is_paged()) {
    fail(ErrorCode::kUsage, "sequences of a dense cache share prefixes", "they share pages, and it has none",
         "Use pages, or say nothing of prefixes.");
  }
  if (job.values_in_keys && job.spec.head_dim_v > job.spec.head_dim) {
    fail(ErrorCode::kUsage, fmt::format("values of {} dims lie in keys of {}", job.spec.head_dim_v, job.spec.head_dim),
         "they are the first elements of a key", "Check head_dim_v, or give values a cache of their own.");
  }
  if (job.values_in_keys && !job.format.v.is_plain()) {
    fail(ErrorCode::kUsage, fmt::format("values in keys that are stored as {}", describe(job.format.v)),
         "they are columns of the keys, however these are stored", "Give values a cache of their own.");
  }
  if (job.spec.block_mask.any() && limits.prefixes > 0) {
    fail(ErrorCode::kUsage, "sequences with a block mask share prefixes",
         "the KV splits of a sequence follow from its block mask", "Use a block mask, or prefixes.");
  }
  if (job.top_k_blocks < 0 || (job.top_k_blocks > 0 && !job.spec.block_mask.any())) {
    refuse_limit(fmt::format("the top {} blocks of keys", job.top_k_blocks),
                 "AttentionSpec::block_mask says how large they are");
  }
  if (job.top_k_blocks > 0 && !job.format.k.is_plain()) {
    fail(ErrorCode::kUsage, fmt::format("blocks are selected from keys that are stored as {}", describe(job.format)),
         "mean keys are computed from plain keys", "Give a block mask to each step: DecodeInputs::block_mask.");
  }
  if (job.head_parts < 0 || (job.head_parts > 0 && !job.spec.block_mask.any())) {
    fail(ErrorCode::kUsage, fmt::format("K/V heads are split in {} parts", job.head_parts),
         "ranks split heads only with a block mask", "Use DecodeJob::head_parts 0.");
  }
  if (job.rope) check_rope_of(job);
  if (job.pages < 0) refuse_limit(fmt::format("a pool of {} pages", job.pages), "it has at least one");
}

DecodeDeal deal_of(const DecodeJob& job, int ranks) {
  const int parts = job.head_parts;
  if (parts > 0) {
    const int max_parts = max_head_parts(job.spec, job.top_k_blocks > 0);
    if (ranks % parts == 0 && parts <= max_parts) return {ranks / parts, parts, 1};
    fail(ErrorCode::kUsage, fmt::format("{} ranks split K/V heads in {} parts", ranks, parts),
         fmt::format("the number of parts divides that of the ranks, up to {}: K/V heads that share a block mask, "
                     "or one that a step selects, stay together",
                     max_parts),
         "Use DecodeJob::head_parts 0, or another number of ranks.");
  }
  return deal_decode(job.spec, job.top_k_blocks > 0, job.limits.sequences, ranks);
}

DecodeJob rank_job(const DecodeJob& job, int rank, int ranks) {
  const DecodeDeal deal = deal_of(job, ranks);
  DecodeJob part = job;
  part.spec = spec_of_heads(job.spec, kept_heads(deal, job.spec, rank));
  part.limits.sequences = (job.limits.sequences + deal.sequences - 1) / deal.sequences;
  return part;
}

std::int64_t max_cache_tokens(const DecodeJob& job, int ranks, std::int64_t kv_split_keys) {
  // The first rank has the maximum.
  return keys_of_partition(kept_partition(deal_of(job, ranks), 0), kv_split_keys, job.limits.keys);
}

std::int64_t max_table_pages(const DecodeJob& job, int ranks, std::int64_t kv_split_keys) {
  if (!job.is_paged()) return 1;
  return (max_cache_tokens(job, ranks, kv_split_keys) + job.page_size - 1) / job.page_size;
}

std::int64_t max_mask_blocks(const DecodeJob& job) {
  return (job.limits.keys + job.spec.block_mask.key_block - 1) / job.spec.block_mask.key_block;
}

TopKMemory top_k_memory(const DecodeJob& job) {
  TopKMemory memory;
  if (job.top_k_blocks == 0) return memory;
  const std::int64_t lists = job.limits.sequences * job.spec.block_mask.heads;
  const std::int64_t blocks = max_mask_blocks(job);
  const auto number = static_cast<std::int64_t>(sizeof(float));
  memory.means = bytes_of(job.limits.sequences * blocks, job.spec.kv_heads * job.spec.head_dim * number);
  memory.scores = bytes_of(lists * blocks, number);
  memory.chosen = bytes_of(lists * job.top_k_blocks, number);
  memory.counts = bytes_of(lists, number);
  return memory;
}

RotatedRowsMemory rotated_rows_memory(const DecodeJob& job) {
  RotatedRowsMemory memory;
  if (!job.rope) return memory;
  const std::int64_t rows = job.limits.sequences * job.limits.rows;
  memory.frequencies = job.rope->frequencies.size() * sizeof(double);
  memory.q = bytes_of(rows, q_token_bytes(job.spec));
  if (!job.format.k.is_plain()) memory.k = bytes_of(rows, k_token_bytes(job.spec));
  return memory;
}

RowPartials row_partials(const DecodeJob& job, const DecodeKernel& kernel, int ranks) {
  const DecodeDeal deal = deal_of(job, ranks);
  const std::int64_t partial = kernel.partial_floats() * static_cast<std::int64_t>(sizeof(float)) * job.spec.heads;
  RowPartials records;
  for (int rank = 0; rank < ranks; ++rank) {
    records.bytes.push_back(deal.kv_splits > 1 ? partial : HeadResults(rank_job(job, rank, ranks).spec).bytes);
  }
  if (deal.kv_splits > 1)
    records.splits = splits_per_partition(job.limits.keys, deal.kv_splits, kernel.kv_split_keys());
  return records;
}

DecodeMemory decode_memory(const DecodeJob& job, const DecodeKernel& kernel, int ranks) {
  const AttentionSpec& spec = job.spec;
  const DecodeLimits& limits = job.limits;
  const std::int64_t kv_split_keys = kernel.kv_split_keys();
  const DecodeDeal deal = deal_of(job, ranks);
  const DecodeJob part = largest_rank_job(job, ranks);
  const std::int64_t table_pages = max_table_pages(job, ranks, kv_split_keys);
  // The maximum number of sequences that a rank owns.
  const std::int64_t owned = (limits.sequences + ranks - 1) / ranks;
  const std::int64_t pages = job.pages > 0 ? job.pages : part.limits.sequences * table_pages;
  const std::int64_t page = job.is_paged() ? job.page_size : max_cache_tokens(job, ranks, kv_split_keys);
  const std::int64_t rows = limits.sequences * limits.rows;
  DecodeMemory memory;
  const RowShape k{spec.dtype, part.spec.kv_heads, spec.head_dim};
  const RowShape v{spec.dtype, part.spec.kv_heads, spec.head_dim_v};
  const std::int64_t stored = token_bytes(job.format.k, k) + (job.values_in_keys ? 0 : token_bytes(job.format.v, v));
  memory.cache =
      bytes_of(pages * page, stored) + static_cast<std::size_t>(table_bytes(job.format.k, k, limits.sequences) +
                                                                table_bytes(job.format.v, v, limits.sequences));
  memory.tables = bytes_of(limits.sequences, (job.is_paged() ? table_pages : 0) * kTableEntry + kTableEntry);
  memory.rows =
      bytes_of(rows, q_token_bytes(spec) + (job.values_in_keys ? k_token_bytes(spec) : kv_token_bytes(spec))) +
      bytes_of(owned * limits.rows, out_token_bytes(spec) + lse_token_bytes(spec));
  memory.scratch = kernel.scratch_bytes(part.limits) + top_k_memory(part).total() + rotated_rows_memory(part).total() +
                   bytes_of(part.limits.sequences, static_cast<std::int64_t>(sizeof(OutOfRangeEntry)) + kTableEntry) +
                   bytes_of(limits.sequences, kTableEntry);
  if (deal.exchanges_records()) {
    const RowPartials records = row_partials(job, kernel, ranks);
    const std::int64_t others = deal.heads * deal.kv_splits - 1;
    memory.partials =
        bytes_of((part.limits.sequences + others * owned) * limits.rows, records.splits * records.bytes.back());
  }
  return memory;
}

void check_budget(const DecodeMemory& needed, std::size_t budget) {
  if (budget == 0 || needed.total() <= budget) return;
  fail(ErrorCode::kMemory, fmt::format("a memory budget of {} a rank is too small", counted(budget, "byte")),
       fmt::format("{} are needed: {} of cache, {} of scratch and partial results, {} of rows and tables",
                   needed.total(), needed.cache, needed.own(), needed.rows + needed.tables),
       "Use more ranks, or allow for fewer or shorter sequences.");
}

}  // namespace ringattn
