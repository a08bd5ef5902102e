// SPDX-License-Identifier: Apache-2.0
// The GPUs that this process sees, and memory that they can access. Without CUDA in the build, or without a driver, the
// list is empty and gpus_unavailable() says why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/memory.hpp"

namespace ringattn {

struct Gpu {
  int device = 0;         // CUDA's index in this process
  std::string name;       // e.g. "NVIDIA H200"
  std::string uuid;       // identifies a GPU across processes and hosts
  int compute_major = 0;  // compute capability
  int compute_minor = 0;
  int multiprocessors = 0;
  std::size_t memory = 0;  // bytes
};

// In CUDA's device order. The first call initializes the driver but creates no context.
std::span<const Gpu> visible_gpus();

// Why visible_gpus() is empty; an empty string otherwise.
std::string gpus_unavailable();

// Device memory (cudaMalloc), aligned to 256 bytes. Other processes can map it. Throws kMemory when the device has no
// more, and kUnsupported if there is no such device.
Buffer allocate_device(std::size_t bytes, int device);

// Memory returned by allocate_device(). It lives as long as anything holds it: the Buffer, and transports whose peers
// have mapped it, because memory must not be freed while a peer has it mapped.
struct DeviceAllocation {
  std::uint64_t id = 0;  // unique in this process and never reused, unlike addresses
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  int device = 0;
};

// The allocation of allocate_device() that contains the `bytes` at `data`; nullptr if there is none.
std::shared_ptr<const DeviceAllocation> find_device_allocation(const void* data, std::size_t bytes);

// Pinned host memory, which devices access by DMA. Throws kMemory.
Buffer allocate_pinned(std::size_t bytes);

struct GpuMemory {
  std::size_t free = 0;  // bytes of the whole device that no process uses
  std::size_t total = 0;
};
GpuMemory gpu_memory(int device);

}  // namespace ringattn
