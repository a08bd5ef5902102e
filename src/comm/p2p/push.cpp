// SPDX-License-Identifier: Apache-2.0
// The sender's part of transport `p2p`: enqueues pushes once receivers have said where they may write.
#include <cudaTypedefs.h>
#include <fmt/format.h>

#include <algorithm>

#include "comm/exchange.hpp"
#include "comm/p2p/driver.hpp"
#include "comm/p2p/p2p_transport.hpp"

namespace ringattn {

namespace {

// For smaller messages, spreading is not worth the events between lanes.
constexpr std::size_t kSpreadBytes = std::size_t{1} << 20;

// From this number of copies on, one batched call submits them, if CUDA has that call.
[[maybe_unused]] constexpr std::size_t kBatch = 4;

// The end of the allocation that contains an address, even if another library allocated it. Caches the last allocation.
class AllocationEnds {
 public:
  const std::byte* of(const std::byte* data) {
    if (data >= begin_ && data < end_) return end_;
    static const auto address_range = driver_function<PFN_cuMemGetAddressRange_v3020>("cuMemGetAddressRange", 3020);
    CUdeviceptr base = 0;
    std::size_t bytes = 0;
    // Host memory has no range: its spans are not merged.
    if (address_range(&base, &bytes, reinterpret_cast<CUdeviceptr>(data)) != CUDA_SUCCESS) return data;
    begin_ = reinterpret_cast<const std::byte*>(base);
    end_ = begin_ + bytes;
    return end_;
  }

