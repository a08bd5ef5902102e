// SPDX-License-Identifier: Apache-2.0
// What a step of a Decode is given: what its views must be, and which part of it a rank looks at.
#pragma once

#include <cstdint>

#include "attention/decode.hpp"

namespace ringattn {

// Pages of the cache, and tokens of a page, whichever way k is stored.
inline std::int64_t cache_pages(const DecodeJob& job, const DecodeInputs& inputs) {
  return job.format.k.is_plain() ? inputs.k.pages : inputs.packed_k.pages;
}
inline std::int64_t cache_page_size(const DecodeJob& job, const DecodeInputs& inputs) {
  return job.format.k.is_plain() ? inputs.k.page_size : inputs.packed_k.page_size;
}

// Both throw kUsage, and change nothing. The step's rows, and its caches. `owned`: sequences whose results this rank
// gets.
void check_step(const DecodeJob& job, const DecodeInputs& inputs, const DecodeOutputs& outputs, std::int64_t owned);
// Caches, tables, lists and prefixes; inputs.rows is at least 1.
void check_caches(const DecodeJob& job, const DecodeInputs& inputs);

// The step of the sequences `mine` alone, of plain caches, without prefixes.
DecodeInputs part_of_step(const DecodeJob& job, const DecodeInputs& inputs, const SequenceRange& mine);

}  // namespace ringattn
