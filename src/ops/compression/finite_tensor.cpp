// SPDX-License-Identifier: Apache-2.0
#include "ops/compression/finite_tensor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "ops/common/non_finite.hpp"

namespace ringattn {

std::optional<NonFiniteElement> find_non_finite(const TensorSource& tensor) {
  std::int64_t elements = 1;
  for (const std::int64_t extent : tensor.info->shape) elements *= extent;
  const auto found = find_non_finite(tensor, 0, elements);
  tensor.shard->check_unchanged();
  return found;
}

std::optional<NonFiniteElement> find_non_finite(const TensorSource& tensor, std::int64_t begin, std::int64_t end) {
  const auto dtype = attention_dtype(tensor.info->dtype);
  if (!dtype) return std::nullopt;
  const auto element = static_cast<std::int64_t>(size_of(*dtype));
  const std::int64_t bytes = end * element;
  std::vector<std::byte> part;
  std::optional<NonFiniteElement> found;
  for (std::int64_t at = begin * element; at < bytes && !found; at += kPartBytes) {
    heartbeat();
    part.resize(static_cast<std::size_t>(std::min(kPartBytes, bytes - at)));
    tensor.shard->read(*tensor.info, at, part);
    const TensorView numbers = dense_view(static_cast<const void*>(part.data()), *dtype,
                                          static_cast<std::int64_t>(part.size()) / element, 1, 1);
    if (count_non_finite(numbers) == 0) continue;
    const auto invalid = find_invalid_element(numbers);
    found = {at / element + invalid->token, invalid->value};
  }
  return found;
}

void check_compared(const TensorSource& tensor, std::string_view name) {
  const auto found = find_non_finite(tensor);
  if (!found) return;
  std::string place;
  std::int64_t rest = found->element;
  for (auto axis = tensor.info->shape.rbegin(); axis != tensor.info->shape.rend(); rest /= *axis, ++axis) {
    place = fmt::format("{}{}{}", rest % *axis, place.empty() ? "" : ", ", place);
  }
  fail(ErrorCode::kFile, fmt::format("{}[{}] is {}", name, place, found->value),
       "rows of O that depend on it cannot be compared",
       {"Find out where it comes from, or leave out ", setting("report"), "."});
}

}  // namespace ringattn
