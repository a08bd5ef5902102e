// SPDX-License-Identifier: Apache-2.0
// Bytes in a backend's memory, written and read by synchronous copies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention/attention.hpp"

namespace ringattn::testing {

class DeviceArray {
 public:
  // Filled with 0xff: NaN in every dtype.
  DeviceArray(Backend& backend, std::size_t size) : backend_(backend), buffer_(backend.allocate(size)), size_(size) {
    clear();
  }

  DeviceArray(Backend& backend, const std::vector<std::byte>& bytes)
      : backend_(backend), buffer_(backend.allocate(std::max<std::size_t>(bytes.size(), 1))), size_(bytes.size()) {
    write(bytes);
  }

  void clear() {
    backend_.fill_bytes(buffer_.data(), std::byte{0xff}, size_, backend_.stream());
    wait();
  }

  void write(const std::vector<std::byte>& bytes) { copy(buffer_.data(), bytes.data(), bytes.size()); }
  std::vector<std::byte> read() const {
    std::vector<std::byte> bytes(size_);
    copy(bytes.data(), buffer_.data(), size_);
    return bytes;
  }
  std::vector<float> read_floats() const {
    std::vector<float> values(size_ / sizeof(float));
    copy(values.data(), buffer_.data(), size_);
    return values;
  }

  std::byte* data() const { return buffer_.data(); }
  float* floats() const { return reinterpret_cast<float*>(buffer_.data()); }

 private:
  void copy(void* target, const void* source, std::size_t size) const {
    const auto bytes = static_cast<std::int64_t>(size);
    backend_.copy_rows(target, bytes, source, bytes, bytes, 1, backend_.stream());
    wait();
  }
  void wait() const { backend_.synchronize(backend_.stream(), Deadline::after(60.0), {}); }

  Backend& backend_;
  Buffer buffer_;
  std::size_t size_;
};

}  // namespace ringattn::testing
