// SPDX-License-Identifier: Apache-2.0
#include "base/gpu.hpp"

#include <fmt/format.h>

#include <vector>

#include "base/error.hpp"

#if defined(RINGATTN_HAVE_CUDA)
#include "base/cuda.hpp"
#endif

namespace ringattn {

#if defined(RINGATTN_HAVE_CUDA)

namespace {

struct Found {
  std::vector<Gpu> gpus;
  std::string why;  // there are none
};

std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (const char byte : uuid.bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

Found find_gpus() {
  Found found;
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess) {
    cudaGetLastError();
    found.why = fmt::format("no GPU can be used: {}", cudaGetErrorString(result));
    return found;
  }
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    found.gpus.push_back({device, properties.name, uuid_text(properties.uuid), properties.major, properties.minor,
                          properties.multiProcessorCount, properties.totalGlobalMem});
  }
  if (count == 0) found.why = "this process sees no GPU";
  return found;
}

const Found& found_gpus() {
  static const Found found = find_gpus();
  return found;
}

}  // namespace

void check_cuda(cudaError_t result, std::string_view call) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // the next call starts clean, unless the context itself is broken
  const std::string why = fmt::format("{}: {}", cudaGetErrorName(result), cudaGetErrorString(result));
  switch (result) {
    case cudaErrorMemoryAllocation:
      fail(ErrorCode::kMemory, fmt::format("{} failed", call), why, "Use more ranks, or set --memory.");
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNotSupported:
      fail(ErrorCode::kUnsupported, fmt::format("{} failed", call), why, "See `ringattn info`.");
    default:
      fail(ErrorCode::kInternal, fmt::format("{} failed", call), why,
           "If the GPU is in order (nvidia-smi), please report it.");
  }
}

std::span<const Gpu> visible_gpus() { return found_gpus().gpus; }

std::string gpus_unavailable() { return found_gpus().why; }

Buffer allocate_device(std::size_t bytes, int device) {
  const DeviceGuard guard(device);
  void* data = nullptr;
  const cudaError_t result = cudaMalloc(&data, bytes == 0 ? 1 : bytes);
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    const GpuMemory memory = gpu_memory(device);
    fail(ErrorCode::kMemory, fmt::format("can't allocate {} bytes on GPU {}", bytes, device),
         fmt::format("{} of {} bytes are free", memory.free, memory.total), "Use more ranks, or set --memory.");
  }
  check_cuda(result, "cudaMalloc");
  return {static_cast<std::byte*>(data), bytes, MemoryKind::kDevice, [](std::byte* p) { cudaFree(p); }};
}

Buffer allocate_pinned(std::size_t bytes) {
  void* data = nullptr;
  const cudaError_t result = cudaHostAlloc(&data, bytes == 0 ? 1 : bytes, cudaHostAllocPortable);
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(ErrorCode::kMemory, fmt::format("can't pin {} bytes of host memory", bytes), "the system has no more to give",
         "Use more ranks, or raise the limit of locked memory.");
  }
  check_cuda(result, "cudaHostAlloc");
  return {static_cast<std::byte*>(data), bytes, MemoryKind::kHost, [](std::byte* p) { cudaFreeHost(p); }};
}

GpuMemory gpu_memory(int device) {
  const DeviceGuard guard(device);
  GpuMemory memory;
  check_cuda(cudaMemGetInfo(&memory.free, &memory.total), "cudaMemGetInfo");
  return memory;
}

#else

namespace {

constexpr const char* kNoCuda = "this build has no CUDA";

}  // namespace

std::span<const Gpu> visible_gpus() { return {}; }

std::string gpus_unavailable() { return kNoCuda; }

Buffer allocate_device(std::size_t bytes, int device) {
  fail(ErrorCode::kUnsupported, fmt::format("can't allocate {} bytes on GPU {}", bytes, device), kNoCuda);
}

Buffer allocate_pinned(std::size_t bytes) { return allocate_host(bytes); }

GpuMemory gpu_memory(int device) { fail(ErrorCode::kUnsupported, fmt::format("there is no GPU {}", device), kNoCuda); }

#endif

}  // namespace ringattn
