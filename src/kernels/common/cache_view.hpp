// SPDX-License-Identifier: Apache-2.0
// A view of the K or V tensor of a paged cache that another component owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtype.hpp"

namespace ringattn {

// K or V of all sequences, [pages, page_size, heads, dim]. Strides count elements.
struct CacheView {
  const void* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  std::int64_t pages = 0;
  std::int64_t page_size = 0;  // tokens
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  const std::byte* at(std::int64_t page, std::int64_t token, std::int64_t head) const {
    return static_cast<const std::byte*>(data) +
           (page * page_stride + token * token_stride + head * head_stride) * static_cast<std::int64_t>(size_of(dtype));
  }
};

// Supported page sizes in tokens: powers of two from 16 to 256, so that pages hold key tiles in whole page runs.
bool is_page_size(std::int64_t tokens);
inline constexpr std::string_view kPageSizes = "16, 32, 64, 128 and 256";

// Throws kUsage for other sizes, also for 0 (not paged).
void check_page_size(std::int64_t tokens);

}  // namespace ringattn
