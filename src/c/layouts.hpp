// SPDX-License-Identifier: Apache-2.0
// C API queries about a layout.
#pragma once

#include <cstdint>

#include "attention/tokens/layout.hpp"

namespace ringattn::c {

// The layout of RINGATTN_QUERIES or RINGATTN_KEYS. Throws kUsage for another value.
const Layout& side_of(const JobLayout& layout, std::int32_t side);

// Writes for each row of the rank its packed token and its token in its sequence, to arrays that are not null. Throws
// kUsage if `count` isn't the number of rows.
void write_rows(const Layout& layout, int rank, std::int64_t count, std::int64_t* packed_tokens,
                std::int64_t* sequence_tokens);

}  // namespace ringattn::c
