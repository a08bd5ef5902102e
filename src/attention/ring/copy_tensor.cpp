// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/copy_tensor.hpp"

#include <cstdint>

namespace ringattn {

namespace {

// True if all (token, head) rows have the same stride.
bool is_even(const TensorView& view) { return view.token_stride == view.heads * view.head_stride; }

}  // namespace

void copy_tensor(Backend& backend, const MutableTensorView& target, const TensorView& source, Stream stream) {
  if (target.tokens == 0) return;
  const auto element = static_cast<std::int64_t>(size_of(target.dtype));
  if (source.heads == target.heads && is_even(source) && is_even(target)) {
    backend.copy_rows(target.data, target.head_stride * element, source.data, source.head_stride * element,
                      target.dim * element, target.tokens * target.heads, stream);
    return;
  }
  for (std::int64_t head = 0; head < target.heads; ++head) {
    backend.copy_rows(target.at(0, head), target.token_stride * element, source.at(0, source.heads == 1 ? 0 : head),
                      source.token_stride * element, target.dim * element, target.tokens, stream);
  }
}

}  // namespace ringattn
