// SPDX-License-Identifier: Apache-2.0
// Reads compressed keys and values of a C call. All functions throw kUsage; the message names the part ("k_scales") and
// the expected shape and type.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "c/ringattn.h"
#include "c/tensors.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/row_format.hpp"

namespace ringattn::c {

// DLPack types accepted for a part, the preferred one first.
std::vector<DLDataType> part_types(StoredType type, Dtype dtype);

// True if the format is plain. Throws kUsage if `plain` or `compressed` is missing, or the wrong one is given. `name`:
// "k", "v".
bool is_plain(std::string_view name, const RowFormat& format, const DLTensor* plain,
              const ringattn_compressed* compressed);

// Reads `tokens` rows, and tables of a batch of `sequences` sequences.
CompressedRows read_rows(const TensorReader& reader, std::string_view name, const ringattn_compressed* given,
                         const RowFormat& format, const RowShape& shape, std::int64_t tokens, std::int64_t sequences);

// The same for attention. In host memory also checks the channel indices of outliers, which are used as addresses.
CompressedRows read_keys(const TensorReader& reader, std::string_view name, const ringattn_compressed* given,
                         const RowFormat& format, const RowShape& shape, std::int64_t tokens, std::int64_t sequences);

// Reads pages, and tables of a step of `sequences` sequences.
CompressedCache read_cache(const TensorReader& reader, std::string_view name, const ringattn_compressed* given,
                           const RowFormat& format, const RowShape& shape, std::int64_t sequences);

}  // namespace ringattn::c
