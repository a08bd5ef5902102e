// SPDX-License-Identifier: Apache-2.0
// Inside transport `nccl`: a communicator all of whose calls end in bounded time.
#pragma once

#include <nccl.h>

#include <string_view>

#include "comm/nccl.hpp"

namespace ringattn {

class NcclCommunicator {
 public:
  // Collective over `control`; throws an AgreedError where NCCL can't join the ranks in time.
  NcclCommunicator(Transport& control, int device, const NcclOptions& options, const Deadline& deadline);
  // Leaves in order, which the other ranks must do too; what takes longer than a few seconds is left to the process's
  // end.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  ncclComm_t get() const { return communicator_; }

  // Whether everything asked for so far is enqueued. Throws kPeer or kInternal with NCCL's text when it failed.
  bool ready() const;
  // Throws unless `result` is a success, be it in progress.
  void check(ncclResult_t result, std::string_view call) const;

  // Ends what is on its way. Nothing but the destructor may follow.
  void abort() noexcept;

 private:
  template <typename Leave>
  static void leave(ncclComm_t communicator, int device, const Leave& how) noexcept;

  const int device_;
  ncclComm_t communicator_ = nullptr;
};

}  // namespace ringattn
