// SPDX-License-Identifier: Apache-2.0
#include "ops/reshard/reshard.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/ring/enqueued_runs.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/reshard.hpp"
#include "attention/ring/warm_up.hpp"
#include "attention/tokens/batch.hpp"
#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "comm/collective.hpp"
#include "ops/rank_config.hpp"

namespace ringattn {

namespace {

constexpr double kBytesPerSecond = 1e9;  // of a slow link, for deadlines
constexpr int kAttentionTile = 128;      // of tokens, which stripes are multiples of

// Copies `rows` rows of one buffer to rows of another.
struct RowSpan {
  std::int64_t from_row = 0;
  std::int64_t to_row = 0;
  std::int64_t rows = 0;
};

// Rows sent to or received from one peer, in order of tokens.
struct PeerRows {
  std::int64_t rows = 0;
  std::int64_t first_row = 0;  // first row, in the rank's rows if in_rows, else in the buffer
  bool in_rows = false;
  std::vector<RowSpan> spans;  // copies between the rank's rows and the buffer
};

// Text of the first difference between the sequences of two layouts.
std::string difference_of(const Layout& from, const Layout& to) {
  const std::span<const std::int64_t> a = from.cu();
  const std::span<const std::int64_t> b = to.cu();
  if (a.size() != b.size()) {
    return fmt::format("layouts of {} and of {}", counted(a.size() - 1, "sequence"), counted(b.size() - 1, "sequence"));
  }
  std::size_t s = 0;
  while (a[s + 1] - a[s] == b[s + 1] - b[s]) ++s;
  return fmt::format("sequence {} has {} tokens in one layout and {} in the other", s, a[s + 1] - a[s],
                     b[s + 1] - b[s]);
}

}  // namespace

Layout attention_layout(const std::vector<std::int64_t>& lengths, int world, const LayoutRequest& request) {
  std::vector<Sequence> sequences;
  for (const std::int64_t length : lengths) sequences.push_back({length, length, 0});
  const auto work = [](const TokenRun& run) { return static_cast<double>(run.end - run.begin); };
  return make_layout(Batch(std::move(sequences)), work, world, request, kAttentionTile, kAttentionTile).queries;
}

// One pass for all ranks: row_transfers() would take one for each.
std::vector<std::int64_t> reshard_bytes(const Layout& from, const Layout& to, std::int64_t token_bytes) {
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(to.world()));
  auto there = to.owners().begin();
  for (const OwnedRun& here : from.owners()) {
    for (std::int64_t token = here.token; token < here.end();) {
      while (there->end() <= token) ++there;
      const std::int64_t until = std::min(here.end(), there->end());
      if (there->owner != here.owner) bytes[static_cast<std::size_t>(there->owner)] += (until - token) * token_bytes;
      token = until;
    }
  }
  return bytes;
}

AttentionReshard attention_reshard(const std::vector<std::int64_t>& lengths, const Layout& layer,
                                   std::int64_t token_bytes) {
  const Layout zigzag = attention_layout(lengths, layer.world(), {LayoutKind::kZigzag, 0});
  return {reshard_bytes(zigzag, layer, token_bytes), reshard_bytes(layer, zigzag, token_bytes)};
}

std::string AttentionReshard::text() const {
  const auto most = [](const std::vector<std::int64_t>& bytes) {
    return format_bytes(static_cast<double>(*std::ranges::max_element(bytes)));
  };
  return fmt::format(
      "beside attention in its zigzag layout: a rank receives up to {} of rows before the layer, {} after it",
      most(before), most(after));
}

void AttentionReshard::write(JsonWriter& json) const {
  json.key("reshard").begin_object().member("attention_layout", layout_name(LayoutKind::kZigzag));
  for (const auto& [name, bytes] : {std::pair{"bytes_before", &before}, {"bytes_after", &after}}) {
    json.key(name).begin_array();
    for (const std::int64_t received : *bytes) json.value(received);
    json.end_array();
  }
  json.end_object();
}

struct Reshard::Impl {
  Impl(std::int64_t bytes, Transport& the_transport, Backend& the_backend, double timeout_seconds)
      : token_bytes(bytes),
        transport(the_transport),
        backend(the_backend),
        collective(transport, Timeouts(timeout_seconds)) {}

