// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/cuda/staging_ring.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/device_timeouts.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"

namespace ringattn::cuda {

void StagingRing::reserve(std::size_t bytes, int device) {
  if (!slots_.empty() && slots_.front().host.bytes() >= bytes) return;
  // Freeing a slot's memory waits for the device, so a slot that is still being read is safe.
  slots_.clear();
  std::vector<Slot> slots;
  for (std::size_t i = 0; i < kStagingSlots; ++i) {
    slots.push_back({allocate_pinned(bytes), allocate_device(bytes, device), CudaEvent()});
  }
  slots_ = std::move(slots);
}

std::span<std::byte> StagingRing::next(const Progress& progress) {
  if (slots_.empty()) fail(ErrorCode::kInternal, "an attention task came before reserve()");
  const auto oldest = std::ranges::min_element(slots_, {}, &Slot::used);
  current_ = static_cast<std::size_t>(oldest - slots_.begin());
  const Slot& slot = *oldest;
  if (!slot.read.passed()) {
    const Deadline deadline = DeviceTimeouts::for_queue();
    while (!slot.read.passed()) {
      if (progress) progress();  // tasks may wait for peers; a caller that watches the peers throws earlier
      DeviceTimeouts::check(deadline, fmt::format("{} tasks are enqueued", slots_.size()));
      std::this_thread::yield();
    }
  }
  return {slot.host.data(), slot.host.bytes()};
}

std::byte* StagingRing::upload(std::size_t bytes, cudaStream_t stream) {
  const Slot& slot = slots_[current_];
  check_cuda(cudaMemcpyAsync(slot.device.data(), slot.host.data(), bytes, cudaMemcpyHostToDevice, stream),
             "cudaMemcpyAsync");
  return slot.device.data();
}

std::byte* StagingRing::again(std::size_t slot, cudaStream_t stream) {
  current_ = slot;
  check_cuda(cudaStreamWaitEvent(stream, slots_[slot].read.get()), "cudaStreamWaitEvent");
  return slots_[slot].device.data();
}

void StagingRing::release(cudaStream_t stream) {
  Slot& slot = slots_[current_];
  slot.read.record(stream);
  slot.used = ++uses_;
}

}  // namespace ringattn::cuda
