// SPDX-License-Identifier: Apache-2.0
#include "comm/p2p_memory.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "comm/p2p_driver.hpp"

namespace ringattn {

P2pAddress P2pExports::describe(const std::byte* data, std::size_t bytes) {
  if (bytes == 0) return {};
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const auto refuse = [&](std::string_view why) {
    fail(ErrorCode::kUsage, fmt::format("peers can't write to {} bytes at {}", bytes, fmt::ptr(data)), why,
         "Receive into memory of cudaMalloc.");
  };
  CUdeviceptr base = 0;
  std::size_t size = 0;
  if (driver().get_address_range(&base, &size, static_cast<CUdeviceptr>(address)) != CUDA_SUCCESS) {
    refuse("it is not device memory");
  }
  if (address + bytes > base + size) refuse("it reaches over the end of its allocation");
  std::uint64_t number = 0;
  check_driver(driver().get_pointer_attribute(&number, CU_POINTER_ATTRIBUTE_BUFFER_ID, base), "cuPointerGetAttribute");
  Allocation& allocation = allocations_[static_cast<std::uintptr_t>(base)];
  if (allocation.number != number) {  // new, or memory was freed and its address used again
    const DeviceGuard guard(device_);
    allocation = {};
    const cudaError_t result = cudaIpcGetMemHandle(&allocation.handle, reinterpret_cast<void*>(base));
    if (result != cudaSuccess) {
      cudaGetLastError();
      allocations_.erase(static_cast<std::uintptr_t>(base));
      refuse(cudaGetErrorString(result));
    }
    allocation.number = number;
  }
  return {allocation.handle, number, address - base, address};
}

P2pImports::~P2pImports() {
  for (auto& [key, mapping] : mappings_) cudaIpcCloseMemHandle(mapping.base);
}

std::byte* P2pImports::resolve(int peer, bool neighbour, const P2pAddress& place) {
  if (neighbour) return reinterpret_cast<std::byte*>(place.address);
  Mapping& mapping = mappings_[{peer, place.allocation}];
  if (mapping.base == nullptr) {
    const DeviceGuard guard(device_);
    void* base = nullptr;
    const cudaError_t result = cudaIpcOpenMemHandle(&base, place.handle, cudaIpcMemLazyEnablePeerAccess);
    if (result != cudaSuccess) {
      cudaGetLastError();
      mappings_.erase({peer, place.allocation});
      fail(ErrorCode::kUnsupported, fmt::format("memory of rank {} can't be mapped", peer), cudaGetErrorString(result),
           "Use --transport nccl.");
    }
    mapping.base = static_cast<std::byte*>(base);
  }
  mapping.last_use = ++uses_;
  return mapping.base + place.offset;
}

void P2pImports::release_old(int peer) {
  const auto of_peer = [peer](const auto& entry) { return entry.first.first == peer; };
  std::uint64_t newest = 0;
  for (const auto& entry : mappings_) {
    if (of_peer(entry)) newest = std::max(newest, entry.second.last_use);
  }
  for (auto entry = mappings_.begin(); entry != mappings_.end();) {
    if (of_peer(*entry) && entry->second.last_use != newest) {
      const DeviceGuard guard(device_);
      cudaIpcCloseMemHandle(entry->second.base);
      entry = mappings_.erase(entry);
    } else {
      ++entry;
    }
  }
}

}  // namespace ringattn
