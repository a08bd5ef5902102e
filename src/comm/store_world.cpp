// SPDX-License-Identifier: Apache-2.0
#include "comm/store_world.hpp"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "base/outcome.hpp"
#include "comm/process_world.hpp"
#include "comm/session_claim.hpp"
#include "comm/store_rank.hpp"
#include "comm/tcp/store.hpp"
#include "comm/tcp/tcp_internal.hpp"

namespace ringattn {

namespace {

// Time limit for the rank that prints. Waiting ends as soon as it has printed.
constexpr double kPrinterSeconds = 4.0;
// The same before the ranks are connected.
constexpr std::chrono::milliseconds kStorePrints{300};
// How long a rank that printed before all were connected keeps its claim. Other ranks that miss the same rank notice it
// at about the same time.
constexpr std::chrono::seconds kClaimLasts{1};

class TcpHeartbeatChannel final : public HeartbeatChannel {
 public:
  explicit TcpHeartbeatChannel(std::shared_ptr<TcpTransportContext> context) : context_(std::move(context)) {}

  void receive(const std::function<void(int, Heartbeat)>& heard) override {
    for (int peer = 0; peer < context_->size(); ++peer) {
      for (const char heartbeat : context_->take_heartbeats(peer)) heard(peer, static_cast<Heartbeat>(heartbeat));
    }
  }
  bool send(int peer, Heartbeat heartbeat) override {
    return context_->send_heartbeat(peer, static_cast<char>(heartbeat), heartbeat == Heartbeat::kLeaving);
  }
  void give_up(const Error& failure) override { context_->give_up(failure); }

 private:
  const std::shared_ptr<TcpTransportContext> context_;
};

class StoreRanks final : public ProcessRanks {
 public:
  explicit StoreRanks(StoreRank mine) : mine_(std::move(mine)) {}

  int rank() const override { return mine_.rank; }
  std::string name() const override { return "the store's world"; }
  double start_grace() const override { return 0.0; }

  void start() override {}

  Joined join(const WorldRequest& request, std::function<void(const Error&)> on_failure) override {
    const Secret secret = secret_of_environment();
    const std::unique_ptr<Store> store =
        make_store({mine_.address, mine_.rank, mine_.size, mine_.job, request.timeout, secret, request.warn});
    claim_.begin(store->session());
    TcpOptions options;
    options.setup_seconds = request.timeout;
    options.address = store->own_address();
    options.secret = secret;
    TcpWorld made = make_tcp_world(*store, options);
    connected_ = true;
    context_ = made.context;
    context_->set_failure_callback(std::move(on_failure));
    return {std::move(made.transport), std::make_unique<TcpHeartbeatChannel>(context_), store->hosts()};
  }

  void leave() override { context_.reset(); }

  // No rank could end this one before its turn, and rank 0 has told the others what it knows.
  double print_delay() const override { return 0.0; }
  bool may_print() override { return claim_.try_claim(); }
  // The other ranks have been told, or notice it themselves shortly.
  void end_all(int code, int) override {
    if (!connected_) std::this_thread::sleep_for(kClaimLasts);
    end_process(code);
  }
  // Needed because a launcher may end all ranks when the first one exits.
  void await_printer() override {
    if (!connected_) {
      std::this_thread::sleep_for(kStorePrints);
    } else {
      context_->await_printer(kPrinterSeconds);
    }
  }

 private:
  const StoreRank mine_;
  SessionClaim claim_;
  std::atomic<bool> connected_{false};
  std::shared_ptr<TcpTransportContext> context_;
};

}  // namespace

int run_store_world(const WorldRequest& request, const Error* refusal, const std::function<int(Transport&)>& rank_main,
                    const std::function<void(const Error&)>& print_error) {
  StoreRanks ranks(store_rank());
  return run_process_world(ranks, request, refusal, rank_main, print_error);
}

}  // namespace ringattn
