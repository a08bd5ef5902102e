// SPDX-License-Identifier: Apache-2.0
// What a step of a Decode is given: what its views must be, and which part of it a rank looks at.
#pragma once

#include <cstdint>

#include "attention/decode.hpp"

namespace ringattn {

// Pages of the cache, and tokens of a page, whichever way k is stored.
inline std::int64_t cache_pages(const DecodeJob& job, const DecodeInputs& inputs) {
  return job.format.k.is_plain() ? inputs.k.pages : inputs.quantized_k.pages;
}
inline std::int64_t cache_page_size(const DecodeJob& job, const DecodeInputs& inputs) {
  return job.format.k.is_plain() ? inputs.k.page_size : inputs.quantized_k.page_size;
}

// The lengths that the caller has given, of either kind.
inline const std::int32_t* given_lengths(const DecodeInputs& inputs) {
  return inputs.lengths != nullptr ? inputs.lengths : inputs.lengths_before;
}

// Lengths that count the step's rows, in place of those given.
inline void set_lengths(DecodeInputs& inputs, const std::int32_t* lengths) {
  inputs.lengths = lengths;
  inputs.lengths_before = nullptr;
  inputs.update_lengths = false;
}

// What of a step Decode::pool() can't take. Throws kUsage.
void check_pool(const DecodeJob& job, const DecodeInputs& inputs);

// Both throw kUsage, and change nothing. The step's rows. `owned`: sequences whose results this rank gets.
void check_step_shapes(const DecodeJob& job, const DecodeInputs& inputs, const DecodeOutputs& outputs,
                       std::int64_t owned);
// Caches, tables, lists and prefixes; inputs.rows is at least 1. `part`: of the job, that this rank keeps.
void check_caches(const DecodeJob& part, const DecodeInputs& inputs);

// Where lengths lie on a device: whether the host's copies of them, of the table and of prefixes are complete, or none
// is there. Throws kUsage.
void check_host_copies(const DecodeJob& job, const DecodeInputs& inputs);

// Keys of the longest of these sequences, as far as the host knows. `on_device`: where the kernel has its lengths.
std::int64_t longest_sequence(const DecodeJob& job, const DecodeInputs& inputs, bool on_device);

// The step of a rank's part alone, of plain caches, without prefixes: of sequences `mine` and these K/V heads. Caches
// and lists are those of the heads already.
DecodeInputs rank_step(const DecodeJob& job, const DecodeInputs& inputs, const SequenceRange& mine,
                       const HeadRange& kv_heads);

// The lists of these K/V heads alone, of lists of all of them.
DecodeBlockMaskArrays block_mask_of_heads(const DecodeBlockMaskArrays& all, const AttentionSpec& spec,
                                          const HeadRange& kv_heads);

}  // namespace ringattn
