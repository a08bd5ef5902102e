// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_heartbeat_channel.hpp"

#include <deque>
#include <utility>

#include "comm/mpi_calls.hpp"

namespace ringattn {

namespace {

constexpr int kTag = 1;

class MpiHeartbeatChannel final : public HeartbeatChannel {
 public:
  explicit MpiHeartbeatChannel(std::shared_ptr<MpiTransportContext> context) : context_(std::move(context)) {
    // An error of a heartbeat shows as silence.
    mpi().comm_set_errhandler(mpi().comm_world, mpi().errors_return);
    int size = 1;
    mpi().comm_size(mpi().comm_world, &size);
    sendings_.resize(static_cast<std::size_t>(size));
  }

  void receive(const std::function<void(int, Heartbeat)>& heard) override {
    for (;;) {
      int found = 0;
      MPI_Message message = mpi().message_null;
      MPI_Status status;
      if (mpi().improbe(MPI_ANY_SOURCE, kTag, mpi().comm_world, &found, &message, &status) != MPI_SUCCESS ||
          found == 0) {
        return;
      }
      auto heartbeat = static_cast<char>(Heartbeat::kWaiting);
      if (mpi().mrecv(&heartbeat, 1, mpi().char_type, &message, MPI_STATUS_IGNORE) != MPI_SUCCESS) continue;
      heard(status.MPI_SOURCE, static_cast<Heartbeat>(heartbeat));
    }
  }

  bool send(int peer, Heartbeat heartbeat) override {
    Sending& sending = sendings_[static_cast<std::size_t>(peer)];
    int sent = 0;
    if (mpi().test(&sending.request, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS || sent == 0) return false;
    sending.heartbeat = static_cast<char>(heartbeat);
    return mpi().isend(&sending.heartbeat, 1, mpi().char_type, peer, kTag, mpi().comm_world, &sending.request) ==
           MPI_SUCCESS;
  }

  void give_up(const Error& failure) override { context_->give_up(failure); }

 private:
  struct Sending {
    MPI_Request request = mpi().request_null;
    char heartbeat = 0;  // send buffer of `request`
  };

  const std::shared_ptr<MpiTransportContext> context_;
  std::deque<Sending> sendings_;  // [ranks]; a deque, because requests and their buffers must not move
};

}  // namespace

std::unique_ptr<HeartbeatChannel> make_mpi_heartbeat_channel(std::shared_ptr<MpiTransportContext> context) {
  return std::make_unique<MpiHeartbeatChannel>(std::move(context));
}

}  // namespace ringattn
