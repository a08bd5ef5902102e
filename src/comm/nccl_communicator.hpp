// SPDX-License-Identifier: Apache-2.0
// Inside transport `nccl`: an NCCL communicator whose calls all return in bounded time.
#pragma once

#include <nccl.h>

#include <string_view>

#include "comm/nccl.hpp"

namespace ringattn {

class NcclCommunicator {
 public:
  // Collective over `control`. Throws an AgreedError if NCCL can't connect the ranks in time.
  NcclCommunicator(Transport& control, int device, const NcclOptions& options, const Deadline& deadline);
  // Finalizes the communicator, which the other ranks must do too. If that takes longer than a few seconds, the
  // communicator is left until the process ends.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  ncclComm_t get() const { return communicator_; }

  // Returns true if everything submitted so far is enqueued. Throws kPeer or kInternal with NCCL's text if it failed.
  bool ready() const;
  // Throws unless `result` is ncclSuccess or ncclInProgress.
  void check(ncclResult_t result, std::string_view call) const;

  // Aborts what is in flight. Only the destructor may be called afterwards.
  void abort() noexcept;

 private:
  template <typename Leave>
  static void leave(ncclComm_t communicator, int device, const Leave& how) noexcept;

  const int device_;
  ncclComm_t communicator_ = nullptr;
};

}  // namespace ringattn
