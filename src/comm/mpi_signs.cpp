// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_signs.hpp"

#include <mpi.h>

#include <deque>
#include <utility>

namespace ringattn {

namespace {

constexpr int kTag = 1;

class MpiSigns final : public Signs {
 public:
  explicit MpiSigns(std::shared_ptr<MpiFamily> family) : family_(std::move(family)) {
    // What goes wrong with a sign shows as silence.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    int size = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    sendings_.resize(static_cast<std::size_t>(size));
  }

  void hear(const std::function<void(int, Sign)>& heard) override {
    for (;;) {
      int found = 0;
      MPI_Message message = MPI_MESSAGE_NULL;
      MPI_Status status;
      if (MPI_Improbe(MPI_ANY_SOURCE, kTag, MPI_COMM_WORLD, &found, &message, &status) != MPI_SUCCESS || found == 0) {
        return;
      }
      auto sign = static_cast<char>(Sign::kWaits);
      if (MPI_Mrecv(&sign, 1, MPI_CHAR, &message, MPI_STATUS_IGNORE) != MPI_SUCCESS) continue;
      heard(status.MPI_SOURCE, static_cast<Sign>(sign));
    }
  }

  bool tell(int peer, Sign sign) override {
    Sending& sending = sendings_[static_cast<std::size_t>(peer)];
    int sent = 0;
    if (MPI_Test(&sending.request, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS || sent == 0) return false;
    sending.sign = static_cast<char>(sign);
    return MPI_Isend(&sending.sign, 1, MPI_CHAR, peer, kTag, MPI_COMM_WORLD, &sending.request) == MPI_SUCCESS;
  }

  void give_up(const Error& failure) override { family_->give_up(failure); }

 private:
  struct Sending {
    MPI_Request request = MPI_REQUEST_NULL;
    char sign = 0;  // belongs to `request`
  };

  const std::shared_ptr<MpiFamily> family_;
  std::deque<Sending> sendings_;  // [ranks]; requests and signs stay where they are
};

}  // namespace

std::unique_ptr<Signs> make_mpi_signs(std::shared_ptr<MpiFamily> family) {
  return std::make_unique<MpiSigns>(std::move(family));
}

}  // namespace ringattn
