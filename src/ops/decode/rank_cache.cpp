// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/rank_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/decode_deal.hpp"
#include "base/error.hpp"
#include "kernels/attention/visibility.hpp"
#include "kernels/decode/cache_partition.hpp"
#include "ops/decode/keys_per_mask_row.hpp"

namespace ringattn {

namespace {

// Calls `visit` for each piece of `page` tokens of the partition in a sequence of `length` keys, with its index in the
// partition, the position of its first key and its number of keys. No piece crosses the end of a KV split.
void for_each_piece(const KvPartition& partition, std::int64_t group, std::int64_t length, std::int64_t page,
                    const std::function<void(std::int64_t index, std::int64_t position, std::int64_t keys)>& visit) {
  const std::int64_t held = keys_of_partition(partition, group, length);
  for (std::int64_t at = 0; at < held; at += page) {
    const std::int64_t position = (at / group * partition.stride + partition.first) * group + at % group;
    visit(at / page, position, std::min(page, held - at));
  }
}

// What a rank holds: the partition's KV splits of these sequences.
struct Holding {
  SequenceRange sequences;
  KvPartition partition;
  std::int64_t group = 0;  // keys
};

Holding holding_of(const DecodeJob& job, int rank, int ranks, std::int64_t kv_split_keys) {
  const DecodeDeal deal = deal_of(job, ranks);
  return {kept_sequences(deal, job.limits.sequences, rank), kept_partition(deal, rank), kv_split_keys};
}

// The indices of the pages that contain it, ascending.
std::vector<std::int32_t> needed_pages(const PageTable& table, const Batch& batch, const Holding& holding) {
  std::vector<std::int32_t> numbers;
  for (std::int64_t number = holding.sequences.first; number < holding.sequences.end(); ++number) {
    const auto s = static_cast<std::size_t>(number);
    for_each_piece(holding.partition, holding.group, batch.sequences[s].k_len, table.page_size,
                   [&](std::int64_t, std::int64_t position, std::int64_t) {
                     numbers.push_back(table.of(s)[static_cast<std::size_t>(position / table.page_size)]);
                   });
  }
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  return numbers;
}

RankCache dense_share(const Batch& batch, const Holding& holding, std::int64_t capacity) {
  const std::vector<std::int64_t> cu_k = batch.cu_k();
  const std::int64_t group = holding.group;
  RankCache cache;
  cache.pages = holding.sequences.count;
  cache.page_size = capacity;
  cache.first_sequence = holding.sequences.first;
  for (std::int64_t page = 0; page < cache.pages; ++page) {
    const auto s = static_cast<std::size_t>(cache.first_sequence + page);
    for_each_piece(holding.partition, group, batch.sequences[s].k_len, group,
                   [&](std::int64_t index, std::int64_t position, std::int64_t keys) {
                     const std::int64_t first = cu_k[s] + position;
                     cache.held.push_back({{first, first + keys}, page * capacity + index * group});
                   });
  }
  return cache;
}

// Chosen by the keys to which the ranks attend with the block mask, if these are known and there are several ranks;
// otherwise 0.
int head_parts(const Job& job, const AttentionSpec& spec, int ranks) {
  const std::vector<std::int64_t> listed = ranks > 1 ? keys_per_mask_row(job) : std::vector<std::int64_t>();
  if (listed.empty()) return 0;
  return deal_decode(spec, false, ranks,
                     [&](const DecodeDeal& deal) {
                       std::int64_t most = 0;
                       for (int rank = 0; rank < ranks; ++rank)
                         most = std::max(most, attended_keys(listed, job, deal, rank));
                       return most;
                     })
      .heads;
}

// Tokens of a quantization group of k or v, whichever is larger.
std::int64_t quantized_together(const CacheFormat& format) {
  std::int64_t tokens = 1;
  for (const RowFormat& of : {format.k, format.v}) {
    if (!quantized_per_token(of)) tokens = std::max<std::int64_t>(tokens, of.group);
  }
  return tokens;
}

// `together`: tokens of a quantization group.
RankCache paged_share(const PageTable& table, const Batch& batch, const Holding& holding, std::int64_t columns,
                      std::int64_t together) {
  const std::vector<std::int64_t> cu_k = batch.cu_k();
  RankCache cache;
  cache.page_size = table.page_size;
  cache.first_sequence = holding.sequences.first;
  cache.columns = columns;
  const auto sequences = static_cast<std::int64_t>(table.sequences());
  if (columns > kMaxTableEntries / sequences) {
    fail(ErrorCode::kMemory, fmt::format("a block table of {} sequences with {} entries each", sequences, columns),
         fmt::format("at most {} entries are held", kMaxTableEntries),
         "Decode long and short sequences in steps of their own, or use larger pages.");
  }
  cache.numbers = needed_pages(table, batch, holding);
  cache.pages = static_cast<std::int64_t>(cache.numbers.size());
  cache.table.assign(static_cast<std::size_t>(sequences * columns), 0);
  std::vector<PackedRun> keys(cache.numbers.size());      // for each page the longest run of a sequence in it
  std::vector<std::int64_t> codes(cache.numbers.size());  // its largest number of tokens in complete groups
  for (std::int64_t sequence = holding.sequences.first; sequence < holding.sequences.end(); ++sequence) {
    const auto s = static_cast<std::size_t>(sequence);
    const std::int64_t length = batch.sequences[s].k_len;
    for_each_piece(holding.partition, holding.group, length, table.page_size,
                   [&](std::int64_t index, std::int64_t position, std::int64_t tokens) {
                     const std::int32_t number = table.of(s)[static_cast<std::size_t>(position / table.page_size)];
                     const auto page = static_cast<std::size_t>(
                         std::lower_bound(cache.numbers.begin(), cache.numbers.end(), number) - cache.numbers.begin());
                     cache.table[s * static_cast<std::size_t>(columns) + static_cast<std::size_t>(index)] =
                         static_cast<std::int32_t>(page);
                     const std::int64_t coded = std::min(tokens, length / together * together - position);
                     const std::int64_t longest = keys[page].tokens();
                     if (tokens < longest || (tokens == longest && coded <= codes[page])) return;
                     keys[page] = {cu_k[s] + position, cu_k[s] + position + tokens};
                     codes[page] = coded;
                   });
  }
  for (std::size_t page = 0; page < keys.size(); ++page) {
    cache.held.push_back({keys[page], static_cast<std::int64_t>(page) * table.page_size});
  }
  return cache;
}

}  // namespace

DecodeSpec decode_spec(const JobInput& input) {
  if (const MlaJob* const mla = input.mla()) return {absorbed_spec(mla->spec), true};
  return {input.job().spec, false};
}

DecodeSpec stored_spec(const JobInput& input, const KernelRow<DecodeSpec>& row, int ranks) {
  const DecodeSpec plain = decode_spec(input);
  if (plain.attention.block_mask.any() && ranks > 1) return plain;
  DecodeSpec stored = plain;
  stored.format = input.mla() != nullptr ? CacheFormat{input.mla()->format, {}} : input.job().format;
  return row.missing(stored).empty() ? stored : plain;
}

SharedPrefixPages shared_prefixes(const JobInput& input, int key_tile) {
  constexpr std::size_t kMostPrefixes = 256;  // the number that every kernel supports
  if (input.pages() == nullptr || input.mla() != nullptr) return {};
  return shared_prefix_pages(*input.pages(), input.job().batch, key_tile, kMostPrefixes);
}

DecodeJob decode_job(const JobInput& input, int ranks, const DecodeKernel& kernel, const CacheFormat& format) {
  const SequenceList& sequences = input.job().batch.sequences;
  DecodeJob job;
  const DecodeSpec spec = decode_spec(input);
  job.spec = spec.attention;
  job.values_in_keys = spec.values_in_keys;
  job.format = format;
  job.limits.sequences = static_cast<std::int64_t>(sequences.size());
  job.limits.rows = static_cast<int>(sequences[0].q_len);
  job.limits.keys = 1;
  for (std::size_t s = 0; s < sequences.distinct(); ++s) {
    job.limits.keys = std::max(job.limits.keys, sequences[s].k_len);
  }
  job.head_parts = head_parts(input.job(), job.spec, ranks);
  if (input.pages() == nullptr) return job;
  job.page_size = input.pages()->page_size;
  if (!job.spec.block_mask.any()) {
    job.limits.prefixes = static_cast<int>(shared_prefixes(input, kernel.key_tile()).keys.size());
  }
  job.pages = 1;
  const Batch& batch = input.job().batch;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto pages = needed_pages(*input.pages(), batch, holding_of(job, rank, ranks, kernel.kv_split_keys())).size();
    job.pages = std::max(job.pages, static_cast<std::int64_t>(pages));
  }
  return job;
}

