// SPDX-License-Identifier: Apache-2.0
// Checks of the inputs of a decode step, and the part of them that a rank reads. Called by Decode.
#pragma once

#include <cstdint>

#include "ops/decode/decode.hpp"

namespace ringattn {

// Number of pages of the cache, and tokens per page, for any format of k.
inline std::int64_t cache_pages(const DecodeJob& job, const DecodeInputs& inputs) {
  return job.format.k.is_plain() ? inputs.k.pages : inputs.quantized_k.pages;
}
inline std::int64_t cache_page_size(const DecodeJob& job, const DecodeInputs& inputs) {
  return job.format.k.is_plain() ? inputs.k.page_size : inputs.quantized_k.page_size;
}

// The lengths array that the caller has given.
inline const std::int32_t* given_lengths(const DecodeInputs& inputs) {
  return inputs.lengths != nullptr ? inputs.lengths : inputs.lengths_before;
}

// Replaces the given lengths by lengths that include the tokens of the step.
inline void set_lengths(DecodeInputs& inputs, const std::int32_t* lengths) {
  inputs.lengths = lengths;
  inputs.lengths_before = nullptr;
  inputs.update_lengths = false;
}

// Checks that Decode::update_mean_keys() supports the step. Throws kUsage.
void check_mean_keys(const DecodeJob& job, const DecodeInputs& inputs);

// Checks shapes of the step's tensors. Throws kUsage. `owned`: number of sequences whose results this rank gets.
void check_step_shapes(const DecodeJob& job, const DecodeInputs& inputs, const DecodeOutputs& outputs,
                       std::int64_t owned);
// Checks caches, tables, block masks and prefixes; inputs.rows is at least 1. `part`: the job of this rank. Throws
// kUsage.
void check_caches(const DecodeJob& part, const DecodeInputs& inputs);

// With lengths on a device: checks that the host copies of lengths, block table and prefixes are complete or all
// absent. Throws kUsage.
void check_host_copies(const DecodeJob& job, const DecodeInputs& inputs);

// Keys of the longest of these sequences, as far as the host knows. `on_device`: the kernel's lengths are on a device.
std::int64_t longest_sequence(const DecodeJob& job, const DecodeInputs& inputs, bool on_device);

// The step of this rank's part, with plain caches and without prefixes: sequences `mine` and K/V heads `kv_heads`.
// Caches and block masks of `job` have only these heads already.
DecodeInputs rank_step(const DecodeJob& job, const DecodeInputs& inputs, const SequenceRange& mine,
                       const HeadRange& kv_heads);

// The block mask of these K/V heads, from the mask of all heads.
DecodeBlockMaskArrays block_mask_of_heads(const DecodeBlockMaskArrays& all, const AttentionSpec& spec,
                                          const HeadRange& kv_heads);

}  // namespace ringattn