  void check(const Layout& from, const Layout& to) const;
  void plan(const Layout& from, const Layout& to);
  void allocate();
  void connect();
  Exchange exchange(const std::byte* rows) const;
  void copy(std::byte* to, const std::byte* from, const std::vector<RowSpan>& spans, Stream stream);

  std::int64_t token_bytes;
  Transport& transport;
  Backend& backend;
  Collective collective;
  std::vector<RowSpan> own;       // rows that stay on this rank
  std::map<int, PeerRows> sends;  // [peer]
  std::map<int, PeerRows>
      receives;                // [peer]; always through the buffer, because announced memory must not be the caller's
  std::int64_t sent_rows = 0;  // through the buffer
  std::int64_t received_rows = 0;
  Buffer outgoing;
  Buffer arriving;
  std::int64_t announced = kNotAnnounced;
  std::optional<EnqueuedRuns> enqueued;
};

void Reshard::Impl::check(const Layout& from, const Layout& to) const {
  if (from.world() != transport.size() || to.world() != transport.size()) {
    fail(ErrorCode::kUsage, fmt::format("layouts of {} and {} ranks", from.world(), to.world()),
         fmt::format("the transport has {}", transport.size()), "Give layouts of this world's ranks.");
  }
  if (!std::ranges::equal(from.cu(), to.cu())) {
    fail(ErrorCode::kUsage, difference_of(from, to), "both layouts should have the same sequences",
         "Give two layouts of one batch.");
  }
  if (token_bytes < 1) {
    fail(ErrorCode::kUsage, fmt::format("rows of {} bytes", token_bytes), "there is nothing to move",
         "Give the bytes of one token's row.");
  }
  if (transport.size() > 1 && transport.memory() != backend.memory()) {
    fail(ErrorCode::kUnsupported, fmt::format("rows of this memory can't move over {}", transport.name()),
         "the transport moves another kind of memory", "Give the backend that works with this transport.");
  }
}

void Reshard::Impl::plan(const Layout& from, const Layout& to) {
  const int self = transport.rank();
  for (const RowTransfer& moved : row_transfers(from, to, self)) {
    if (moved.from == self && moved.to == self) {
      own.push_back({moved.from_row, moved.to_row, moved.rows});
    } else if (moved.from == self) {
      PeerRows& peer_rows = sends[moved.to];
      peer_rows.spans.push_back({moved.from_row, peer_rows.rows, moved.rows});
      peer_rows.rows += moved.rows;
    } else {
      PeerRows& peer_rows = receives[moved.from];
      peer_rows.spans.push_back({peer_rows.rows, moved.to_row, moved.rows});
      peer_rows.rows += moved.rows;
    }
  }
  for (auto& [peer, peer_rows] : sends) {
    // True if the rows are contiguous in the rank's own rows, so that they are sent in place.
    const RowSpan& first = peer_rows.spans.front();
    const bool one = std::ranges::all_of(peer_rows.spans, [&](const RowSpan& row_span) {
      return row_span.from_row - first.from_row == row_span.to_row;
    });
    peer_rows.in_rows = one;
    peer_rows.first_row = one ? first.from_row : sent_rows;
    if (one) continue;
    for (RowSpan& row_span : peer_rows.spans) row_span.to_row += sent_rows;
    sent_rows += peer_rows.rows;
  }
  for (auto& [peer, peer_rows] : receives) {
    peer_rows.first_row = received_rows;
    for (RowSpan& row_span : peer_rows.spans) row_span.from_row += received_rows;
    received_rows += peer_rows.rows;
  }
}

void Reshard::Impl::allocate() {
  // At min_bytes one byte for each rank, for warm_up_transport().
  const auto min_bytes = static_cast<std::size_t>(transport.size());
  if (sent_rows > 0) outgoing = backend.allocate(static_cast<std::size_t>(sent_rows * token_bytes));
  arriving = backend.allocate(std::max(min_bytes, static_cast<std::size_t>(received_rows * token_bytes)));
  enqueued.emplace(backend, transport, collective.timeouts());
}

void Reshard::Impl::connect() {
  if (transport.size() == 1) return;
  const Exchange only[] = {exchange(nullptr)};
  announced = transport.announce(only, collective.timeouts().for_peer());
  if (backend.memory() == MemoryKind::kDevice) warm_up_transport(collective, transport, backend, arriving.data());
}

