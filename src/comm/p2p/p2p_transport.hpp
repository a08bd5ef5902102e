// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: the transport itself. comm/p2p/setup.cpp makes it once its memory is shared.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/cuda.hpp"
#include "comm/failure.hpp"
#include "comm/p2p/mailboxes.hpp"
#include "comm/p2p/memory.hpp"
#include "comm/p2p/p2p.hpp"
#include "comm/p2p/segment.hpp"

namespace ringattn {

class P2pTransport final : public Transport {
 public:
  P2pTransport(std::unique_ptr<Transport> control, std::unique_ptr<P2pSegment> segment,
               std::shared_ptr<P2pMemory> memory, RankNames names, const P2pOptions& options);
  ~P2pTransport() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view name() const override { return "p2p"; }
  MemoryKind memory() const override { return MemoryKind::kDevice; }
  int device() const override { return device_; }
  Route route() const override { return Route::kDirect; }
  Transport& host() override { return *control_; }

  std::vector<std::string> all_gather(std::string_view bytes, const Deadline& deadline) override;
  void barrier(const Deadline& deadline) override { control_->barrier(deadline); }

  std::int64_t announce(std::span<const Exchange> exchanges, const Deadline& deadline) override;
  Ticket post(Exchange exchange, Stream stream) override;
  void wait(Ticket ticket, Stream stream, const Deadline& deadline) override;
  void progress() override;
  bool finished(Ticket ticket) override;
  void abandon() noexcept override;

  std::unique_ptr<Transport> split_world(int size, const Deadline& deadline) override;
  bool abort(const Error& error) override;

 private:
  enum class Push { kWaiting, kEnqueued, kDropped };

  // An exchange from post() until the device has finished its wait.
  struct Flight {
    Exchange exchange;
    Ticket ticket = 0;
    std::vector<std::uint32_t> receive_numbers;  // [exchange.receives] message numbers
    std::vector<std::uint32_t> send_numbers;     // [exchange.sends] message numbers
    std::vector<Push> pushes;                    // [exchange.sends]
    std::vector<std::size_t> order;              // indices into exchange.sends, by round, then by distance to the right
    std::size_t waiting = 0;                     // sends not enqueued yet
    bool spread = false;                         // fewer receivers than lanes: all lanes serve each message
    std::optional<CudaEvent> posted;             // recorded in post(): the send spans may be read
    double seconds = 0.0;                        // seconds that the device may wait
    std::optional<Deadline> limit;               // deadline of that wait, once the device has begun it
  };

  struct CopySpan {
    std::byte* target;
    const std::byte* source;
    std::size_t bytes;
  };

  PairCounters& to(int peer) const { return segment_->pair(rank_, peer); }
  PairCounters& from(int peer) const { return segment_->pair(peer, rank_); }
  Ticket next_ticket() const { return waited_ + static_cast<Ticket>(flights_.size()); }
  int distance_to(int peer) const { return (peer - rank_ + size_) % size_; }

  void check_alive();
  void check_stream(Stream stream, std::string_view what) const;
  void follow_last(cudaStream_t stream);
  void remember_last(cudaStream_t stream);

  ReceiveNotice make_receive_notice(const ReceiveMessage& message, const std::string& name);
  CudaEvent acquire_event();
  void release_event(std::optional<CudaEvent>& event);

  void pump();
  const ReceiveNotice* receive_notice_of(const Flight& flight, std::size_t send);
  bool may_push(const Flight& flight, std::size_t send);
  void push(Flight& flight, std::size_t send);
  std::vector<CopySpan> copy_spans_of(const Flight& flight, std::size_t send, const ReceiveNotice& notice) const;
  static std::vector<CopySpan> cut(const std::vector<CopySpan>& copy_spans, std::size_t begin, std::size_t end);
  static void copy(const std::vector<CopySpan>& copy_spans, cudaStream_t stream);
  void enqueue_wait(Flight& flight, cudaStream_t stream);

  // True if this exchange can proceed only after the peers' hosts have posted it.
  bool waits_for_hosts(const Flight& flight) const {
    return !own_processes_ || flight.exchange.announced == kNotAnnounced;
  }
  bool all_pushed(const Flight& flight) const;
  bool received(const Flight& flight, std::size_t receive) const;
  bool sent(const Flight& flight, std::size_t send) const;
  // True if `counter` shows that the receives that a send of `round` waits for have happened.
  bool may_send(const Flight& flight, int round, Counter PairCounters::*counter) const;
  std::vector<int> awaited_by_host(const Flight& flight);
  std::vector<int> awaited_by_device(const Flight& flight) const;

  void drop_passed();
  void check_on_device();
  void give_up();
  bool lanes_idle() const;

  const std::unique_ptr<Transport> control_;
  const std::unique_ptr<P2pSegment> segment_;
  std::shared_ptr<P2pMemory> memory_;
  const RankNames names_;
  const P2pOptions options_;
  const int rank_;
  const int size_;
  const int device_;
  const bool own_processes_;  // each rank is a process with its own GPU
  P2pMailboxes mailboxes_;
  std::vector<CudaStream> lanes_;
  std::vector<CudaEvent> events_;  // pool of unused events
  std::optional<CudaEvent> gate_;  // lanes that help with a message start after it
  std::vector<CudaEvent> joins_;   // [lanes] recorded when a helping lane is done

  std::int64_t announced_ = 0;                // exchanges announced so far
  std::vector<std::uint32_t> sent_to_;        // [size] messages posted so far
  std::vector<std::uint32_t> received_from_;  // [size] receives posted so far
  std::vector<std::uint32_t> pushed_to_;      // [size] messages enqueued or dropped so far
  std::deque<Flight> flights_;                // posted and not yet waited for, in order
  std::deque<Flight> on_device_;              // waited for; the device may not have finished them yet
  Ticket waited_ = 0;                         // number of the first of flights_
  bool broken_ = false;                       // gave up exchanges
  bool unsafe_ = false;                       // a peer may still write to memory of this rank

  // Orders work of the caller's different streams by the order of the calls, because counters may only increase.
  std::optional<cudaStream_t> last_stream_;
  std::optional<CudaEvent> last_;
};

}  // namespace ringattn
