// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: 32-bit counters in host memory mapped to devices, which streams write and wait for.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace ringattn {

// True if `value` has reached `target`. Counters wrap around, and this compares them as the device's wait does.
inline bool has_reached(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}

// A counter that a stream or a CPU of this or another process increases. It has its own cache line.
struct alignas(64) Counter {
  std::atomic<std::uint32_t> value;

  std::uint32_t now() const { return value.load(std::memory_order_acquire); }
  bool reached(std::uint32_t target) const { return has_reached(now(), target); }
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// Maps the host addresses of counters to device addresses.
class CounterMap {
 public:
  CounterMap(const void* host, CUdeviceptr device) : host_(static_cast<const std::byte*>(host)), device_(device) {}

  CUdeviceptr address(const Counter& counter) const {
    return device_ + static_cast<CUdeviceptr>(reinterpret_cast<const std::byte*>(&counter) - host_);
  }

 private:
  const std::byte* host_;
  CUdeviceptr device_;
};

// Stream memory operations that a stream executes in order, enqueued in one call. A write becomes visible to all
// observers after all earlier work of its stream.
class MemoryOperations {
 public:
  explicit MemoryOperations(const CounterMap& map) : map_(map) {}

  void write(const Counter& counter, std::uint32_t value);
  // Waits until the counter has reached `value`.
  void wait(const Counter& counter, std::uint32_t value);
  // Throws if the driver rejects an operation.
  void enqueue(cudaStream_t stream);

 private:
  const CounterMap map_;
  std::vector<CUstreamBatchMemOpParams> operations_;
};

// Throws kUnsupported, with the reason, if this driver has no stream memory operations.
void check_memory_operations();

}  // namespace ringattn