// `rows`: null for announce().
Exchange Reshard::Impl::exchange(const std::byte* rows) const {
  Exchange exchange;
  exchange.label = "rows for another layout";
  for (const auto& [peer, peer_rows] : sends) {
    const std::byte* const from = peer_rows.in_rows ? rows : outgoing.data();
    const std::byte* const data = from == nullptr ? nullptr : from + peer_rows.first_row * token_bytes;
    exchange.sends.push_back({peer, 0, {{data, static_cast<std::size_t>(peer_rows.rows * token_bytes)}}});
  }
  for (const auto& [peer, peer_rows] : receives) {
    exchange.receives.push_back({peer,
                                 0,
                                 {{arriving.data() + peer_rows.first_row * token_bytes,
                                   static_cast<std::size_t>(peer_rows.rows * token_bytes)}}});
  }
  return exchange;
}

// Copies with equal sizes and equal strides are merged into one 2D copy.
void Reshard::Impl::copy(std::byte* to, const std::byte* from, const std::vector<RowSpan>& spans, Stream stream) {
  for (std::size_t i = 0; i < spans.size();) {
    const RowSpan& first = spans[i];
    std::size_t count = 1;
    std::int64_t from_step = first.rows;
    std::int64_t to_step = first.rows;
    while (i + count < spans.size() && spans[i + count].rows == first.rows) {
      const RowSpan& last = spans[i + count - 1];
      const RowSpan& next = spans[i + count];
      if (count == 1) {
        from_step = next.from_row - last.from_row;
        to_step = next.to_row - last.to_row;
        if (from_step < first.rows || to_step < first.rows) break;
      }
      if (next.from_row - last.from_row != from_step || next.to_row - last.to_row != to_step) break;
      ++count;
    }
    if (count == 1) from_step = to_step = first.rows;
    backend.copy_rows(to + first.to_row * token_bytes, to_step * token_bytes, from + first.from_row * token_bytes,
                      from_step * token_bytes, first.rows * token_bytes, static_cast<std::int64_t>(count), stream);
    i += count;
  }
}

Reshard::Reshard(const Layout& from, const Layout& to, std::int64_t token_bytes, Transport& transport, Backend& backend,
                 double timeout_seconds)
    : impl_(std::make_unique<Impl>(token_bytes, transport, backend, timeout_seconds)) {
  Impl& impl = *impl_;
  impl.collective.run_collectively([&] {
    impl.check(from, to);
    impl.plan(from, to);
  });
  handshake(impl.collective, rank_config(from, to, token_bytes, backend));
  impl.collective.run_collectively([&] { impl.allocate(); });
  impl.connect();
}

Reshard::~Reshard() = default;
Reshard::Reshard(Reshard&&) noexcept = default;

std::int64_t Reshard::bytes_received() const { return impl_->received_rows * impl_->token_bytes; }
std::size_t Reshard::memory_bytes() const { return impl_->outgoing.bytes() + impl_->arriving.bytes(); }

void Reshard::enqueue(const void* rows, void* target, Stream stream) {
  Impl& impl = *impl_;
  check_capture(impl.backend, stream, "this reshard", impl.transport, "moves them to other ranks");
  const bool several = impl.transport.size() > 1;
  const auto* from = static_cast<const std::byte*>(rows);
  auto* to = static_cast<std::byte*>(target);
  const double seconds = static_cast<double>(impl.received_rows * impl.token_bytes) / kBytesPerSecond;
  impl.enqueued->enqueue(stream, seconds, [&] {
    for (const auto& [peer, peer_rows] : impl.sends) {
      if (!peer_rows.in_rows) impl.copy(impl.outgoing.data(), from, peer_rows.spans, stream);
    }
    Ticket ticket = 0;
    if (several) {
      Exchange exchange = impl.exchange(from);
      exchange.announced = impl.announced;
      ticket = impl.transport.post(std::move(exchange), stream);
    }
    // Copies own rows while the others are in flight.
    impl.copy(to, from, impl.own, stream);
    if (several) impl.transport.wait(ticket, stream, impl.collective.timeouts().for_work(seconds));
    for (const auto& [peer, peer_rows] : impl.receives) impl.copy(to, impl.arriving.data(), peer_rows.spans, stream);
  });
}

void Reshard::wait() {
  if (impl_->enqueued->any()) impl_->enqueued->wait_all();
}

}  // namespace ringattn
