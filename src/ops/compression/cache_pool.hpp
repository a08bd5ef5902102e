// SPDX-License-Identifier: Apache-2.0
// Keys or values of a file in pages, which are compressed or from which tokens are evicted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "attention/tokens/packed_run.hpp"
#include "attention/tokens/page_table.hpp"
#include "io/safetensors_rows.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn {

// The pool of keys or of values, and the sequences in it.
struct CachePool {
  std::string_view name;  // "k"
  const TensorSource& source;
  const RowGrid& grid;
  const PageTable& table;
  std::span<const std::int64_t> cu;  // of keys: [sequences + 1]
  RowShape shape;

  std::size_t sequences() const { return table.sequences(); }
  std::int64_t length(std::size_t s) const { return cu[s + 1] - cu[s]; }
};

// Number of tokens that are read at a time.
std::int64_t part_tokens(const CachePool& pool);

// Reads the elements of these tokens of the pool to `rows`. Throws kFile, naming the element, if one is not finite.
void read_slots(const CachePool& pool, std::span<const PackedRun> slots, std::span<std::byte> rows);

// Only checks that the elements are finite, with little memory, however large a page is.
void check_slots(const CachePool& pool, std::span<const PackedRun> slots);

}  // namespace ringattn
