// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi_signs.hpp"

#include <deque>
#include <utility>

#include "comm/mpi_calls.hpp"

namespace ringattn {

namespace {

constexpr int kTag = 1;

class MpiSigns final : public Signs {
 public:
  explicit MpiSigns(std::shared_ptr<MpiFamily> family) : family_(std::move(family)) {
    // What goes wrong with a sign shows as silence.
    mpi().comm_set_errhandler(mpi().comm_world, mpi().errors_return);
    int size = 1;
    mpi().comm_size(mpi().comm_world, &size);
    sendings_.resize(static_cast<std::size_t>(size));
  }

  void hear(const std::function<void(int, Sign)>& heard) override {
    for (;;) {
      int found = 0;
      MPI_Message message = mpi().message_null;
      MPI_Status status;
      if (mpi().improbe(MPI_ANY_SOURCE, kTag, mpi().comm_world, &found, &message, &status) != MPI_SUCCESS ||
          found == 0) {
        return;
      }
      auto sign = static_cast<char>(Sign::kWaits);
      if (mpi().mrecv(&sign, 1, mpi().char_type, &message, MPI_STATUS_IGNORE) != MPI_SUCCESS) continue;
      heard(status.MPI_SOURCE, static_cast<Sign>(sign));
    }
  }

  bool tell(int peer, Sign sign) override {
    Sending& sending = sendings_[static_cast<std::size_t>(peer)];
    int sent = 0;
    if (mpi().test(&sending.request, &sent, MPI_STATUS_IGNORE) != MPI_SUCCESS || sent == 0) return false;
    sending.sign = static_cast<char>(sign);
    return mpi().isend(&sending.sign, 1, mpi().char_type, peer, kTag, mpi().comm_world, &sending.request) ==
           MPI_SUCCESS;
  }

  void give_up(const Error& failure) override { family_->give_up(failure); }

 private:
  struct Sending {
    MPI_Request request = mpi().request_null;
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
