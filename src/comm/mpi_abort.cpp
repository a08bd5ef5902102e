// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_abort.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/deadline.hpp"

namespace ringattn {

namespace {

constexpr int kNoticeTag = 0;
// Much longer than a notice takes, so ranks that fail within one notice's flight of each other hear of each other.
constexpr double kReportSeconds = 0.3;

}  // namespace

void check_mpi(int result, std::string_view call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(result, text, &length);
  fail(ErrorCode::kPeer, fmt::format("{} failed", call), std::string_view(text, static_cast<std::size_t>(length)),
       "See whether all ranks are alive.");
}

MpiFamily::MpiFamily(MPI_Comm communicator) {
  check_mpi(MPI_Comm_dup(communicator, &communicator_), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(communicator_, &rank_);
  MPI_Comm_size(communicator_, &size_);
  listen();
}

MpiFamily::~MpiFamily() {
  // The receive's buffer goes with this object. A cancelled receive completes at once; so does one whose eager notice
  // is here already.
  MPI_Cancel(&listening_);
  MPI_Wait(&listening_, MPI_STATUS_IGNORE);
  // Freeing is collective, and the ranks of an aborted world don't meet any more.
  if (!is_over()) MPI_Comm_free(&communicator_);
}

void MpiFamily::listen() {
  check_mpi(MPI_Irecv(notice_.data(), static_cast<int>(notice_.size()), MPI_CHAR, MPI_ANY_SOURCE, kNoticeTag,
                      communicator_, &listening_),
            "MPI_Irecv");
}

void MpiFamily::hear() {
  int arrived = 0;
  MPI_Status status;
  check_mpi(MPI_Test(&listening_, &arrived, &status), "MPI_Test");
  while (arrived != 0) {
    int bytes = 0;
    MPI_Get_count(&status, MPI_CHAR, &bytes);
    const std::string_view notice(notice_.data(), static_cast<std::size_t>(bytes));
    reports_[status.MPI_SOURCE] = {static_cast<ErrorCode>(notice.front()), std::string(notice.substr(1))};
    listen();
    check_mpi(MPI_Test(&listening_, &arrived, &status), "MPI_Test");
  }
}

void MpiFamily::check_alive() {
  hear();
  if (reports_.empty()) return;
  const auto& [rank, report] = *reports_.begin();
  throw aborted_error(names_, rank, report.code, report.text);
}

bool MpiFamily::abort(const Error& error) {
  hear();
  if (is_over()) return false;
  // On the heap and not freed unless all are sent: MPI may read them as long as the process lives.
  struct Notices {
    std::string text;
    std::vector<MPI_Request> requests;
  };
  auto notices = std::make_unique<Notices>();
  notices->text.assign(1, static_cast<char>(error.code()));
  notices->text += error.what();
  notices->text.resize(std::min(notices->text.size(), kNoticeBytes));
  notices->requests.assign(static_cast<std::size_t>(size_), MPI_REQUEST_NULL);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    MPI_Isend(notices->text.data(), static_cast<int>(notices->text.size()), MPI_CHAR, peer, kNoticeTag, communicator_,
              &notices->requests[static_cast<std::size_t>(peer)]);
  }
  reports_[rank_] = {error.code(), error.what()};

  const Deadline deadline = Deadline::after(kReportSeconds);
  int sent = 0;
  const auto lowest = [&] { return reports_.begin()->first; };
  // Rank 0 has nobody below to wait for, a rank that has heard of a lower one no more to learn.
  while (!deadline.expired() && (sent == 0 || (rank_ != 0 && lowest() == rank_))) {
    if (sent == 0) MPI_Testall(size_, notices->requests.data(), &sent, MPI_STATUSES_IGNORE);
    hear();
    std::this_thread::yield();
  }
  if (sent == 0) static_cast<void>(notices.release());
  return lowest() == rank_;
}

}  // namespace ringattn
