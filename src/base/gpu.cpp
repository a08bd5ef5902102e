// SPDX-License-Identifier: Apache-2.0
#include "base/gpu.hpp"

#include <fmt/format.h>

#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/device_timeouts.hpp"
#include "base/error.hpp"

#if defined(RINGATTN_HAVE_CUDA)
#include "base/cuda.hpp"
#endif

namespace ringattn {

#if defined(RINGATTN_HAVE_CUDA)

namespace {

struct Found {
  std::vector<Gpu> gpus;
  std::string why;  // why the list is empty
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
    int driver = 0;  // stays 0 without a driver, which CUDA reports as a driver that is too old
    const bool none =
        result == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    found.why = fmt::format("no GPU can be used: {}", none ? "no NVIDIA driver was found" : cudaGetErrorString(result));
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

// Live allocations, by address.
class Allocations {
 public:
  static Allocations& table() {
    static auto* const table = new Allocations;  // outlives every Buffer
    return *table;
  }

  std::shared_ptr<const DeviceAllocation> add(std::byte* base, std::size_t bytes, int device) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<const DeviceAllocation> allocation(new DeviceAllocation{++last_id_, base, bytes, device},
                                                       [this](const DeviceAllocation* dead) { remove(dead); });
    by_address_[base] = allocation;
    return allocation;
  }

  std::shared_ptr<const DeviceAllocation> find(const std::byte* data, std::size_t bytes) {
    // Declared before the lock: this may be the last reference, and its deleter locks the mutex.
    std::shared_ptr<const DeviceAllocation> found;
    const std::lock_guard lock(mutex_);
    const auto after = by_address_.upper_bound(data);
    if (after == by_address_.begin()) return nullptr;
    found = std::prev(after)->second.lock();
    if (found == nullptr) return nullptr;
    const auto offset = static_cast<std::size_t>(data - found->base);
    return offset <= found->bytes && bytes <= found->bytes - offset ? found : nullptr;
  }

 private:
  void remove(const DeviceAllocation* dead) {
    {
      // Before the memory is freed: its address may be reused at once.
      const std::lock_guard lock(mutex_);
      by_address_.erase(dead->base);
    }
    cudaFree(dead->base);
    delete dead;
  }

  std::mutex mutex_;
  std::uint64_t last_id_ = 0;
  std::map<const std::byte*, std::weak_ptr<const DeviceAllocation>, std::less<>> by_address_;
};

MessageTemplate how_to_need_less() {
  return {"Use more GPUs or fewer tokens; for attention a smaller ", setting("block"),
          " makes the buffers of blocks smaller."};
}

}  // namespace

void check_cuda(cudaError_t result, std::string_view call) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // clears the error, unless the context itself is broken
  const std::string why = fmt::format("{}: {}", cudaGetErrorName(result), cudaGetErrorString(result));
  switch (result) {
    case cudaErrorMemoryAllocation:
      fail(ErrorCode::kMemory, fmt::format("{} failed", call), why, how_to_need_less());
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNotSupported:
      fail(ErrorCode::kUnsupported, fmt::format("{} failed", call), why, {"See ", command("info"), "."});
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
         fmt::format("{} of {} bytes are free", memory.free, memory.total), how_to_need_less());
  }
  check_cuda(result, "cudaMalloc");
  auto allocation = Allocations::table().add(static_cast<std::byte*>(data), bytes, device);
  return {static_cast<std::byte*>(data), bytes, MemoryKind::kDevice,
          [allocation = std::move(allocation)](std::byte*) mutable { allocation.reset(); }};
}

void await_stream(cudaStream_t stream, const Deadline& deadline) {
  CudaEvent end;
  end.record(stream);
  while (!end.passed()) {
    DeviceTimeouts::check(deadline, "no other rank has a part in it");
    std::this_thread::yield();
  }
}

Buffer allocate_cleared_device(std::size_t bytes, int device) {
  Buffer cleared = allocate_device(bytes, device);
  const DeviceGuard guard(device);
  const CudaStream own;
  check_cuda(cudaMemsetAsync(cleared.data(), 0, bytes, own.get()), "cudaMemsetAsync");
  await_stream(own.get(), DeviceTimeouts::for_short_work());
  return cleared;
}

std::shared_ptr<const DeviceAllocation> find_device_allocation(const void* data, std::size_t bytes) {
  return Allocations::table().find(static_cast<const std::byte*>(data), bytes);
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

MessageTemplate how_to_do_without() { return {"Use ", setting("backend", "cpu"), ", or a build with CUDA."}; }

}  // namespace

std::span<const Gpu> visible_gpus() { return {}; }

std::string gpus_unavailable() { return kNoCuda; }

Buffer allocate_device(std::size_t bytes, int device) {
  fail(ErrorCode::kUnsupported, fmt::format("can't allocate {} bytes on GPU {}", bytes, device), kNoCuda,
       how_to_do_without());
}

std::shared_ptr<const DeviceAllocation> find_device_allocation(const void*, std::size_t) { return nullptr; }

Buffer allocate_pinned(std::size_t bytes) { return allocate_host(bytes); }

GpuMemory gpu_memory(int device) {
  fail(ErrorCode::kUnsupported, fmt::format("there is no GPU {}", device), kNoCuda, how_to_do_without());
}

#endif

}  // namespace ringattn
