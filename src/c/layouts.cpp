// SPDX-License-Identifier: Apache-2.0
#include "c/layouts.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "c/ringattn.h"

namespace ringattn::c {

const Layout& side_of(const JobLayout& layout, std::int32_t side) {
  if (side == RINGATTN_QUERIES) return layout.queries;
  if (side == RINGATTN_KEYS) return layout.keys;
  fail(ErrorCode::kUsage, fmt::format("side {} is not known", side), "RINGATTN_QUERIES is 0, RINGATTN_KEYS 1",
       "Choose one of these.");
}

void write_rows(const Layout& layout, int rank, std::int64_t count, std::int64_t* packed_tokens,
                std::int64_t* sequence_tokens) {
  if (count != layout.tokens(rank)) {
    fail(ErrorCode::kUsage, fmt::format("the arrays have {} rows", count),
         fmt::format("this rank has {}", layout.tokens(rank)), "Ask the object's facts how many.");
  }
  if (packed_tokens != nullptr) std::ranges::copy(layout.packed_tokens(rank), packed_tokens);
  if (sequence_tokens != nullptr) std::ranges::copy(layout.positions(rank), sequence_tokens);
}

}  // namespace ringattn::c
