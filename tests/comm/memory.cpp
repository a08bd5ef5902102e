// SPDX-License-Identifier: Apache-2.0
#include "tests/comm/memory.hpp"

#include <cstring>

#include "base/gpu.hpp"
#if defined(RINGATTN_HAVE_CUDA)
#include "base/cuda.hpp"
#endif

namespace ringattn::testing {

namespace {

void copy_by_stream([[maybe_unused]] void* target, [[maybe_unused]] const void* source,
                    [[maybe_unused]] std::size_t bytes) {
#if defined(RINGATTN_HAVE_CUDA)
  const cudaStream_t stream = cuda_stream(rank_stream());
  check_cuda(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
#endif
}

}  // namespace

Stream& rank_stream() {
  thread_local Stream stream;
  return stream;
}

#if defined(RINGATTN_HAVE_CUDA)
SideStream::SideStream(const Transport& world) {
  if (world.memory() != MemoryKind::kDevice) return;
  const DeviceGuard guard(world.device());
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = Stream{stream};
}
SideStream::~SideStream() {
  if (cuda_stream(stream_) != nullptr) cudaStreamDestroy(cuda_stream(stream_));
}
void SideStream::land() const {
  if (cuda_stream(stream_) != nullptr) check_cuda(cudaStreamSynchronize(cuda_stream(stream_)), "cudaStreamSynchronize");
}
#else
SideStream::SideStream(const Transport&) {}
SideStream::~SideStream() = default;
void SideStream::land() const {}
#endif

Memory::Memory(const Transport& world, const Bytes& content)
    : buffer_(world.memory() == MemoryKind::kDevice ? allocate_device(content.size(), world.device())
                                                    : allocate_host(content.size())) {
  write(content);
}

void Memory::write(const Bytes& content) const {
  if (buffer_.kind() == MemoryKind::kDevice) {
    copy_by_stream(buffer_.data(), content.data(), content.size());
  } else if (!content.empty()) {
    std::memcpy(buffer_.data(), content.data(), content.size());
  }
}

Bytes Memory::read() const {
  Bytes content(buffer_.bytes());
  if (buffer_.kind() == MemoryKind::kDevice) {
    copy_by_stream(content.data(), buffer_.data(), content.size());
  } else if (!content.empty()) {
    std::memcpy(content.data(), buffer_.data(), content.size());
  }
  return content;
}

}  // namespace ringattn::testing
