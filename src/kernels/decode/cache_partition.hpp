// SPDX-License-Identifier: Apache-2.0
// Writable KV caches, and the keys of a sequence that a KvPartition holds. decode/decode.hpp has the reading side.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/host_device.hpp"
#include "kernels/decode/decode.hpp"

namespace ringattn {

// A CacheView of writable memory.
struct MutableCacheView {
  void* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  std::int64_t pages = 0;
  std::int64_t page_size = 0;  // tokens
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  operator CacheView() const {
    return {data, dtype, pages, page_size, heads, dim, page_stride, token_stride, head_stride};
  }
};

// A contiguous [pages, page_size, heads, dim] array. A dense cache has one page per sequence.
inline MutableCacheView cache_view(void* data, Dtype dtype, std::int64_t pages, std::int64_t page_size,
                                   std::int64_t heads, std::int64_t dim) {
  return {data, dtype, pages, page_size, heads, dim, page_size * heads * dim, heads * dim, dim};
}

// A contiguous [pages, heads, page_size, dim] array.
inline MutableCacheView head_major_cache_view(void* data, Dtype dtype, std::int64_t pages, std::int64_t page_size,
                                              std::int64_t heads, std::int64_t dim) {
  return {data, dtype, pages, page_size, heads, dim, page_size * heads * dim, dim, page_size * dim};
}

// Whether the partition holds the key at `position`. `kv_split_keys` is the number of keys per KV split.
RINGATTN_HOST_DEVICE inline bool holds_key(const KvPartition& partition, std::int64_t kv_split_keys,
                                           std::int64_t position) {
  return position / kv_split_keys % partition.stride == partition.first;
}

// Token index, in the partition's cache, of the key at `position`, which the partition must hold.
RINGATTN_HOST_DEVICE inline std::int64_t token_of_key(const KvPartition& partition, std::int64_t kv_split_keys,
                                                      std::int64_t position) {
  return position / kv_split_keys / partition.stride * kv_split_keys + position % kv_split_keys;
}

// How many of a sequence's first `length` keys the partition holds.
RINGATTN_HOST_DEVICE inline std::int64_t keys_of_partition(const KvPartition& partition, std::int64_t kv_split_keys,
                                                           std::int64_t length) {
  const std::int64_t whole = length / kv_split_keys;
  // KV splits first, first + stride, … below `whole`.
  const std::int64_t full = whole <= partition.first ? 0 : (whole - partition.first - 1) / partition.stride + 1;
  return full * kv_split_keys + (whole % partition.stride == partition.first ? length % kv_split_keys : 0);
}

}  // namespace ringattn
