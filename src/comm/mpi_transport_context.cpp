// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_transport_context.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/rank_liveness.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

// Much longer than a notice takes, so ranks that fail at nearly the same time hear of each other.
constexpr double kReportSeconds = 0.3;

}  // namespace

void check_mpi(int result, std::string_view call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  mpi().error_string(result, text, &length);
  fail(ErrorCode::kPeer, fmt::format("{} failed", call), std::string_view(text, static_cast<std::size_t>(length)),
       "See whether all ranks are alive.");
}

std::string processor_name() {
  char host[MPI_MAX_PROCESSOR_NAME];
  int length = 0;
  mpi().get_processor_name(host, &length);
  return std::string(host, static_cast<std::size_t>(length));
}

int highest_mpi_tag() {
  int initialized = 0;
  int provided = MPI_THREAD_SINGLE;
  mpi().initialized(&initialized);
  if (initialized != 0) mpi().query_thread(&provided);
  if (provided < MPI_THREAD_FUNNELED) {
    fail(ErrorCode::kUsage, "can't make an mpi transport",
         initialized == 0 ? "MPI isn't initialised" : "MPI was initialised without thread support",
         "Call MPI_Init_thread with MPI_THREAD_FUNNELED first.");
  }
  void* value = nullptr;
  int found = 0;
  mpi().comm_get_attr(mpi().comm_world, MPI_TAG_UB, &value, &found);
  return found != 0 ? *static_cast<int*>(value) : 32767;
}

MpiTransportContext::MpiTransportContext(MPI_Comm communicator, int lane_tags, int highest_tag)
    : communicator_(communicator),
      lane_tags_(lane_tags),
      lanes_(static_cast<std::size_t>(std::min(kMaxLanes, highest_tag / lane_tags)), kFree) {
  mpi().comm_rank(communicator_, &rank_);
  mpi().comm_size(communicator_, &size_);
  post_notice_receive();
}

void MpiTransportContext::set_hosts(std::vector<std::string> hosts) {
  const std::string& mine = hosts[static_cast<std::size_t>(rank_)];
  const auto neighbours = std::count(hosts.begin(), hosts.end(), mine);
  crowded_ = neighbours > static_cast<std::ptrdiff_t>(std::thread::hardware_concurrency());
  names_ = RankNames(std::move(hosts));
}

int MpiTransportContext::free_lane(std::span<const std::string> in_use) const {
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (std::all_of(in_use.begin(), in_use.end(), [&](const std::string& lanes) { return lanes[lane] == kFree; })) {
      return static_cast<int>(lane);
    }
  }
  fail(ErrorCode::kUnsupported, "can't split the world once more",
       fmt::format("this MPI has tags for {} worlds at a time", lanes_.size()), "Destroy worlds that are done with.");
}

void MpiTransportContext::back_off(int idle) const {
  // Where ranks share cores, a waiting rank must leave them to ranks that compute. Yielding is not enough.
  constexpr int kYields = 100;
  constexpr std::chrono::microseconds kSleep{50};
  if (crowded_ && idle > kYields) {
    std::this_thread::sleep_for(kSleep);
  } else {
    std::this_thread::yield();
  }
}

MpiTransportContext::~MpiTransportContext() {
  // The receive's buffer is freed with this object. A cancelled receive completes at once, and so does one whose notice
  // has already arrived.
  mpi().cancel(&notice_request_);
  mpi().wait(&notice_request_, MPI_STATUS_IGNORE);
  if (!is_over()) mpi().comm_free(&communicator_);
}

void MpiTransportContext::post_notice_receive() {
  check_mpi(mpi().irecv(notice_.data(), static_cast<int>(notice_.size()), mpi().char_type, MPI_ANY_SOURCE, kNoticeTag,
                        communicator_, &notice_request_),
            "MPI_Irecv");
}

void MpiTransportContext::receive_notices() {
  int arrived = 0;
  MPI_Status status;
  check_mpi(mpi().test(&notice_request_, &arrived, &status), "MPI_Test");
  while (arrived != 0) {
    int bytes = 0;
    mpi().get_count(&status, mpi().char_type, &bytes);
    const std::string_view notice(notice_.data(), static_cast<std::size_t>(bytes));
    reports_.emplace(status.MPI_SOURCE, unpack_error(notice));
    post_notice_receive();
    check_mpi(mpi().test(&notice_request_, &arrived, &status), "MPI_Test");
  }
}

void MpiTransportContext::check_alive() {
  receive_notices();
  if (!reports_.empty()) {
    const auto& [rank, report] = *reports_.begin();
    fail_rank(aborted_error(names_, rank, report));
  }
  if (given_up_) fail_rank(*given_up_);
}

void MpiTransportContext::give_up(const Error& failure) {
  if (!given_up_) given_up_ = failure;
}

bool MpiTransportContext::abort(const Error& error) {
  receive_notices();
  if (!reports_.empty()) return false;
  // On the heap, and freed only if all are sent: MPI may read them as long as the process lives.
  struct Notices {
    std::string bytes;
    std::vector<MPI_Request> requests;
  };
  auto notices = std::make_unique<Notices>();
  notices->bytes = pack_error(error);
  notices->bytes.resize(std::min(notices->bytes.size(), kNoticeBytes));
  notices->requests.assign(static_cast<std::size_t>(size_), mpi().request_null);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    mpi().isend(notices->bytes.data(), static_cast<int>(notices->bytes.size()), mpi().char_type, peer, kNoticeTag,
                communicator_, &notices->requests[static_cast<std::size_t>(peer)]);
  }
  reports_.emplace(rank_, error);

  const Deadline deadline = Timeouts::grace(kReportSeconds);
  int sent = 0;
  const auto lowest = [&] { return reports_.begin()->first; };
  // Rank 0 is the lowest, and a rank that has heard of a lower one already knows that it does not print.
  for (int idle = 0; !deadline.expired() && (sent == 0 || (rank_ != 0 && lowest() == rank_)); ++idle) {
    if (sent == 0) mpi().testall(size_, notices->requests.data(), &sent, MPI_STATUSES_IGNORE);
    receive_notices();
    back_off(idle);
  }
  if (sent == 0) static_cast<void>(notices.release());
  return lowest() == rank_;
}

}  // namespace ringattn
