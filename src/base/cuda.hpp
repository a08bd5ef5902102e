// SPDX-License-Identifier: Apache-2.0
// RAII wrappers of CUDA handles, and CUDA errors as Error. Only kernels/ and the device transports include it.
#pragma once

#include <cuda_runtime.h>

#include <string_view>
#include <utility>

#include "base/deadline.hpp"
#include "base/memory.hpp"

namespace ringattn {

// Throws kMemory, kUnsupported or kInternal with CUDA's own text unless `result` is cudaSuccess.
void check_cuda(cudaError_t result, std::string_view call);

// Makes `device` current in this thread, and restores the previous device at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device) return;
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    moved_ = true;
  }
  ~DeviceGuard() {
    if (moved_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool moved_ = false;
};

// A stream of the current device that does not synchronize with the legacy default stream.
class CudaStream {
 public:
  CudaStream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~CudaStream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  CudaStream(CudaStream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  CudaStream& operator=(CudaStream&&) = delete;

  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// An event of the current device. Only `timed` events measure elapsed time.
class CudaEvent {
 public:
  explicit CudaEvent(bool timed = false) {
    check_cuda(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming), "cudaEventCreate");
  }
  ~CudaEvent() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  CudaEvent(CudaEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  CudaEvent& operator=(CudaEvent&&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  // True once all work recorded before the event is complete. Throws the device's error.
  bool passed() const {
    const cudaError_t result = cudaEventQuery(event_);
    if (result == cudaErrorNotReady) return false;
    check_cuda(result, "cudaEventQuery");
    return true;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Returns when `stream`, which belongs to the current device, has finished all work enqueued on it. `deadline` comes
// from DeviceTimeouts. Throws kPeer once it has passed, and throws the device's error.
void await_stream(cudaStream_t stream, const Deadline& deadline);

// As allocate_device(). The memory is zeroed before the call returns, so every stream sees zeros.
Buffer allocate_cleared_device(std::size_t bytes, int device);

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace ringattn
