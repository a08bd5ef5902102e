// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/block_mover.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace ringattn {

namespace {

std::size_t parity_of(std::int64_t block) { return static_cast<std::size_t>(block % 2); }

// The message of an exchange to or from the peer of `planned`, in its round. A round's messages ascend by
// `distance`(peer), as in a plan.
template <class Message, class Distance>
Message& message_of(std::vector<Message>& messages, const PlannedMessage& planned, const Distance& distance) {
  const auto order = [&](const auto& message) { return std::pair(message.round, distance(message.peer)); };
  auto at = std::ranges::lower_bound(messages, order(planned), {}, order);
  if (at == messages.end() || order(*at) != order(planned)) {
    at = messages.insert(at, Message{planned.peer, planned.round, {}});
  }
  return *at;
}

std::vector<std::size_t> streams_of(std::span<const RowStream> streams, bool queries) {
  std::vector<std::size_t> indices;
  for (std::size_t s = 0; s < streams.size(); ++s) {
    if (streams[s].queries == queries) indices.push_back(s);
  }
  return indices;
}

}  // namespace

BlockMover::BlockMover(const Plan& plan, std::span<const RowStream> streams, Transport& transport, Backend& backend,
                       bool checksum)
    : plan_(plan),
      streams_(streams),
      transport_(transport),
      backend_(backend),
      checksum_(checksum),
      shard_(streams.size(), nullptr) {
  directions_.push_back({plan, streams_of(streams, false), {}});
  if (plan.to_keys != nullptr) directions_.push_back({*plan.to_keys, streams_of(streams, true), {}});
}

void BlockMover::announce(std::array<StreamRows, 2> buffers, const Deadline& deadline) {
  if (checksum_) return;  // checksums lie in the object, so their addresses can't be announced
  buffers_ = std::move(buffers);
  std::vector<Exchange> exchanges;
  for (std::size_t block = 0; block < plan_.blocks.size(); ++block) {
    exchanges.push_back(exchange_of(static_cast<std::int64_t>(block)));
  }
  announced_ = transport_.announce(exchanges, deadline);
}

void BlockMover::bind(StreamRows shard, std::array<StreamRows, 2> buffers) {
  shard_ = std::move(shard);
  buffers_ = std::move(buffers);
}

std::byte* BlockMover::rows_of(const MessagePart& part, std::int64_t block, std::size_t stream) const {
  const bool own = part.owner == plan_.rank;
  const StreamRows& rows = own ? shard_ : buffers_[parity_of(block)];
  if (rows[stream] == nullptr) return nullptr;
  return rows[stream] + (own ? part.owner_row : part.buffer_row) * streams_[stream].token_bytes;
}

std::size_t BlockMover::bytes_of(const MessagePart& part, std::size_t stream) const {
  return static_cast<std::size_t>(part.rows * streams_[stream].token_bytes);
}

// One hash over all streams: the hash of a stream is the seed of the next.
std::uint64_t BlockMover::checksum_of(const Direction& direction, const MessagePart& part, std::int64_t block) const {
  std::uint64_t hash = 0;
  for (const std::size_t stream : direction.streams) {
    hash = XXH3_64bits_withSeed(rows_of(part, block, stream), bytes_of(part, stream), hash);
  }
  return hash;
}

void BlockMover::post(std::int64_t block, Stream stream) {
  for (Direction& direction : directions_) {
    if (!checksum_) break;
    const std::vector<MessagePart>& parts = direction.block(block).parts;
    std::vector<std::uint64_t>& checksums = direction.checksums[parity_of(block)];
    checksums.assign(parts.size(), 0);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].owner == plan_.rank) checksums[i] = checksum_of(direction, parts[i], block);
    }
  }
  Exchange exchange = exchange_of(block);
  if (announced_ != kNotAnnounced) exchange.announced = announced_ + block;
  tickets_[parity_of(block)] = transport_.post(std::move(exchange), stream);
}

Exchange BlockMover::exchange_of(std::int64_t block) {
  Exchange exchange;
  exchange.label = fmt::format("block {} of {}", block + 1, plan_.blocks.size());
  for (Direction& direction : directions_) add_direction(direction, block, exchange);
  return exchange;
}

void BlockMover::add_direction(Direction& direction, std::int64_t block, Exchange& exchange) {
  const BlockPlan& planned = direction.block(block);
  const auto add_spans = [&](const PlannedMessage& message, auto& spans) {
    using SpanType = typename std::remove_reference_t<decltype(spans)>::value_type;
    for (const std::int32_t index : message.parts) {
      const MessagePart& part = planned.parts[static_cast<std::size_t>(index)];
      for (const std::size_t s : direction.streams) {
        spans.push_back(SpanType{rows_of(part, block, s), bytes_of(part, s)});
      }
      if (checksum_) {
        std::uint64_t& checksum = direction.checksums[parity_of(block)][static_cast<std::size_t>(index)];
        spans.push_back(SpanType{reinterpret_cast<std::byte*>(&checksum), sizeof checksum});
      }
    }
  };
  const auto distance = [this](int from, int to) { return (to - from + plan_.world) % plan_.world; };
  for (const PlannedMessage& message : planned.sends) {
    const auto to_peer = [&](int peer) { return distance(plan_.rank, peer); };
    add_spans(message, message_of(exchange.sends, message, to_peer).spans);
  }
  for (const PlannedMessage& message : planned.receives) {
    const auto from_peer = [&](int peer) { return distance(peer, plan_.rank); };
    add_spans(message, message_of(exchange.receives, message, from_peer).spans);
  }
}

void BlockMover::wait(std::int64_t block, Stream stream, const Deadline& deadline) {
  transport_.wait(tickets_[parity_of(block)], stream, deadline);
  const StreamRows& buffer = buffers_[parity_of(block)];
  for (const Direction& direction : directions_) {
    if (checksum_) verify(direction, block);
    for (const RowCopy& copy : direction.block(block).copies) {
      const StreamRows& from = copy.from_shard ? shard_ : buffer;
      for (const std::size_t s : direction.streams) {
        const std::int64_t bytes = streams_[s].token_bytes;
        backend_.copy_rows(buffer[s] + copy.to_row * bytes, bytes, from[s] + copy.from_row * bytes, bytes, bytes,
                           copy.rows, stream);
      }
    }
  }
}

void BlockMover::verify(const Direction& direction, std::int64_t block) const {
  const BlockPlan& planned = direction.block(block);
  for (const PlannedMessage& message : planned.receives) {
    for (const std::int32_t index : message.parts) {
      const MessagePart& part = planned.parts[static_cast<std::size_t>(index)];
      const std::uint64_t found = checksum_of(direction, part, block);
      const std::uint64_t sent = direction.checksums[parity_of(block)][static_cast<std::size_t>(index)];
      if (found == sent) continue;
      fail(ErrorCode::kPeer,
           fmt::format("rank {} received {} rows of rank {} damaged in block {} of {}, forwarded by rank {}",
                       plan_.rank, part.rows, part.owner, block + 1, plan_.blocks.size(), message.peer),
           fmt::format("checksum {:016x}, rank {} computed {:016x}", found, part.owner, sent),
           "Check the link and memory of both hosts.");
    }
  }
}

}  // namespace ringattn
