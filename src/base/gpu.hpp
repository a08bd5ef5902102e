// SPDX-License-Identifier: Apache-2.0
// The GPUs that this process sees, and memory that they can reach. Without CUDA in the build, or without a driver,
// there are none, and gpus_unavailable() says why.
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
  std::string uuid;       // tells GPUs apart across processes and hosts
  int compute_major = 0;  // compute capability
  int compute_minor = 0;
  int multiprocessors = 0;
  std::size_t memory = 0;  // bytes
};

// In the order of CUDA's indices. The first call starts the driver, but makes no context.
std::span<const Gpu> visible_gpus();

// Why there are none; empty: there are.
std::string gpus_unavailable();

// Plain memory of a device (cudaMalloc), aligned to 256 bytes; other processes can map it. Throws kMemory when the
// device has no more, kUnsupported where there is no such device.
Buffer allocate_device(std::size_t bytes, int device);

// What allocate_device() has given out. It lives as long as somebody holds it: the Buffer, and transports whose peers
// have mapped it, for memory must not go back to the device under a peer's mapping.
struct DeviceAllocation {
  std::uint64_t id = 0;  // of this process, and never used again, as addresses are
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  int device = 0;
};

// The allocation of allocate_device() that the `bytes` at `data` lie in; nullptr if there is none.
std::shared_ptr<const DeviceAllocation> find_device_allocation(const void* data, std::size_t bytes);

// Host memory that devices copy from and to without the host's help. Throws kMemory.
Buffer allocate_pinned(std::size_t bytes);

struct GpuMemory {
  std::size_t free = 0;  // bytes, of the whole device, whoever uses the rest
  std::size_t total = 0;
};
GpuMemory gpu_memory(int device);

}  // namespace ringattn
