// SPDX-License-Identifier: Apache-2.0
// Tensors in a backend's kind of memory, dense or strided, for runners of kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/common/backend.hpp"
#include "tests/support/poison.hpp"

namespace ringattn::testing {

inline void wait_for(Backend& backend) { backend.synchronize({}, Deadline::after(60.0), {}); }

// Bytes in the backend's kind of memory.
class Bytes {
 public:
  Bytes(Backend& backend, std::size_t size)
      : backend_(backend), buffer_(backend.allocate(std::max<std::size_t>(size, 1))), size_(size) {
    backend_.fill_bytes(buffer_.data(), kPoison, size, {});
    wait_for(backend_);
  }
  Bytes(Backend& backend, const std::vector<std::byte>& bytes)
      : backend_(backend), buffer_(backend.allocate(std::max<std::size_t>(bytes.size(), 1))), size_(bytes.size()) {
    write(bytes);
  }

  void write(const std::vector<std::byte>& bytes) {
    const auto size = static_cast<std::int64_t>(bytes.size());
    backend_.copy_rows(buffer_.data(), size, bytes.data(), size, size, 1, {});
    wait_for(backend_);
  }
  std::vector<std::byte> read() const {
    std::vector<std::byte> bytes(size_);
    const auto size = static_cast<std::int64_t>(size_);
    backend_.copy_rows(bytes.data(), size, buffer_.data(), size, size, 1, {});
    wait_for(backend_);
    return bytes;
  }
  std::byte* data() const { return buffer_.data(); }

 private:
  Backend& backend_;
  Buffer buffer_;
  std::size_t size_;
};

// Layout of elements of [tokens, heads, dim]: dense, or with padding after each head and each token, or at odd
// elements.
struct Lattice {
  std::int64_t shift;  // of the first
  std::int64_t token;
  std::int64_t head;

  std::size_t at(std::int64_t token_index, std::int64_t head_index) const {
    return static_cast<std::size_t>(shift + token_index * token + head_index * head);
  }
  std::size_t size(std::int64_t tokens) const { return static_cast<std::size_t>(shift + tokens * token); }
};
inline Lattice lattice_of(bool strided, bool odd, std::int64_t heads, std::int64_t dim) {
  const std::int64_t gap = (strided ? 16 : 0) + (odd ? 2 : 0);
  return {odd ? 1 : 0, heads * (dim + gap) + (strided ? 24 : 0), dim + gap};
}

// A tensor in the backend's memory.
struct PlacedTensor {
  Bytes bytes;
  TensorView view;
};
inline PlacedTensor place(Backend& backend, const std::vector<std::byte>& host, const Lattice& lattice, Dtype dtype,
                          std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  PlacedTensor placed{Bytes(backend, host), {}};
  placed.view = {placed.bytes.data() + static_cast<std::size_t>(lattice.shift) * size_of(dtype),
                 dtype,
                 tokens,
                 heads,
                 dim,
                 lattice.token,
                 lattice.head};
  return placed;
}

// Dense rows, moved apart.
inline std::vector<std::byte> spread(const std::vector<std::byte>& dense, const Lattice& lattice, std::size_t element,
                                     std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  std::vector<std::byte> host(lattice.size(tokens) * element, kPoison);
  const std::size_t row = static_cast<std::size_t>(dim) * element;
  for (std::int64_t i = 0; i < tokens * heads; ++i) {
    std::memcpy(host.data() + lattice.at(i / heads, i % heads) * element,
                dense.data() + static_cast<std::size_t>(i) * row, row);
  }
  return host;
}

}  // namespace ringattn::testing
