// SPDX-License-Identifier: Apache-2.0
// Keys and values of a job in host memory, as they are compressed or lose tokens, and what stands beside them in a
// file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/tensor.hpp"
#include "io/input_names.hpp"
#include "io/safetensors_writer.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/row_format.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/compression/finite_tensor.hpp"

namespace ringattn {

// A tensor that is written as it is.
struct WholeTensor {
  OutputTensor tensor;
  std::vector<std::byte> bytes;
  // Fills `target` with its bytes from `offset` on, both of whole rows of its last two axes; none: `bytes` has them.
  std::function<void(std::int64_t offset, std::span<std::byte> target)> read = {};
};

// Keys and values in rows, sequence by sequence.
struct CacheRows {
  std::string what;  // this is, for messages
  RowShape k, v;
  RowGrid grid;  // of k in its file; v's has another dim
  std::vector<std::int64_t> lengths;
  std::vector<std::byte> k_rows, v_rows;  // none, until they are read
  std::vector<WholeTensor> others;        // what a job over the cache needs, by the names that it has here
  UnreadTensors unread;                   // of its file
  // All rows of kK or kV, which an eviction shortens.
  std::function<std::vector<std::byte>(SyntheticTensor)> read;
  // Refuses (kFile) NaN and infinity in k and v, and with `compared` in q, by name and place. It takes no
  // memory to speak of.
  std::function<void(bool compared)> check_finite;

  std::int64_t tokens() const;
  bool has(std::string_view name) const;  // among the others
};

// Tensors that a job over the file's cache needs besides keys and values, by their names in the file. They are read
// while they are written. The file must outlive them.
std::vector<WholeTensor> find_others(const SafetensorsFile& file, const InputNames& names);
// Tensors of the file that are neither among those nor `used`. `given`: the names that the caller gave, of which
// `names` were resolved.
UnreadTensors unread_beside(const SafetensorsFile& file, const InputNames& names, const InputNames& given,
                            std::vector<TensorSource> used);
// A tensor that is read as it is written.
WholeTensor stored_tensor(std::string_view name, const TensorSource& source);
// A tensor of these numbers.
template <class Number>
WholeTensor whole_tensor(std::string name, FileDtype dtype, std::vector<std::int64_t> shape,
                         const std::vector<Number>& numbers) {
  const auto bytes = std::as_bytes(std::span(numbers));
  return {{std::move(name), dtype, std::move(shape)}, {bytes.begin(), bytes.end()}};
}
// Instead of the one of its name, if there is one.
void replace_tensor(std::vector<WholeTensor>& tensors, WholeTensor with);
// As check_compared(), of the queries that there are.
void check_compared_queries(const SafetensorsFile& file, const InputNames& names);

std::size_t bytes_of(const RowShape& shape, std::int64_t tokens);
MutableTensorView view_of(std::vector<std::byte>& rows, const RowShape& shape, std::int64_t tokens);

// Finds k and v, and what stands beside them; rows are not read. Throws kFile for what can't be read, and for caches
// that are compressed or have lost tokens already. Synthetic rows are made by `threads` threads.
CacheRows find_cache_rows(const InputRequest& input, int threads);

// Where such an element of a tensor that lies as `grid` says is: its packed token, its head and its channel.
InvalidElement invalid_element_at(const NonFiniteElement& found, const RowGrid& grid);

// Refuses (kFile) keys or values of more heads or dims than any job has.
void check_extents(const TensorSource& tensor, const RowGrid& grid);

}  // namespace ringattn
