// SPDX-License-Identifier: Apache-2.0
// The store on ranks other than 0: they connect to its address and run collectives through it.
#include <fmt/format.h>

#include <thread>

#include "base/rank_liveness.hpp"
#include "comm/failure.hpp"
#include "comm/tcp/handshake.hpp"
#include "comm/tcp/store_internal.hpp"
#include "comm/timeouts.hpp"

namespace ringattn {

namespace {

// Extra seconds, so that rank 0's limit expires first and its error says why.
constexpr double kServerFirst = 2.0;
// Limit for a frame before the proof: a proof, or the text of a refusal.
constexpr std::size_t kMaxBytesBeforeProof = 4096;

class StoreConnection final : public Store {
 public:
  StoreConnection(const StoreOptions& options, const Secret& secret)
      : options_(options), secret_(secret), wire_(FileDescriptor()) {
    const Deadline deadline = Timeouts(options.seconds).for_peer();
    while (!connect_to_any(deadline)) {
      if (wait_expired(deadline)) fail_unreachable(deadline);
      std::this_thread::sleep_for(Timeouts::kBetweenTries);
      waiting_heartbeat();
    }
  }

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const std::vector<std::string>& hosts() const override { return hosts_; }
  std::string own_address() const override { return local_address(wire_.socket()).host(); }
  const std::string& session() const override { return session_; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override {
    if (bytes.size() > kMaxStoreMessage) {
      fail(ErrorCode::kInternal, fmt::format("rank {} gathers {} bytes", options_.rank, bytes.size()),
           "the store takes less");
    }
    return gather("all-gather", bytes, deadline);
  }
  void barrier(const Deadline& deadline) override { gather("barrier", {}, deadline); }

 private:
  std::vector<std::string> gather(std::string_view what, std::string_view bytes, const Deadline& deadline) {
    wire_.send(WireKind::kWait, bytes_of(deadline.seconds()));
    wire_.send(WireKind::kGather, bytes);
    auto texts = unpack_texts(expect(WireKind::kGathered, what, deadline.seconds()), options_.size);
    if (!texts) fail_garbled();
    return std::move(*texts);
  }

  // Tries each address that the host name resolves to. Returns true once the store has accepted this rank and all ranks
  // are connected.
  bool connect_to_any(const Deadline& deadline) {
    const Resolved resolved = resolve_host(options_.address.host, options_.address.port);
    if (resolved.addresses.empty()) why_not_ = resolved.why_none;
    for (const SocketAddress& address : resolved.addresses) {
      if (try_connect(address, deadline)) return true;
    }
    return false;
  }

  bool try_connect(const SocketAddress& address, const Deadline& deadline) {
    Opened opened = begin_connection(address);
    if (!opened.socket.valid()) {
      why_not_ = error_text(opened.error);
      return false;
    }
    const Deadline attempt = Timeouts::for_address();
    for (;;) {
      pollfd socket{opened.socket.get(), POLLOUT, 0};
      poll_briefly({&socket, 1});
      if (socket.revents != 0) break;
      if (attempt.expired() || deadline.expired()) {
        why_not_ = "no answer";
        return false;
      }
    }
    if (const int error = connection_error(opened.socket); error != 0) {
      why_not_ = error_text(error);
      return false;
    }
    wire_ = Wire(std::move(opened.socket));
    try {
      if (secret_.is_given() && !prove(address, deadline)) return false;
      const Hello hello = hello_of(options_);
      wire_.send(WireKind::kHello, bytes_of(hello));
      auto texts =
          unpack_texts(expect(WireKind::kComplete, "coming to the store", options_.seconds), options_.size + 1);
      if (!texts) fail_garbled();
      session_ = printable(texts->back());
      texts->pop_back();
      for (const std::string& host : *texts) hosts_.push_back(printable(host));
    } catch (const Closed&) {
      if (wire_.is_foreign()) {
        fail(ErrorCode::kUsage, fmt::format("the server at {} is not a ringattn store", address.text()),
             "something else serves that port", "Choose a port that nothing else uses, not even torchrun.");
      }
      why_not_ = "the connection was closed";  // rank 0 has ended, and may be started again
      return false;
    }
    return true;
  }

  // Proves the secret to the store, which proves it first: a stranger that serves the address learns nothing about the
  // job.
  bool prove(const SocketAddress& address, const Deadline& deadline) {
    const Introduction introduction = introduce(Purpose::kStore, options_.rank, 0, options_.size);
    wire_.send(WireKind::kIntroduction, bytes_of(introduction));
    const Deadline attempt = Timeouts::for_answer();
    std::optional<WireFrame> frame;
    while (!(frame = wire_.take())) {
      if (attempt.expired() || deadline.expired()) {
        why_not_ = "rank 0 did not prove that it knows the secret";
        return false;
      }
      pollfd socket = wire_.interest();
      poll_briefly({&socket, 1});
      if (!wire_.move(kMaxBytesBeforeProof)) {
        throw Closed(
            Error(ErrorCode::kPeer, "the store has closed the connection", "it has proved nothing", "See it."));
      }
    }
    const auto proof = value_of<Proof>(frame->body);
    const auto keys = frame->kind == WireKind::kProof && proof ? check_proof(secret_, introduction, *proof, {})
                                                               : std::optional<ConnectionKeys>();
    if (keys) {
      wire_.authenticate(keys->to_listener, keys->to_caller);
      return true;
    }
    // Text from a server that has proved nothing is not shown.
    wire_.send(WireKind::kMismatch, {});
    wire_.flush();
    fail_rank(Error(ErrorCode::kPeer,
                    fmt::format("rank {} and rank 0, at {}, have different secrets", options_.rank, address.text()),
                    frame->kind == WireKind::kProof ? "the server there does not prove that it knows this rank's"
                                                    : "the server there has none",
                    "Give all ranks the same RINGATTN_STORE_SECRET, or none of them one."));
  }

  // The connection has ended without an error frame.
  class Closed : public Error {
   public:
    explicit Closed(Error error) : Error(std::move(error)) {}
  };

  // Waits for the next frame, which must be of `kind`, and returns its body.
  std::string expect(WireKind kind, std::string_view what, double seconds) {
    const Deadline deadline = Timeouts::derived(seconds + kServerFirst).for_peer();
    for (;;) {
      const bool open = wire_.move(max_gathered(options_.size));
      if (std::optional<WireFrame> frame = wire_.take()) {
        if (frame->kind == WireKind::kFailed) throw Error(unpack_error(frame->body));
        if (frame->kind == kind) return std::move(frame->body);
        fail_garbled();
      }
      if (!open) {
        throw Closed(Error(ErrorCode::kPeer, "rank 0 left while the ranks connected",
                           wire_.is_forged() ? "what its store sent was changed in transit"
                                             : fmt::format("its store at {} has closed", options_.address.text()),
                           "See its own message."));
      }
      if (wait_expired(deadline)) {
        const int server[] = {0};
        fail_late(what, deadline, RankNames(), options_.rank, server);
      }
      pollfd socket = wire_.interest();
      poll_briefly({&socket, 1});
    }
  }

  [[noreturn]] void fail_garbled() const {
    fail_rank(Error(ErrorCode::kPeer,
                    fmt::format("the store at {} has sent a frame out of order", options_.address.text()),
                    "another frame was expected", "See whether rank 0 runs the same build."));
  }

  [[noreturn]] void fail_unreachable(const Deadline& deadline) const {
    fail_rank(Error(ErrorCode::kPeer,
                    fmt::format("rank {} can't reach rank 0's store at {} within {:g} s", options_.rank,
                                options_.address.text(), deadline.seconds()),
                    why_not_,
                    {"See whether rank 0 was started and that address is its host's; raise ", setting("timeout"),
                     " if it only starts slowly."}));
  }

  const StoreOptions options_;
  const Secret secret_;
  Wire wire_;
  std::vector<std::string> hosts_;
  std::string session_;
  std::string why_not_ = "no answer";
};

}  // namespace

std::unique_ptr<Store> connect_to_store(const StoreOptions& options, const Secret& secret) {
  return std::make_unique<StoreConnection>(options, secret);
}

}  // namespace ringattn