RankCache rank_cache(const JobInput& input, const DecodeJob& job, int rank, int ranks, std::int64_t kv_split_keys) {
  const Batch& batch = input.job().batch;
  const Holding holding = holding_of(job, rank, ranks, kv_split_keys);
  if (!job.is_paged()) return dense_share(batch, holding, max_cache_tokens(job, ranks, kv_split_keys));
  return paged_share(*input.pages(), batch, holding, max_table_pages(job, ranks, kv_split_keys),
                     quantized_together(job.format));
}

double decode_bytes(const JobInput& input, const DecodeKernel& kernel, const CacheFormat& format) {
  const Job& job = input.job();
  const int key_tile = kernel.key_tile();
  const SharedPrefixPages shared =
      kernel.shares_prefixes() && job.block_mask == nullptr ? shared_prefixes(input, key_tile) : SharedPrefixPages();
  const DecodeSpec spec = decode_spec(input);
  std::vector<bool> read(shared.keys.size());  // for each prefix: an earlier sequence reads it
  double keys = 0.0;
  for (std::size_t number = 0; number < job.batch.sequences.size(); ++number) {
    const Sequence s = job.batch.sequences[number];
    const Visibility visibility(job.spec.mask, s.k_len);
    const TileRange tiles = visibility.tiles(s.q_offset, s.q_len, {1, key_tile});
    if (tiles.empty()) continue;
    if (job.block_mask != nullptr) {
      keys += masked_pairs(*job.block_mask, {-1, -1}, number, s.q_offset + s.q_len - 1, 1, {0, s.k_len});
      continue;
    }
    keys += static_cast<double>(std::min(s.k_len, tiles.end * key_tile) - tiles.begin * key_tile);
    if (shared.keys.empty() || shared.of_sequence[number] < 0) continue;
    const auto prefix = static_cast<std::size_t>(shared.of_sequence[number]);
    const KeyRange common = visibility.common_keys(s.q_offset, s.q_offset + s.q_len - 1);
    std::int64_t once = shared.keys[prefix] / key_tile * key_tile;
    if (common.end < once) once = once / kernel.kv_split_keys() * kernel.kv_split_keys();
    if (common.begin > 0 || common.end < once) continue;  // rows that don't see the whole prefix share nothing
    if (read[prefix]) keys -= static_cast<double>(once);
    read[prefix] = true;
  }
  const RowShape k{spec.attention.dtype, spec.attention.kv_heads, spec.attention.head_dim};
  const RowShape v{spec.attention.dtype, spec.attention.kv_heads, spec.attention.head_dim_v};
  return keys * static_cast<double>(token_bytes(format.k, k) + (spec.values_in_keys ? 0 : token_bytes(format.v, v)));
}

}  // namespace ringattn
