// SPDX-License-Identifier: Apache-2.0
#include "comm/self.hpp"

#include <fmt/format.h>

#include <optional>
#include <utility>

#include "base/rank_liveness.hpp"
#include "comm/exchange.hpp"
#include "comm/failure.hpp"

namespace ringattn {

namespace {

class SelfTransport final : public Transport {
 public:
  SelfTransport(MemoryKind memory, int device) : memory_(memory), device_(device) {}

  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string_view name() const override { return "self"; }
  MemoryKind memory() const override { return memory_; }
  int device() const override { return device_; }
  Route route() const override { return Route::kDirect; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline&) override {
    check_alive();
    return {std::string(bytes)};
  }
  void barrier(const Deadline&) override { check_alive(); }

  Ticket post(Exchange exchange, Stream) override {
    check_alive();
    check_exchange(exchange, 0, 1);  // in a world of one rank every message is wrong
    return posted_++;
  }
  void wait(Ticket ticket, Stream, const Deadline&) override {
    check_alive();
    check_ticket(ticket, waited_, posted_);
    ++waited_;
  }
  void progress() override {
    heartbeat();
    check_alive();
  }
  bool finished(Ticket ticket) override {
    check_alive();
    return ticket < posted_;
  }
  void abandon() noexcept override { waited_ = posted_; }

  std::unique_ptr<Transport> split_world(int size, const Deadline&) override {
    check_alive();
    check_split(size, 1);
    return make_self_transport(memory_, device_);
  }

  bool abort(const Error& error) override {
    if (aborted_) return false;
    aborted_ = error;
    return true;
  }

 private:
  void check_alive() const {
    if (aborted_) throw aborted_error(RankNames(), 0, *aborted_);
  }

  MemoryKind memory_;
  int device_;
  Ticket posted_ = 0;
  Ticket waited_ = 0;
  std::optional<Error> aborted_;
};

}  // namespace

std::unique_ptr<Transport> make_self_transport(MemoryKind memory, int device) {
  return std::make_unique<SelfTransport>(memory, device);
}

}  // namespace ringattn
