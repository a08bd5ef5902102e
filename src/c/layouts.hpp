// SPDX-License-Identifier: Apache-2.0
// What callers are told of a layout.
#pragma once

#include <cstdint>

#include "attention/tokens/layout.hpp"

namespace ringattn::c {

// RINGATTN_QUERIES or RINGATTN_KEYS of it; throws kUsage for another number.
const Layout& side_of(const JobLayout& layout, std::int32_t side);

// Of each row of the rank its token on the packed axis and in its sequence, each where the array isn't null. Throws
// kUsage where `count` isn't the number of rows.
void write_rows(const Layout& layout, int rank, std::int64_t count, std::int64_t* packed_tokens,
                std::int64_t* sequence_tokens);

}  // namespace ringattn::c
