// SPDX-License-Identifier: Apache-2.0
// Files with a paged cache, and the same tokens as rows, for tests that compare the two.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "io/safetensors_writer.hpp"

namespace ringattn::testing {

// The seed gives the values for the packed tokens of all sequences. Slots of the pool without a token are NaN.
struct CacheShape {
  std::vector<std::int64_t> lengths{40, 0, 17, 65};
  std::vector<std::int64_t> q_lens{1, 1, 1, 1};  // written as cu_seqlens_q where they differ
  std::int64_t page_size = 16;
  std::int64_t spare_pages = 3;  // that no sequence owns
  bool head_major = false;
  int heads = 4;
  int kv_heads = 2;
  int head_dim = 16;
  int head_dim_v = 16;
  Dtype dtype = Dtype::kBf16;
  bool sinks = false;
  std::uint64_t seed = 7;
  bool wide_lengths = false;  // I64 instead of I32
  FileMetadata metadata = {};
};

// A tensor of a file, with its bytes.
struct NamedTensor {
  FileDtype dtype = FileDtype::kU8;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};
using NamedTensors = std::map<std::string, NamedTensor>;

// q, k_pages, v_pages, block_table, lengths_k and, if requested, cu_seqlens_q and sinks.
NamedTensors cache_tensors(const CacheShape& shape);
// q, k, v, cu_seqlens_q, cu_seqlens_k and, if requested, sinks.
NamedTensors row_tensors(const CacheShape& shape);

NamedTensor int_list(std::vector<std::int32_t> values, std::vector<std::int64_t> shape = {});
NamedTensor long_list(const std::vector<std::int64_t>& values);

// Returns the path.
std::string write_tensors(const std::string& path, const NamedTensors& tensors, const FileMetadata& metadata = {});
std::string write_cache(const std::string& path, const CacheShape& shape);

}  // namespace ringattn::testing
