// SPDX-License-Identifier: Apache-2.0
#include "attention/job/listed_keys.hpp"

#include <algorithm>

#include "kernels/decode_lists.hpp"

namespace ringattn {

std::vector<std::int64_t> listed_keys(const Job& job) {
  std::vector<std::int64_t> keys;
  const int rows = static_cast<int>(job.batch.sequences[0].q_len);
  if (job.lists == nullptr || !std::ranges::equal(job.lists->sequences(), listed_sequences(job.batch)) ||
      !why_no_step(*job.lists, job.spec.mask, rows).empty()) {
    return keys;
  }
  const DecodeListArrays lists = decode_lists(*job.lists, job.spec.mask, rows);
  for (std::size_t list = 0; list < lists.counts.size(); ++list) {
    const auto sequence = list / static_cast<std::size_t>(job.spec.lists.heads);
    const auto length = static_cast<std::int32_t>(job.batch.sequences[sequence].k_len);
    const std::int32_t* const blocks = lists.blocks.data() + list * static_cast<std::size_t>(lists.stride);
    const auto read = [&](std::int32_t i) { return blocks[i]; };
    keys.push_back(keys_by_list(length, rows, job.spec.lists.key_block, lists.counts[list], read).keys);
  }
  return keys;
}

std::int64_t folded_keys(const std::vector<std::int64_t>& listed, const Job& job, const StepDeal& deal, int rank) {
  const FoldSpec& spec = job.spec;
  const SequenceRange kept = kept_sequences(deal, static_cast<std::int64_t>(job.batch.sequences.size()), rank);
  const HeadRange heads = kept_heads(deal, spec, rank);
  std::int64_t keys = 0;
  for (std::int64_t s = kept.first; s < kept.end(); ++s) {
    for (std::int64_t head = heads.first; head < heads.end(); ++head) {
      const std::int64_t list = s * spec.lists.heads + head * spec.lists.heads / spec.kv_heads;
      keys += listed[static_cast<std::size_t>(list)];
    }
  }
  return keys;
}

}  // namespace ringattn
