// SPDX-License-Identifier: Apache-2.0
// Inside transport `mpi`: what a world shares with the worlds split from it. Who the ranks are, and the notice by which
// a rank that failed alone ends them all.
#pragma once

#include <mpi.h>

#include <array>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "comm/failure.hpp"

namespace ringattn {

// Throws kPeer with MPI's own text unless `result` is MPI_SUCCESS.
void check_mpi(int result, std::string_view call);

// Ranks are those of the first world; a split keeps them.
class MpiFamily {
 public:
  // Owns `communicator`, that of the first world. Notices have `tag` on it, and nothing else has.
  MpiFamily(MPI_Comm communicator, int tag);
  ~MpiFamily();
  MpiFamily(const MpiFamily&) = delete;
  MpiFamily& operator=(const MpiFamily&) = delete;

  MPI_Comm communicator() const { return communicator_; }
  const RankNames& names() const { return names_; }
  // Which host each rank is on.
  void set_hosts(std::vector<std::string> hosts);

  // What a rank does between two polls that found nothing; `idle` counts them.
  void rest(int idle) const;

  // The ranks of a world that broke or was aborted don't meet any more, not even to free communicators.
  void set_broken() { broken_ = true; }
  bool is_over() const { return broken_ || !reports_.empty(); }

  // Tells all other ranks, then waits a moment for ranks that failed at the same time: the lowest of them prints.
  // Whoever has heard a notice before has nothing to report.
  bool abort(const Error& error);

  // Throws once a rank has aborted, this one included.
  void check_alive();

 private:
  void listen();  // posts the receive of the next notice
  void hear();    // takes the notices that have come

  // Eager in every MPI: sent at once, whatever the receiver does.
  static constexpr std::size_t kNoticeBytes = 2048;

  MPI_Comm communicator_;
  const int tag_;
  int rank_ = 0;
  int size_ = 1;
  RankNames names_;
  bool crowded_ = false;  // this host has more ranks than cores
  bool broken_ = false;
  std::array<char, kNoticeBytes> notice_;  // an error as pack_error() writes it
  MPI_Request listening_ = MPI_REQUEST_NULL;
  std::map<int, Error> reports_;  // by rank
};

}  // namespace ringattn
