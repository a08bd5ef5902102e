// SPDX-License-Identifier: Apache-2.0
// Owned host or device memory, and the handle of a device's stream.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace ringattn {

enum class MemoryKind { kHost, kDevice };

// Memory that is freed with the object. Host buffers are aligned to 4096 bytes.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::byte* data, std::size_t bytes, MemoryKind kind, std::function<void(std::byte*)> release)
      : data_(data, std::move(release)), bytes_(bytes), kind_(kind) {}

  std::byte* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }
  MemoryKind kind() const { return kind_; }

 private:
  std::unique_ptr<std::byte, std::function<void(std::byte*)>> data_{nullptr, [](std::byte*) {}};
  std::size_t bytes_ = 0;
  MemoryKind kind_ = MemoryKind::kHost;
};

// Uninitialized host memory. Throws kMemory with the size when the host refuses, or when all host buffers of this
// process together would exceed usable_bytes().
Buffer allocate_host(std::size_t bytes);

// From now on host buffers are not freed when they are destroyed, because work that can't be stopped may still read
// them. For a process that is about to end.
void keep_host_memory() noexcept;

// A device's stream (a cudaStream_t). Host backends and transports finish each call before they return and ignore it.
struct Stream {
  void* handle = nullptr;
};

}  // namespace ringattn
