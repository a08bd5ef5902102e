// SPDX-License-Identifier: Apache-2.0
// Inside transport `mpi`: the state that a world shares with the worlds split from it. It holds the ranks' names, the
// lanes of tags, and the notices by which a failed rank ends all these worlds.
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

// This rank's host, as MPI names it.
std::string processor_name();

// Throws kPeer with MPI's own text unless `result` is MPI_SUCCESS.
void check_mpi(int result, std::string_view call);

// The highest tag that MPI allows. Throws kUsage unless MPI is initialized with at least MPI_THREAD_FUNNELED.
int highest_mpi_tag();

// Ranks are numbered as in the first world, and a split keeps the numbers. All worlds of a context share its
// communicator, and each has its own lane of tags.
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
  // `hosts`: [ranks].
  void set_hosts(std::vector<std::string> hosts);

  // The lanes of the worlds that this rank is in, as a text of one character per lane. All messages of a lane have
  // arrived when its world ends in order, so the lane may be reused.
  int first_tag(int lane) const { return 1 + lane * lane_tags_; }
  const std::string& lanes_in_use() const { return lanes_; }
  void acquire_lane(int lane) { lanes_.at(static_cast<std::size_t>(lane)) = kInUse; }
  void release_lane(int lane) noexcept { lanes_[static_cast<std::size_t>(lane)] = kFree; }
  // The first lane that is free on all ranks whose lanes are given. Throws kUnsupported if there is none.
  int free_lane(std::span<const std::string> in_use) const;

  // Yields or sleeps between two polls that found nothing. `idle` counts such polls in a row.
  void back_off(int idle) const;

  // The ranks of a world that broke or was aborted run no further collective, not even to free communicators.
  void set_broken() { broken_ = true; }
  bool is_over() const { return broken_ || given_up_ || !reports_.empty(); }

  // Notifies all other ranks, then waits briefly for ranks that failed at the same time. The lowest of them prints.
  // Returns true if this rank is to print. A rank that has received a notice before sends none.
  bool abort(const Error& error);

  // Throws once a rank has aborted, this one included. Otherwise throws the error of give_up(), if any.
  void check_alive();

  // A rank is no longer waited for: from now on check_alive() throws `failure`. Only the first call counts.
  void give_up(const Error& failure);

 private:
  void post_notice_receive();  // posts the receive of the next notice
  void receive_notices();      // handles the notices that have arrived

  // Small enough to be sent eagerly by every MPI: at once, whatever the receiver does.
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
  std::map<int, Error> reports_;   // by rank
  std::optional<Error> given_up_;  // the error of give_up()
};

}  // namespace ringattn
