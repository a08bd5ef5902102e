// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: 32-bit words that streams write and wait for, in host memory that devices reach.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace ringattn {

// Counters go round: `value` has come to `target` or past it, as the device's wait compares them.
inline bool has_reached(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}

// A word that a stream or a CPU, of this or another process, counts up. Alone on its cache line.
struct alignas(64) Counter {
  std::atomic<std::uint32_t> value;

  std::uint32_t now() const { return value.load(std::memory_order_acquire); }
  bool reached(std::uint32_t target) const { return has_reached(now(), target); }
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// Host memory and its address on the device: counters are named by their host address.
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

// Operations that a stream carries out in order, handed to it in one call. A write comes after everything before it in
// its stream, for all who can see the word.
class MemoryOperations {
 public:
  explicit MemoryOperations(const CounterMap& map) : map_(map) {}

  void write(const Counter& counter, std::uint32_t value);
  // Until the counter has reached `value`.
  void wait(const Counter& counter, std::uint32_t value);
  // Throws where the driver refuses.
  void enqueue(cudaStream_t stream);

 private:
  const CounterMap map_;
  std::vector<CUstreamBatchMemOpParams> operations_;
};

// Throws kUnsupported, with the reason, where this driver's streams can't write and wait.
void check_memory_operations();

}  // namespace ringattn
