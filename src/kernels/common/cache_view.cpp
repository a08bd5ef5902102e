// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/cache_view.hpp"

#include <fmt/format.h>

#include <bit>

#include "base/error.hpp"

namespace ringattn {

bool is_page_size(std::int64_t tokens) {
  return tokens >= 16 && tokens <= 256 && std::has_single_bit(static_cast<std::uint64_t>(tokens));
}

void check_page_size(std::int64_t tokens) {
  if (is_page_size(tokens)) return;
  fail(ErrorCode::kUsage, fmt::format("pages of {} tokens", tokens), fmt::format("{} are supported", kPageSizes),
       "Choose one of them.");
}

}  // namespace ringattn
