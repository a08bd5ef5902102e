// SPDX-License-Identifier: Apache-2.0
#include "comm/p2p_flags.hpp"

#include <cuda.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <random>

#include "base/error.hpp"
#include "comm/p2p_driver.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kLine = 64;  // a counter has a cache line of its own
constexpr std::size_t kKinds = 4;
constexpr std::size_t kMostOperations = 256;  // of one batch, by the driver's documentation

std::string random_name() {
  std::random_device device;
  return fmt::format("/ringattn-{}-{:08x}{:08x}", ::getpid(), device(), device());
}

[[noreturn]] void fail_segment(std::string_view what) {
  fail(ErrorCode::kUnsupported, fmt::format("shared memory for flags can't be {}", what), std::strerror(errno),
       "Is /dev/shm there, and the same for all ranks?");
}

}  // namespace

P2pFlags::P2pFlags(Bootstrap& world, int device, const Deadline& deadline) : size_(world.size()), device_(device) {
  std::optional<Error> error;
  const auto attempt = [&error](const auto& step) {
    try {
      if (!error) step();
    } catch (const Error& caught) {
      error = caught;
    }
  };
  std::string name;
  if (world.rank() == 0) {
    name = random_name();
    attempt([&] { create(name); });
  }
  name = world.all_gather(name, deadline).front();
  agree(world, error ? &*error : nullptr, deadline);
  if (world.rank() != 0) {
    attempt([&] {
      const int file = ::shm_open(name.c_str(), O_RDWR, 0600);
      if (file < 0) fail_segment("opened");
      map(file);
    });
  }
  world.barrier(deadline);  // the name is needed until all have mapped the segment, or failed to
  if (world.rank() == 0) ::shm_unlink(name.c_str());
  attempt([&] {
    const DeviceGuard guard(device_);
    check_cuda(cudaHostRegister(host_, bytes(), cudaHostRegisterMapped | cudaHostRegisterPortable), "cudaHostRegister");
    void* there = nullptr;
    check_cuda(cudaHostGetDevicePointer(&there, host_, 0), "cudaHostGetDevicePointer");
    on_device_ = static_cast<std::byte*>(there);
  });
  try {
    agree(world, error ? &*error : nullptr, deadline);
  } catch (...) {
    release();
    throw;
  }
}

P2pFlags::~P2pFlags() { release(); }

void P2pFlags::release() noexcept {
  if (on_device_ != nullptr) cudaHostUnregister(host_);
  on_device_ = nullptr;
  if (host_ != nullptr) ::munmap(host_, bytes());
  host_ = nullptr;
}

std::size_t P2pFlags::index(P2pFlag flag, int from, int to) const {
  const auto ranks = static_cast<std::size_t>(size_);
  return ((static_cast<std::size_t>(flag) * ranks + static_cast<std::size_t>(from)) * ranks +
          static_cast<std::size_t>(to)) *
         kLine;
}

std::size_t P2pFlags::bytes() const {
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t all = kKinds * static_cast<std::size_t>(size_) * static_cast<std::size_t>(size_) * kLine;
  return (all + page - 1) / page * page;
}

void P2pFlags::create(const std::string& name) {
  const int file = ::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0) fail_segment("made");
  if (::ftruncate(file, static_cast<off_t>(bytes())) != 0) {  // zeros: every counter starts at 0
    const int why = errno;
    ::close(file);
    ::shm_unlink(name.c_str());
    errno = why;
    fail_segment("sized");
  }
  map(file);
}

void P2pFlags::map(int file) {
  void* memory = ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int why = errno;
  ::close(file);
  errno = why;
  if (memory == MAP_FAILED) fail_segment("mapped");
  host_ = static_cast<std::byte*>(memory);
}

std::uint32_t P2pFlags::read(P2pFlag flag, int from, int to) const {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(host_ + index(flag, from, to)))
      .load(std::memory_order_acquire);
}

void P2pFlags::write(P2pFlag flag, int from, int to, std::uint32_t value) {
  std::atomic_ref(*reinterpret_cast<std::uint32_t*>(host_ + index(flag, from, to)))
      .store(value, std::memory_order_release);
}

void P2pFlags::enqueue(const std::vector<Operation>& operations, cudaStream_t stream) const {
  std::vector<CUstreamBatchMemOpParams> batch;
  for (std::size_t first = 0; first < operations.size(); first += kMostOperations) {
    batch.clear();
    const std::size_t end = std::min(operations.size(), first + kMostOperations);
    for (std::size_t i = first; i < end; ++i) {
      const Operation& operation = operations[i];
      const auto address =
          reinterpret_cast<CUdeviceptr>(on_device_ + index(operation.flag, operation.from, operation.to));
      CUstreamBatchMemOpParams& params = batch.emplace_back();
      std::memset(&params, 0, sizeof params);
      if (operation.wait) {
        params.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        params.waitValue.address = address;
        params.waitValue.value = operation.value;
        params.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
      } else {
        params.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        params.writeValue.address = address;
        params.writeValue.value = operation.value;
        params.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
      }
    }
    check_driver(driver().stream_batch_mem_op(stream, static_cast<unsigned>(batch.size()), batch.data(), 0),
                 "cuStreamBatchMemOp");
  }
}

}  // namespace ringattn
