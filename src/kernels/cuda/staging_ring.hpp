// SPDX-License-Identifier: Apache-2.0
// Small tables on their way to a device: pinned host memory with a device twin, in slots. A slot is free again when the
// stream has passed the kernel that reads it, and keeps its tables until next() gives it out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/cuda.hpp"
#include "kernels/attention.hpp"

namespace ringattn::cuda {

// Tasks that are not prepared pass through these: a host that is this many of them ahead of the device waits.
inline constexpr std::size_t kStagingSlots = 4;

class StagingRing {
 public:
  // kStagingSlots slots of `bytes`; slots are kept where they are large enough already.
  void reserve(std::size_t bytes, int device);

  // The host memory of the slot whose last use is the longest ago. A caller that is further ahead than the ring has
  // slots waits here for the oldest task, and `progress` is called meanwhile.
  std::span<std::byte> next(const Progress& progress);
  // The slot that next() or again() named last: what the other calls speak of.
  std::size_t current() const { return current_; }
  // Enqueues the copy of the slot's first `bytes`; returns where they will be on the device.
  std::byte* upload(std::size_t bytes, cudaStream_t stream);
  // What the slot was last uploaded with, once more: `stream` waits for those who read it before.
  std::byte* again(std::size_t slot, cudaStream_t stream);
  // Says that everything which reads the slot is enqueued.
  void release(cudaStream_t stream);

 private:
  struct Slot {
    Buffer host;
    Buffer device;
    CudaEvent read;
    std::uint64_t used = 0;  // when, counted in uses
  };
  std::vector<Slot> slots_;
  std::size_t current_ = 0;
  std::uint64_t uses_ = 0;
};

}  // namespace ringattn::cuda
