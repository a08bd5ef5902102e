// SPDX-License-Identifier: Apache-2.0
// Keys and values of a job in host memory, as they are compressed or lose tokens, and what stands beside them in a
// file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "attention/files/job_input.hpp"
#include "attention/files/safetensors_writer.hpp"
#include "base/tensor.hpp"
#include "kernels/row_format.hpp"

namespace ringattn {

// A tensor that is written as it is.
struct WholeTensor {
  OutputTensor tensor;
  std::vector<std::byte> bytes;
};

// Keys and values in rows, sequence by sequence.
struct CacheRows {
  RowShape k, v;
  RowGrid grid;  // of k in its file; v's has another dim
  std::vector<std::int64_t> lengths;
  std::vector<std::byte> k_rows, v_rows;
  std::vector<WholeTensor> others;  // what a job over the cache needs, by the names that it has here

  std::int64_t tokens() const;
  bool has(std::string_view name) const;  // among the others
};

// What of a file a job over its cache needs beside keys and values, by the names that it has here.
std::vector<WholeTensor> read_others(const SafetensorsFile& file, const InputNames& names);

std::size_t bytes_of(const RowShape& shape, std::int64_t tokens);
MutableTensorView view_of(std::vector<std::byte>& rows, const RowShape& shape, std::int64_t tokens);

// What refuses a cache by its shapes and lengths, before rows take memory: all but the rows and the others is there.
// `queries`: whether there are some.
using CacheCheck = std::function<void(const CacheRows& cache, bool queries)>;

// Reads k and v, and what stands beside them. Throws kFile for what can't be read, and for caches that are compressed
// or have lost tokens already, and what `check` throws. Synthetic rows are made by `threads` threads.
CacheRows read_cache(const InputRequest& input, int threads, const CacheCheck& check);

}  // namespace ringattn
