// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_communicator.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/cuda.hpp"
#include "comm/failure.hpp"

namespace ringattn {

namespace {

// How long NCCL gets to leave; its threads may hang with those of a dead peer.
constexpr double kLeaveSeconds = 5.0;

// Multicast is of no use here, and programs that use it have put hosts' GPUs out of service.
void keep_multicast_off() {
  static std::once_flag once;
  std::call_once(once, [] { ::setenv("NCCL_NVLS_ENABLE", "0", 0); });
}

// Runs calls of NCCL that have no deadline on a thread of their own; calls `meanwhile` until they are done. False when
// the deadline passed first: the thread is then left alone with what it holds.
bool run_aside(int device, const Deadline& deadline, std::function<void()> calls,
               const std::function<void()>& meanwhile) {
  const auto task = std::make_shared<std::packaged_task<void()>>([device, calls = std::move(calls)] {
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    calls();
  });
  std::future<void> done = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  while (done.wait_for(std::chrono::microseconds(100)) != std::future_status::ready) {
    if (deadline.expired()) return false;
    meanwhile();
  }
  done.get();
  return true;
}

void check_nccl(ncclResult_t result, std::string_view call, ncclComm_t communicator) {
  if (result == ncclSuccess) return;
  const char* last = ncclGetLastError(communicator);
  const bool remote = result == ncclRemoteError || result == ncclSystemError;
  fail(remote ? ErrorCode::kPeer : ErrorCode::kInternal, fmt::format("{} failed", call),
       fmt::format("{}{}{}", ncclGetErrorString(result), last == nullptr || *last == '\0' ? "" : ": ",
                   last == nullptr ? "" : last),
       "NCCL_DEBUG=WARN says more.");
}

// A byte from everyone to everyone. NCCL connects two ranks when they first use the connection, and waits for both:
// afterwards none of its calls waits for a peer.
void connect(ncclComm_t communicator, int rank, int size) {
  const CudaStream stream;
  void* bytes = nullptr;
  check_cuda(cudaMalloc(&bytes, 2 * static_cast<std::size_t>(size)), "cudaMalloc");
  const std::unique_ptr<void, cudaError_t (*)(void*)> owner(bytes, cudaFree);
  const auto at = [&](int index) { return static_cast<std::byte*>(bytes) + index; };
  check_nccl(ncclGroupStart(), "ncclGroupStart", communicator);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    check_nccl(ncclRecv(at(peer), 1, ncclInt8, peer, communicator, stream.get()), "ncclRecv", communicator);
    check_nccl(ncclSend(at(size + peer), 1, ncclInt8, peer, communicator, stream.get()), "ncclSend", communicator);
  }
  check_nccl(ncclGroupEnd(), "ncclGroupEnd", communicator);
  check_cuda(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
}

}  // namespace

NcclCommunicator::NcclCommunicator(Transport& control, int device, const NcclOptions& options, const Deadline& deadline)
    : device_(device) {
  keep_multicast_off();
  ncclUniqueId id{};
  do_together(control, deadline, [&] {
    if (control.rank() == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr);
  });
  const std::string theirs = control.all_gather(std::string_view(id.internal, sizeof id.internal), deadline)[0];
  std::memcpy(id.internal, theirs.data(), sizeof id.internal);
  const auto join = [&] {
    const auto made = std::make_shared<ncclComm_t>(nullptr);  // of the thread, should it be left alone
    const auto calls = [made, id, options, rank = control.rank(), size = control.size()] {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
      check_nccl(ncclCommInitRankConfig(made.get(), size, id, rank, &config), "ncclCommInitRank", nullptr);
      connect(*made, rank, size);
    };
    if (!run_aside(device_, deadline, calls, [&] { control.progress(); })) {
      fail(ErrorCode::kPeer, fmt::format("NCCL did not join the ranks within {:g} s", deadline.seconds()),
           "a rank has not come, or its host can't be reached", "See NCCL_DEBUG=INFO.");
    }
    communicator_ = *made;
  };
  try {
    // Who waits for a rank that has failed already hears of it at the deadline only; agreeing takes longer than that.
    do_together(control, Deadline::after(2.0 * deadline.seconds()), join);
  } catch (...) {
    abort();
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() {
  if (communicator_ == nullptr) return;
  try {
    run_aside(
        device_, Deadline::after(kLeaveSeconds), [communicator = communicator_] { ncclCommDestroy(communicator); },
        [] {});
  } catch (...) {
    // No thread to be had: the process's end takes the communicator along.
  }
}

void NcclCommunicator::abort() noexcept {
  if (communicator_ == nullptr) return;
  try {
    run_aside(
        device_, Deadline::after(kLeaveSeconds), [communicator = communicator_] { ncclCommAbort(communicator); },
        [] {});
  } catch (...) {
    // As above.
  }
  communicator_ = nullptr;
}

void NcclCommunicator::check_alive() const {
  ncclResult_t state = ncclSuccess;
  check(ncclCommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError");
  check(state, "NCCL");
}

void NcclCommunicator::check(ncclResult_t result, std::string_view call) const {
  check_nccl(result, call, communicator_);
}

}  // namespace ringattn
