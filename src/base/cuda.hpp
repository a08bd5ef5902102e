// SPDX-License-Identifier: Apache-2.0
// CUDA's objects with owners, and its errors as Error. For kernels/ and for device transports; nobody else includes it.
#pragma once

#include <cuda_runtime.h>

#include <string_view>
#include <utility>

#include "base/deadline.hpp"
#include "base/memory.hpp"

namespace ringattn {

// Throws kMemory, kUnsupported or kInternal with CUDA's own text unless `result` is cudaSuccess.
void check_cuda(cudaError_t result, std::string_view call);

// Makes `device` current in this thread, and what was current before it again at the end.
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

// A queue of the current device that does not wait for the legacy default stream.
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

// A point in a queue of the current device; `timed` ones can be subtracted.
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
  // Whether everything before the point is done. Throws what the device failed with.
  bool passed() const {
    const cudaError_t result = cudaEventQuery(event_);
    if (result == cudaErrorNotReady) return false;
    check_cuda(result, "cudaEventQuery");
    return true;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Returns when `stream`, of the current device, has passed what was enqueued on it. `deadline`: one of DeviceTimeouts.
// Throws kPeer past it, and what the device failed with.
void await_stream(cudaStream_t stream, const Deadline& deadline);

// As allocate_device(), of bytes that are 0 for every stream.
Buffer allocate_cleared_device(std::size_t bytes, int device);

inline cudaStream_t cuda_stream(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace ringattn
