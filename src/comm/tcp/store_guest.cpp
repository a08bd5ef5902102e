// SPDX-License-Identifier: Apache-2.0
// The store as the other ranks see it: they come to its address, and meet through it.
#include <fmt/format.h>

#include <thread>

#include "base/pulse.hpp"
#include "comm/failure.hpp"
#include "comm/patience.hpp"
#include "comm/tcp/store_parts.hpp"

namespace ringattn {

namespace {

// Rank 0 gives up first, and says why.
constexpr double kServerFirst = 2.0;

class StoreGuest final : public Store {
 public:
  explicit StoreGuest(const StoreOptions& options) : options_(options), wire_(FileDescriptor()) {
    const Deadline deadline = Patience(options.seconds).for_peer();
    while (!enter(deadline)) {
      if (waited_enough(deadline)) fail_unreachable(deadline);
      std::this_thread::sleep_for(Patience::kBetweenTries);
      look();
    }
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const std::vector<std::string>& hosts() const override { return hosts_; }
  std::string own_address() const override { return own_end(wire_.socket()).host(); }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    if (bytes.size() > kMostStorePart) {
      fail(ErrorCode::kInternal, fmt::format("rank {} gathers {} bytes", options_.rank, bytes.size()),
           "the store takes less");
    }
    wire_.send(WireKind::kGather, bytes);
    return expect(WireKind::kGathered, "all-gather", deadline.seconds());
  }
  void barrier(const Deadline& deadline) override {
    wire_.send(WireKind::kGather, {});
    expect(WireKind::kGathered, "barrier", deadline.seconds());
  }

 private:
  // Tries each address that the name stands for; whether the store has taken this rank in, and all ranks are there.
  bool enter(const Deadline& deadline) {
    const Resolved resolved = resolve_host(options_.address.host, options_.address.port);
    if (resolved.addresses.empty()) why_not_ = resolved.why_none;
    for (const SocketAddress& address : resolved.addresses) {
      if (knock(address, deadline)) return true;
    }
    return false;
  }

  bool knock(const SocketAddress& address, const Deadline& deadline) {
    Opened opened = begin_connection(address);
    if (!opened.socket.valid()) {
      why_not_ = error_text(opened.error);
      return false;
    }
    const Deadline attempt = Patience::for_address();
    for (;;) {
      pollfd socket{opened.socket.get(), POLLOUT, 0};
      wait_a_moment({&socket, 1});
      if (socket.revents != 0) break;
      if (attempt.expired() || deadline.expired()) {
        why_not_ = "nobody answers";
        return false;
      }
    }
    if (const int error = connection_error(opened.socket); error != 0) {
      why_not_ = error_text(error);
      return false;
    }
    wire_ = Wire(std::move(opened.socket));
    const Hello hello = hello_of(options_);
    wire_.send(WireKind::kHello, bytes_of(hello));
    try {
      hosts_ = expect(WireKind::kComplete, "coming to the store", options_.seconds);
    } catch (const Closed&) {
      if (wire_.is_foreign()) {
        fail(ErrorCode::kUsage, fmt::format("what answers at {} is no store of ringattn", address.text()),
             "something else serves that port", "Choose a port that nothing else uses, torchrun neither.");
      }
      why_not_ = "the connection was closed";  // rank 0 has ended, and may be started again
      return false;
    }
    return true;
  }

  // The connection has ended without a word.
  class Closed : public Error {
   public:
    explicit Closed(Error error) : Error(std::move(error)) {}
  };

  std::vector<std::string> expect(WireKind kind, std::string_view what, double seconds) {
    const Deadline deadline = Patience::derived(seconds + kServerFirst).for_peer();
    for (;;) {
      const bool open = wire_.move();
      if (const std::optional<WireFrame> frame = wire_.take()) {
        if (frame->kind == WireKind::kFailed) throw Error(unpack_error(frame->body));
        auto texts = unpack_texts(frame->body, options_.size);
        if (frame->kind == kind && texts) return std::move(*texts);
      }
      if (!open) {
        throw Closed(Error(ErrorCode::kPeer, "rank 0 left while the ranks came together",
                           fmt::format("its store at {} has closed", options_.address.text()), "See its own message."));
      }
      if (waited_enough(deadline)) {
        const int server[] = {0};
        fail_late(what, deadline, RankNames(), options_.rank, server);
      }
      pollfd socket = wire_.interest();
      wait_a_moment({&socket, 1});
    }
  }

  [[noreturn]] void fail_unreachable(const Deadline& deadline) const {
    fail_with_pulse(Error(ErrorCode::kPeer,
                          fmt::format("rank {} can't reach rank 0's store at {} within {:g} s", options_.rank,
                                      options_.address.text(), deadline.seconds()),
                          why_not_,
                          {"See whether rank 0 was started and that address is its host's; raise ", setting("timeout"),
                           " if it only starts slowly."}));
  }

  const StoreOptions options_;
  Wire wire_;
  std::vector<std::string> hosts_;
  std::string why_not_ = "nobody answers";
};

}  // namespace

std::unique_ptr<Store> visit_store(const StoreOptions& options) { return std::make_unique<StoreGuest>(options); }

}  // namespace ringattn
