// SPDX-License-Identifier: Apache-2.0
// Converts rows of an SSM task's tensors to fp32 and back.
#pragma once

#include <cstdint>

#include "base/tensor.hpp"
#include "kernels/common/cpu/tile_ops.hpp"
#include "kernels/ssm/cpu/ssm_ops.hpp"

namespace ringattn::cpu {

inline constexpr float kLog2E = 1.44269504F;

inline float element_at(const TensorView& view, std::int64_t row, std::int64_t head) {
  return load_element(view.at(row, head), view.dtype);
}

// Converts all view.dim elements of a head.
inline void load_elements(const TensorView& view, std::int64_t row, std::int64_t head, float* target) {
  const std::byte* const source = view.at(row, head);
  for (std::int64_t i = 0; i < view.dim; ++i) {
    target[i] = load_element(source + i * static_cast<std::int64_t>(size_of(view.dtype)), view.dtype);
  }
}

// Address of `count` elements of a row. Rows of a head are read in ascending order, and lie a token's stride apart,
// often more than a page. The processor does not foresee such reads, so each one prefetches a later row.
inline const std::byte* fetch_row(const TensorView& view, std::int64_t row, std::int64_t head, int count) {
  constexpr std::int64_t kRowsAhead = 8;
  constexpr std::size_t kCacheLine = 64;
  if (row + kRowsAhead < view.tokens) {
    const std::byte* const later = view.at(row + kRowsAhead, head);
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(view.dtype);
    for (std::size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(later + at);
  }
  return view.at(row, head);
}

// Converts `count` contiguous elements to fp32; a multiple of 8.
inline void widen_row(const TileOps& ops, const TensorView& view, std::int64_t row, std::int64_t head, int count,
                      float* target) {
  ops.widen(fetch_row(view, row, head, count), view.dtype, count, target);
}

// A scale of 1 changes no bits.
inline void scale_row(float scale, int count, float* values) {
  for (int i = 0; i < count; ++i) values[i] *= scale;
}

// Converts fp32 to `dtype`, rounded to nearest even.
inline void narrow_row(const SsmOps& ops, const float* values, int count, Dtype dtype, std::byte* target) {
  int i = 0;
  if (dtype == Dtype::kBf16) {
    i = count / kChannelBlock * kChannelBlock;
    ops.round_to_bf16(values, i, target);
  }
  for (; i < count; ++i) store_element(target + static_cast<std::size_t>(i) * size_of(dtype), dtype, values[i]);
}

}  // namespace ringattn::cpu