 private:
  const std::byte* begin_ = nullptr;
  const std::byte* end_ = nullptr;
};

}  // namespace

void P2pTransport::pump() {
  mailboxes_.move(*memory_);
  for (Flight& flight : flights_) {
    if (flight.waiting == 0) continue;
    for (const std::size_t send : flight.order) {
      if (flight.pushes[send] != Push::kWaiting) continue;
      if (may_push(flight, send)) {
        push(flight, send);
      } else if (own_processes_) {
        return;  // later operations in program order must be enqueued later
      }
    }
  }
}

// The receiver's notice for a message; nullptr if it has not arrived yet.
const ReceiveNotice* P2pTransport::receive_notice_of(const Flight& flight, std::size_t send) {
  const SendMessage& message = flight.exchange.sends[send];
  const std::int64_t announced = flight.exchange.announced;
  if (announced != kNotAnnounced) return mailboxes_.announced(message.peer, announced, message.round);
  const std::deque<ReceiveNotice>& notices = mailboxes_.notices(message.peer);
  return notices.empty() ? nullptr : &notices.front();
}

// Messages to a peer are pushed in order, each after the operations that it waits for.
bool P2pTransport::may_push(const Flight& flight, std::size_t send) {
  const SendMessage& message = flight.exchange.sends[send];
  const std::uint32_t number = flight.send_numbers[send];
  if (number != pushed_to_[static_cast<std::size_t>(message.peer)] + 1 || receive_notice_of(flight, send) == nullptr) {
    return false;
  }
  if (!waits_for_hosts(flight)) return true;
  return to(message.peer).posted.reached(number) && may_send(flight, message.round, &PairCounters::pushed);
}

bool P2pTransport::may_send(const Flight& flight, int round, Counter PairCounters::*counter) const {
  for (std::size_t i = 0; i < flight.receive_numbers.size(); ++i) {
    const ReceiveMessage& receive = flight.exchange.receives[i];
    if (receive.round >= round) break;  // rounds ascend
    if (!(from(receive.peer).*counter).reached(flight.receive_numbers[i])) return false;
  }
  return true;
}

void P2pTransport::push(Flight& flight, std::size_t send) {
  const SendMessage& message = flight.exchange.sends[send];
  const std::uint32_t number = flight.send_numbers[send];
  const std::vector<CopySpan> copy_spans = copy_spans_of(flight, send, *receive_notice_of(flight, send));
  if (flight.exchange.announced == kNotAnnounced) mailboxes_.notices(message.peer).pop_front();
  ++pushed_to_[static_cast<std::size_t>(message.peer)];
  --flight.waiting;

  // A receiver that gives up first sets `given_up` and then reads `pushing`. Here `pushing` is set before `given_up` is
  // read. So at least one of the two sees the other.
  PairCounters& pair = to(message.peer);
  const std::uint32_t before = pair.pushing.now();
  pair.pushing.value.store(number, std::memory_order_seq_cst);
  if (segment_->rank(message.peer).given_up.value.load(std::memory_order_seq_cst) != 0) {
    pair.pushing.value.store(before, std::memory_order_release);
    flight.pushes[send] = Push::kDropped;
    return;
  }

  const std::size_t home = static_cast<std::size_t>(distance_to(message.peer) - 1) % lanes_.size();
  const cudaStream_t lane = lanes_[home].get();
  check_cuda(cudaStreamWaitEvent(lane, flight.posted->get(), 0), "cudaStreamWaitEvent");
  MemoryOperations waits = segment_->operations();
  for (std::size_t i = 0; i < flight.receive_numbers.size(); ++i) {
    const ReceiveMessage& receive = flight.exchange.receives[i];
    if (receive.round >= message.round) break;
    const Counter& done = from(receive.peer).done;
    if (!done.reached(flight.receive_numbers[i])) waits.wait(done, flight.receive_numbers[i]);
  }
  if (!pair.ready.reached(number)) waits.wait(pair.ready, number);
  waits.enqueue(lane);

  const std::size_t bytes = message_bytes(message);
  const std::size_t lanes = flight.spread && bytes >= kSpreadBytes ? lanes_.size() : 1;
  if (lanes > 1) gate_->record(lane);
  for (std::size_t i = lanes; i-- > 0;) {
    const std::size_t serving = (home + i) % lanes_.size();
    const cudaStream_t stream = lanes_[serving].get();
    if (i > 0) check_cuda(cudaStreamWaitEvent(stream, gate_->get(), 0), "cudaStreamWaitEvent");
    copy(cut(copy_spans, bytes * i / lanes, bytes * (i + 1) / lanes), stream);
    if (i > 0) joins_[serving].record(stream);
  }
  for (std::size_t i = 1; i < lanes; ++i) {
    check_cuda(cudaStreamWaitEvent(lane, joins_[(home + i) % lanes_.size()].get(), 0), "cudaStreamWaitEvent");
  }
  MemoryOperations done = segment_->operations();
  done.write(pair.done, number);
  done.enqueue(lane);
  flight.pushes[send] = Push::kEnqueued;
  pair.pushed.value.store(number, std::memory_order_release);
}

// Splits the bytes of a message wherever the memory of either side is not contiguous.
std::vector<P2pTransport::CopySpan> P2pTransport::copy_spans_of(const Flight& flight, std::size_t send,
                                                                const ReceiveNotice& notice) const {
  const SendMessage& message = flight.exchange.sends[send];
  std::uint64_t wanted = 0;
  for (const Run& run : notice.runs) wanted += run.bytes;
  const std::uint64_t bytes = message_bytes(message);
  const bool fits = flight.exchange.announced != kNotAnnounced ||
                    (notice.ticket == flight.ticket && notice.number == flight.send_numbers[send]);
  if (!fits || notice.round != message.round || wanted != bytes) {
    fail(ErrorCode::kInternal,
         fmt::format("the two sides of {} don't fit", exchange_name(flight.exchange, flight.ticket)),
         fmt::format("{} sends {} bytes in round {}, {} receives {} in round {} of exchange {}", names_.name(rank_),
                     bytes, message.round, names_.name(message.peer), wanted, notice.round, notice.ticket),
         kMisfitSuggestion);
  }
  std::vector<CopySpan> copy_spans;
  AllocationEnds ends;
  auto run = notice.runs.begin();
  std::uint64_t at = 0;  // offset in *run
  for (const SendSpan& span : message.spans) {
    for (std::size_t done = 0; done < span.bytes;) {
      const bool new_run = at == run->bytes;
      if (new_run) {
        ++run;
        at = 0;
      }
      const std::size_t count = std::min<std::size_t>(span.bytes - done, run->bytes - at);
      std::byte* target = memory_->address(message.peer, run->allocation, run->offset + at, count);
      const std::byte* source = span.data + done;
      CopySpan* last = copy_spans.empty() ? nullptr : &copy_spans.back();
      // Adjacent bytes may belong to two allocations, which a single copy must not span.
      if (!new_run && last != nullptr && last->target + last->bytes == target && last->source + last->bytes == source &&
          source + count <= ends.of(last->source)) {
        last->bytes += count;
      } else {
        copy_spans.push_back({target, source, count});
      }
      done += count;
      at += count;
    }
  }
  return copy_spans;
}

// The part of `copy_spans` with the bytes [begin, end) of their concatenation.
std::vector<P2pTransport::CopySpan> P2pTransport::cut(const std::vector<CopySpan>& copy_spans, std::size_t begin,
                                                      std::size_t end) {
  std::vector<CopySpan> part;
  std::size_t at = 0;
  for (const CopySpan& copy_span : copy_spans) {
    const std::size_t from = std::max(begin, at);
    const std::size_t to = std::min(end, at + copy_span.bytes);
    if (from < to) part.push_back({copy_span.target + (from - at), copy_span.source + (from - at), to - from});
    at += copy_span.bytes;
  }
  return part;
}

void P2pTransport::copy(const std::vector<CopySpan>& copy_spans, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  if (copy_spans.size() >= kBatch) {
    std::vector<void*> targets;
    std::vector<const void*> sources;
    std::vector<std::size_t> sizes;
    for (const CopySpan& copy_span : copy_spans) {
      targets.push_back(copy_span.target);
      sources.push_back(copy_span.source);
      sizes.push_back(copy_span.bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
    check_cuda(cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), copy_spans.size(), &attributes,
                                    &first, 1, stream),
               "cudaMemcpyBatchAsync");
    return;
  }
#endif
  for (const CopySpan& copy_span : copy_spans) {
    check_cuda(cudaMemcpyAsync(copy_span.target, copy_span.source, copy_span.bytes, cudaMemcpyDefault, stream),
               "cudaMemcpyAsync");
  }
}

bool P2pTransport::all_pushed(const Flight& flight) const {
  for (std::size_t i = 0; i < flight.receive_numbers.size(); ++i) {
    if (!from(flight.exchange.receives[i].peer).pushed.reached(flight.receive_numbers[i])) return false;
  }
  return true;
}

bool P2pTransport::received(const Flight& flight, std::size_t receive) const {
  return from(flight.exchange.receives[receive].peer).done.reached(flight.receive_numbers[receive]);
}

bool P2pTransport::sent(const Flight& flight, std::size_t send) const {
  if (flight.pushes[send] != Push::kEnqueued) return flight.pushes[send] == Push::kDropped;
  return to(flight.exchange.sends[send].peer).done.reached(flight.send_numbers[send]);
}

}  // namespace ringattn
