// SPDX-License-Identifier: Apache-2.0
// Inside transport `mpi`: what a world shares with the worlds split from it. Who the ranks are, and the notice by which
// a rank that failed alone ends them all.
#pragma once

#include <mpi.h>

#include <array>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "comm/failure.hpp"
#include "comm/mpi_calls.hpp"

namespace ringattn {

// Of the host that this rank runs on, as MPI calls it.
std::string processor_name();

// Throws kPeer with MPI's own text unless `result` is MPI_SUCCESS.
void check_mpi(int result, std::string_view call);

// Throws kUsage unless MPI is initialised with at least MPI_THREAD_FUNNELED.
int highest_mpi_tag();

// Ranks are those of the first world; a split keeps them. All worlds of a context share its communicator, and each has
// a lane of tags of its own.
class MpiTransportContext {
 public:
  // Owns `communicator`. A lane has `lane_tags` tags; no tag is above `highest_tag`.
  MpiTransportContext(MPI_Comm communicator, int lane_tags, int highest_tag);
  ~MpiTransportContext();
  MpiTransportContext(const MpiTransportContext&) = delete;
  MpiTransportContext& operator=(const MpiTransportContext&) = delete;

  MPI_Comm communicator() const { return communicator_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const RankNames& names() const { return names_; }
  // Which host each rank is on.
  void set_hosts(std::vector<std::string> hosts);

  // The lanes of the worlds that this rank is in, as a text of one character a lane. What lies on a lane has arrived
  // when its world ends in order, so the lane may be used again.
  int first_tag(int lane) const { return 1 + lane * lane_tags_; }
  const std::string& lanes_in_use() const { return lanes_; }
  void acquire_lane(int lane) { lanes_.at(static_cast<std::size_t>(lane)) = kInUse; }
  void release_lane(int lane) noexcept { lanes_[static_cast<std::size_t>(lane)] = kFree; }
  // The first lane that none of the ranks uses which told theirs; throws kUnsupported when there is none.
  int free_lane(std::span<const std::string> in_use) const;

  // What a rank does between two polls that found nothing; `idle` counts them.
  void back_off(int idle) const;

  // The ranks of a world that broke or was aborted don't meet any more, not even to free communicators.
  void set_broken() { broken_ = true; }
  bool is_over() const { return broken_ || gone_ || !reports_.empty(); }

  // Tells all other ranks, then waits a moment for ranks that failed at the same time: the lowest of them prints.
  // Whoever has heard a notice before has nothing to report.
  bool abort(const Error& error);

  // Throws once a rank has aborted, this one included; else what give_up() was called with.
  void check_alive();

  // A rank is not waited for any more, nor met: from here on check_alive() throws `failure`. Only the first one counts.
  void give_up(const Error& failure);

 private:
  void post_notice_receive();  // posts the receive of the next notice
  void receive_notices();      // takes the notices that have come

  // Eager in every MPI: sent at once, whatever the receiver does.
  static constexpr std::size_t kNoticeBytes = 2048;
  static constexpr int kNoticeTag = 0;
  static constexpr int kMaxLanes = 64;
  static constexpr char kFree = '.';
  static constexpr char kInUse = 'x';

  MPI_Comm communicator_;
  const int lane_tags_;
  std::string lanes_;
  int rank_ = 0;
  int size_ = 1;
  RankNames names_;
  bool crowded_ = false;  // this host has more ranks than cores
  bool broken_ = false;
  std::array<char, kNoticeBytes> notice_;  // an error as pack_error() writes it
  MPI_Request notice_request_ = mpi().request_null;
  std::map<int, Error> reports_;  // by rank
  std::optional<Error> gone_;     // what give_up() was called with
};

}  // namespace ringattn
