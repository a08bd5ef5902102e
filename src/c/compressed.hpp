// SPDX-License-Identifier: Apache-2.0
// Compressed keys and values of a call. All functions throw kUsage, naming the part ("k_scales") and what it should
// have been.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "c/ringattn.h"
#include "c/tensors.hpp"
#include "kernels/compressed_rows.hpp"
#include "kernels/row_format.hpp"

namespace ringattn::c {

// DLPack's types of a part's elements, that which the library names first.
std::vector<DLDataType> part_types(StoredType type, Dtype dtype);

// Whether the format is plain. Throws where `plain` is missing then, or `compressed` otherwise, or the wrong one is
// there. `name`: "k", "v".
bool is_plain(std::string_view name, const RowFormat& format, const DLTensor* plain,
              const ringattn_compressed* compressed);

// `tokens` rows, and tables of a batch of so many sequences.
CompressedRows read_rows(const TensorReader& reader, std::string_view name, const ringattn_compressed* given,
                         const RowFormat& format, const RowShape& shape, std::int64_t tokens, std::int64_t sequences);

// The same of rows that are read by attention. In host memory the channels of outliers are checked: they are addresses.
CompressedRows read_keys(const TensorReader& reader, std::string_view name, const ringattn_compressed* given,
                         const RowFormat& format, const RowShape& shape, std::int64_t tokens, std::int64_t sequences);

// Pages, and tables of a step of so many sequences.
CompressedCache read_cache(const TensorReader& reader, std::string_view name, const ringattn_compressed* given,
                           const RowFormat& format, const RowShape& shape, std::int64_t sequences);

}  // namespace ringattn::c
