// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_arrival.hpp"

#include <chrono>
#include <thread>
#include <vector>

#include "base/rank_liveness.hpp"
#include "comm/failure.hpp"
#include "comm/mpi_calls.hpp"
#include "comm/mpi_transport_context.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

constexpr int kTag = 2;  // on MPI_COMM_WORLD; 1 is the tag of heartbeats
constexpr std::chrono::milliseconds kPollInterval{1};

}  // namespace

void await_ranks(MPI_Comm communicator, const Deadline& deadline) {
  int rank = 0;
  int size = 1;
  mpi().comm_rank(communicator, &rank);
  mpi().comm_size(communicator, &size);
  // The messages are empty, so MPI holds none of this rank's memory when the wait is given up.
  std::vector<MPI_Request> sendings(static_cast<std::size_t>(size), mpi().request_null);
  std::vector<MPI_Request> arrivals(static_cast<std::size_t>(size), mpi().request_null);
  for (int i = 1; i < size; ++i) {
    const int peer = (rank + i) % size;
    const auto at = static_cast<std::size_t>(peer);
    check_mpi(mpi().irecv(nullptr, 0, mpi().char_type, peer, kTag, communicator, &arrivals[at]), "MPI_Irecv");
    check_mpi(mpi().isend(nullptr, 0, mpi().char_type, peer, kTag, communicator, &sendings[at]), "MPI_Isend");
  }
  for (;;) {
    std::vector<int> absent;
    for (int peer = 0; peer < size; ++peer) {
      int came = 0;
      check_mpi(mpi().test(&arrivals[static_cast<std::size_t>(peer)], &came, MPI_STATUS_IGNORE), "MPI_Test");
      if (came == 0) absent.push_back(peer);
    }
    int sent = 0;
    check_mpi(mpi().testall(size, sendings.data(), &sent, MPI_STATUSES_IGNORE), "MPI_Testall");
    if (absent.empty() && sent != 0) return;
    if (absent.empty()) {  // all have come, and one of them does not receive
      for (int peer = 0; peer < size; ++peer) {
        if (sendings[static_cast<std::size_t>(peer)] != mpi().request_null) absent.push_back(peer);
      }
    }
    if (wait_expired(deadline)) fail_late("the start of the ranks", deadline, RankNames(), rank, absent);
    std::this_thread::sleep_for(kPollInterval);
    waiting_heartbeat();
  }
}

}  // namespace ringattn
