// SPDX-License-Identifier: Apache-2.0
// Work that keeps a stream waiting. For tests that link ringattn_cuda.
#pragma once

#include <atomic>
#include <cstdlib>
#include <thread>

#include "base/cuda.hpp"
#include "base/deadline.hpp"
#include "base/gpu.hpp"

namespace ringattn::testing {

// Whether other streams continue while one is held. A held stream also blocks its hardware queue. A GPU has 8 of these,
// unless the environment says otherwise, and assigns them to streams cyclically.
inline bool streams_have_queues() {
  const char* queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return visible_gpus().size() > 1 || queues == nullptr || std::atoi(queues) >= 8;
}

// Holds a stream until it is released, or for 20 s.
class StreamBrake {
 public:
  void hold(cudaStream_t stream) {
    check_cuda(cudaLaunchHostFunc(
                   stream,
                   [](void* self) {
                     const Deadline deadline = Deadline::after(20.0);
                     while (!static_cast<StreamBrake*>(self)->released_ && !deadline.expired()) {
                       std::this_thread::yield();
                     }
                   },
                   this),
               "cudaLaunchHostFunc");
  }
  void release() { released_ = true; }

 private:
  std::atomic<bool> released_{false};
};

}  // namespace ringattn::testing
