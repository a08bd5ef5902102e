// SPDX-License-Identifier: Apache-2.0
// Caches that are written to, and which of a sequence's keys a share of one holds. How they are read stands in
// decode.hpp.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/host_device.hpp"
#include "kernels/decode.hpp"

namespace ringattn {

// CacheView of memory that new rows are written to.
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

// A contiguous [pages, page_size, heads, dim] array. A dense cache of sequences is one with a page for each of them.
inline MutableCacheView cache_view(void* data, Dtype dtype, std::int64_t pages, std::int64_t page_size,
                                   std::int64_t heads, std::int64_t dim) {
  return {data, dtype, pages, page_size, heads, dim, page_size * heads * dim, heads * dim, dim};
}

// A contiguous [pages, heads, page_size, dim] array.
inline MutableCacheView head_major_cache_view(void* data, Dtype dtype, std::int64_t pages, std::int64_t page_size,
                                              std::int64_t heads, std::int64_t dim) {
  return {data, dtype, pages, page_size, heads, dim, page_size * heads * dim, dim, page_size * dim};
}

// Whether the share has the key at `position`; `kv_split_keys` is a group's number of keys.
RINGATTN_HOST_DEVICE inline bool holds_key(const KvPartition& partition, std::int64_t kv_split_keys,
                                           std::int64_t position) {
  return position / kv_split_keys % partition.stride == partition.first;
}

// Where the share has the key at `position`, which it holds: its token in a cache of the share.
RINGATTN_HOST_DEVICE inline std::int64_t token_of_key(const KvPartition& partition, std::int64_t kv_split_keys,
                                                      std::int64_t position) {
  return position / kv_split_keys / partition.stride * kv_split_keys + position % kv_split_keys;
}

// How many of a sequence's first `length` keys the share holds.
RINGATTN_HOST_DEVICE inline std::int64_t keys_of_partition(const KvPartition& partition, std::int64_t kv_split_keys,
                                                           std::int64_t length) {
  const std::int64_t whole = length / kv_split_keys;
  // Groups first, first + every, … below `whole`.
  const std::int64_t full = whole <= partition.first ? 0 : (whole - partition.first - 1) / partition.stride + 1;
  return full * kv_split_keys + (whole % partition.stride == partition.first ? length % kv_split_keys : 0);
}

}  // namespace ringattn
