// SPDX-License-Identifier: Apache-2.0
// Stages small tables for upload: slots of pinned host memory, each with a device buffer. A slot is free again when the
// stream has passed the kernel that reads it. It keeps its tables until next() returns it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/cuda.hpp"
#include "kernels/attention/attention.hpp"

namespace ringattn::cuda {

// Slots for tasks that are not prepared. A host that is this many tasks ahead of the device waits.
inline constexpr std::size_t kStagingSlots = 4;

class StagingRing {
 public:
  // Allocates kStagingSlots slots of `bytes`. Existing slots are kept if they are large enough.
  void reserve(std::size_t bytes, int device);

  // Returns the host memory of the least recently used slot. If its last task is not done yet, waits for it and calls
  // `progress` meanwhile.
  std::span<std::byte> next(const Progress& progress);
  // The slot that next() or again() selected last. The other calls refer to it.
  std::size_t current() const { return current_; }
  // Enqueues the copy of the slot's first `bytes`. Returns their device address.
  std::byte* upload(std::size_t bytes, cudaStream_t stream);
  // Selects a slot whose upload is reused. `stream` waits for the slot's earlier readers.
  std::byte* again(std::size_t slot, cudaStream_t stream);
  // Call after everything that reads the slot is enqueued.
  void release(cudaStream_t stream);

 private:
  struct Slot {
    Buffer host;
    Buffer device;
    CudaEvent read;
    std::uint64_t used = 0;  // value of uses_ at the last release()
  };
  std::vector<Slot> slots_;
  std::size_t current_ = 0;
  std::uint64_t uses_ = 0;
};

}  // namespace ringattn::cuda
