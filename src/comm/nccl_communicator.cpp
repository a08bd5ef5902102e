// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_communicator.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/cuda.hpp"
#include "base/failpoint.hpp"
#include "comm/collective.hpp"
#include "comm/failure.hpp"
#include "comm/nccl_calls.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

// How long NCCL may take to finalize or abort. Its threads may hang with those of a dead peer.
constexpr std::chrono::seconds kLeaveSeconds{5};

// NVLink multicast is of no use here, and programs that use it have left hosts' GPUs unusable.
void keep_multicast_off() {
  static std::once_flag once;
  std::call_once(once, [] { ::setenv("NCCL_NVLS_ENABLE", "0", 0); });
}

}  // namespace

NcclCommunicator::NcclCommunicator(Transport& control, int device, const NcclOptions& options, const Deadline& deadline)
    : device_(device) {
  keep_multicast_off();
  // Ranks that wait for a failed rank notice it only at their deadline, so the agreement must wait longer than that.
  const Collective collective(control, Timeouts::derived(2.0 * deadline.seconds()));
  ncclUniqueId id{};
  collective.run_collectively([&] {
    const NcclCalls& calls = nccl();  // on every rank, so that all learn who has none
    if (control.rank() == 0) check(calls.get_unique_id(&id), "ncclGetUniqueId");
  });
  const std::string theirs = control.all_gather(std::string_view(id.internal, sizeof id.internal), deadline)[0];
  id = gathered_value<ncclUniqueId>(theirs);
  const auto join = [&] {
    failpoint("joining");
    const DeviceGuard guard(device_);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
    check(nccl().comm_init_rank_config(&communicator_, control.size(), id, control.rank(), &config),
          "ncclCommInitRank");
    while (!ready()) {
      if (wait_expired(deadline)) {
        fail(ErrorCode::kPeer, fmt::format("NCCL did not join the ranks within {:g} s", deadline.seconds()),
             "a rank has not come, or its host can't be reached", "See NCCL_DEBUG=INFO.");
      }
      control.progress();
      std::this_thread::yield();
    }
  };
  try {
    collective.run_collectively(join);
  } catch (...) {
    abort();
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() {
  if (communicator_ == nullptr) return;
  leave(communicator_, device_, [](ncclComm_t communicator) {
    ncclResult_t state = nccl().comm_finalize(communicator);
    while (state == ncclInProgress) {
      std::this_thread::yield();
      if (nccl().comm_get_async_error(communicator, &state) != ncclSuccess) break;
    }
    nccl().comm_destroy(communicator);
  });
}

void NcclCommunicator::abort() noexcept {
  if (communicator_ == nullptr) return;
  leave(communicator_, device_, [](ncclComm_t communicator) { nccl().comm_abort(communicator); });
  communicator_ = nullptr;
}

// Runs `how` on a separate thread, because these NCCL calls have no deadlines.
template <typename Leave>
void NcclCommunicator::leave(ncclComm_t communicator, int device, const Leave& how) noexcept {
  try {
    const auto left = std::make_shared<std::promise<void>>();
    std::future<void> done = left->get_future();
    std::thread([communicator, device, how, left] {
      cudaSetDevice(device);
      how(communicator);
      left->set_value();
    }).detach();
    done.wait_for(kLeaveSeconds);
  } catch (...) {
    // No thread is available: the communicator is released when the process ends.
  }
}

bool NcclCommunicator::ready() const {
  ncclResult_t state = ncclSuccess;
  check(nccl().comm_get_async_error(communicator_, &state), "ncclCommGetAsyncError");
  check(state, "NCCL");
  return state != ncclInProgress;
}

void NcclCommunicator::check(ncclResult_t result, std::string_view call) const {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* last = nccl().get_last_error(communicator_);
  const bool remote = result == ncclRemoteError || result == ncclSystemError;
  fail(remote ? ErrorCode::kPeer : ErrorCode::kInternal, fmt::format("{} failed", call),
       fmt::format("{}{}{}", nccl().get_error_string(result), last == nullptr || *last == '\0' ? "" : ": ",
                   last == nullptr ? "" : last),
       "NCCL_DEBUG=WARN says more.");
}

}  // namespace ringattn
