// SPDX-License-Identifier: Apache-2.0
#include "comm/p2p/segment.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <random>

#include "base/cuda.hpp"
#include "comm/collective.hpp"
#include "comm/failure.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kPage = 4096;

std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

[[noreturn]] void fail_system(std::string_view call, const std::string& name, int error) {
  fail(ErrorCode::kUnsupported, fmt::format("{} {} failed", call, name), std::strerror(error),
       "See whether /dev/shm is mounted and has free space.");
}

class Descriptor {
 public:
  Descriptor(const std::string& name, int flags) : number_(shm_open(name.c_str(), flags, 0600)) {
    if (number_ < 0) fail_system("shm_open", name, errno);
  }
  ~Descriptor() { close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

// The name of the shared memory until all ranks have mapped it.
class SharedName {
 public:
  SharedName() = default;
  ~SharedName() {
    if (!text_.empty()) shm_unlink(text_.c_str());
  }
  SharedName(const SharedName&) = delete;
  SharedName& operator=(const SharedName&) = delete;
  void choose() {
    std::random_device random;
    text_ = fmt::format("/ringattn-{}-{:08x}{:08x}", getpid(), random(), random());
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::size_t counter_bytes(int size) {
  const auto ranks = static_cast<std::size_t>(size);
  return whole_pages(ranks * sizeof(RankCounters) + ranks * ranks * sizeof(PairCounters));
}

std::size_t segment_bytes(int size) {
  const auto ranks = static_cast<std::size_t>(size);
  return counter_bytes(size) + whole_pages(ranks * ranks * sizeof(Mailbox));
}

}  // namespace

std::size_t Mailbox::write(std::string_view bytes) {
  const std::uint64_t written = written_.load(std::memory_order_relaxed);
  const std::uint64_t free_bytes = kBytes - (written - read_.load(std::memory_order_acquire));
  const std::size_t count = std::min<std::size_t>(bytes.size(), free_bytes);
  for (std::size_t at = 0; at < count;) {
    const std::size_t position = (written + at) % kBytes;
    const std::size_t part_bytes = std::min(count - at, kBytes - position);
    std::memcpy(ring_ + position, bytes.data() + at, part_bytes);
    at += part_bytes;
  }
  written_.store(written + count, std::memory_order_release);
  return count;
}

bool Mailbox::read(std::string& bytes) {
  const std::uint64_t read = read_.load(std::memory_order_relaxed);
  const std::uint64_t written = written_.load(std::memory_order_acquire);
  if (read == written) return false;
  for (std::uint64_t at = read; at < written;) {
    const std::size_t position = at % kBytes;
    const std::size_t part_bytes = std::min<std::size_t>(written - at, kBytes - position);
    bytes.append(ring_ + position, part_bytes);
    at += part_bytes;
  }
  read_.store(written, std::memory_order_release);
  return true;
}

class P2pSegment::Mapping {
 public:
  // The memory starts zeroed, which is the initial value of all counters.
  Mapping(const std::string& name, bool create, int size) : bytes_(segment_bytes(size)) {
    const Descriptor file(name, create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR);
    const int refused = create ? posix_fallocate(file.number(), 0, static_cast<off_t>(bytes_)) : 0;
    if (refused != 0) fail_system("posix_fallocate", name, refused);
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file.number(), 0);
    if (memory_ == MAP_FAILED) fail_system("mmap", name, errno);
  }
  ~Mapping() {
    if (registered_) cudaHostUnregister(memory_);
    if (memory_ != MAP_FAILED) munmap(memory_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* memory() const { return static_cast<std::byte*>(memory_); }

  CUdeviceptr map_to_devices(std::size_t bytes) {
    check_cuda(cudaHostRegister(memory_, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped), "cudaHostRegister");
    registered_ = true;
    void* device = nullptr;
    check_cuda(cudaHostGetDevicePointer(&device, memory_, 0), "cudaHostGetDevicePointer");
    return reinterpret_cast<CUdeviceptr>(device);
  }

 private:
  const std::size_t bytes_;
  void* memory_ = MAP_FAILED;
  bool registered_ = false;
};

void P2pSegment::Unmap::operator()(Mapping* mapping) const { delete mapping; }

P2pSegment::P2pSegment(Bootstrap& control, const Deadline& deadline) : size_(control.size()) {
  const Collective collective(control, Timeouts::derived(deadline.seconds()));
  SharedName name;
  const auto map = [&](const std::string& text, bool create) { mapping_.reset(new Mapping(text, create, size_)); };
  collective.run_collectively([&] {
    if (control.rank() != 0) return;
    name.choose();
    map(name.text(), true);
  });
  const std::string shared = control.all_gather(name.text(), deadline)[0];
  collective.run_collectively([&] {
    if (control.rank() != 0) map(shared, false);
    map_.emplace(mapping_->memory(), mapping_->map_to_devices(counter_bytes(size_)));
  });
  ranks_ = reinterpret_cast<RankCounters*>(mapping_->memory());
  pairs_ = reinterpret_cast<PairCounters*>(ranks_ + size_);
  mailboxes_ = reinterpret_cast<Mailbox*>(mapping_->memory() + counter_bytes(size_));
}

}  // namespace ringattn
