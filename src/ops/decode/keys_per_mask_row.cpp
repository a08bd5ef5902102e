// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/keys_per_mask_row.hpp"

#include <algorithm>

#include "kernels/decode/decode_block_mask.hpp"

namespace ringattn {

std::vector<std::int64_t> keys_per_mask_row(const Job& job) {
  std::vector<std::int64_t> keys;
  const int rows = static_cast<int>(job.batch.sequences[0].q_len);
  if (job.block_mask == nullptr || !std::ranges::equal(job.block_mask->sequences(), masked_sequences(job.batch)) ||
      !why_not_decodable(*job.block_mask, job.spec.mask, rows).empty()) {
    return keys;
  }
  const DecodeBlockMaskArrays block_mask = decode_block_mask(*job.block_mask, job.spec.mask, rows);
  for (std::size_t list = 0; list < block_mask.counts.size(); ++list) {
    const auto sequence = list / static_cast<std::size_t>(job.spec.block_mask.heads);
    const auto length = static_cast<std::int32_t>(job.batch.sequences[sequence].k_len);
    const std::int32_t* const blocks = block_mask.blocks.data() + list * static_cast<std::size_t>(block_mask.stride);
    const auto read = [&](std::int32_t i) { return blocks[i]; };
    keys.push_back(masked_keys(length, rows, job.spec.block_mask.key_block, block_mask.counts[list], read).keys);
  }
  return keys;
}

std::int64_t attended_keys(const std::vector<std::int64_t>& listed, const Job& job, const DecodeDeal& deal, int rank) {
  const AttentionSpec& spec = job.spec;
  const SequenceRange kept = kept_sequences(deal, static_cast<std::int64_t>(job.batch.sequences.size()), rank);
  const HeadRange heads = kept_heads(deal, spec, rank);
  std::int64_t keys = 0;
  for (std::int64_t s = kept.first; s < kept.end(); ++s) {
    for (std::int64_t head = heads.first; head < heads.end(); ++head) {
      const std::int64_t list = s * spec.block_mask.heads + head * spec.block_mask.heads / spec.kv_heads;
      keys += listed[static_cast<std::size_t>(list)];
    }
  }
  return keys;
}

}  // namespace ringattn
