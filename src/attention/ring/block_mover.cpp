// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/block_mover.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.hpp"

namespace ringattn {

namespace {

std::uint64_t checksum_of(const KvRows& rows, std::size_t k_bytes, std::size_t v_bytes) {
  return XXH3_64bits_withSeed(rows.v, v_bytes, XXH3_64bits(rows.k, k_bytes));
}

}  // namespace

BlockMover::BlockMover(const Plan& plan, const FoldSpec& spec, Transport& transport, Backend& backend,
                       const Memory& memory, bool checksum)
    : plan_(plan), spec_(spec), transport_(transport), backend_(backend), memory_(memory), checksum_(checksum) {}

BlockMover::~BlockMover() {
  if (!settled_) transport_.abandon();
}

KvRows BlockMover::rows_of(const Part& part, std::int64_t block) const {
  const bool own = part.owner == plan_.rank;
  const KvRows& base = own ? memory_.shard : memory_.buffers[static_cast<std::size_t>(block % 2)];
  const std::int64_t row = own ? part.owner_row : part.buffer_row;
  return {base.k + row * k_row_bytes(spec_), base.v + row * v_row_bytes(spec_)};
}

void BlockMover::post(std::int64_t block, Stream stream) {
  const BlockPlan& planned = plan_.blocks[static_cast<std::size_t>(block)];
  const auto parity = static_cast<std::size_t>(block % 2);
  std::vector<std::uint64_t>& checksums = checksums_[parity];
  if (checksum_) {
    checksums.assign(planned.parts.size(), 0);
    for (std::size_t i = 0; i < planned.parts.size(); ++i) {
      const Part& part = planned.parts[i];
      if (part.owner != plan_.rank) continue;
      checksums[i] = checksum_of(rows_of(part, block), static_cast<std::size_t>(part.rows * k_row_bytes(spec_)),
                                 static_cast<std::size_t>(part.rows * v_row_bytes(spec_)));
    }
  }

  Exchange exchange;
  exchange.label = fmt::format("block {} of {}", block + 1, plan_.blocks.size());
  const auto add_spans = [&](const PartMessage& message, auto& spans) {
    using SpanType = typename std::remove_reference_t<decltype(spans)>::value_type;
    for (const std::int32_t index : message.parts) {
      const Part& part = planned.parts[static_cast<std::size_t>(index)];
      const KvRows rows = rows_of(part, block);
      spans.push_back(SpanType{rows.k, static_cast<std::size_t>(part.rows * k_row_bytes(spec_))});
      spans.push_back(SpanType{rows.v, static_cast<std::size_t>(part.rows * v_row_bytes(spec_))});
      if (checksum_) {
        auto* sum = reinterpret_cast<std::byte*>(&checksums[static_cast<std::size_t>(index)]);
        spans.push_back(SpanType{sum, sizeof(std::uint64_t)});
      }
    }
  };
  for (const PartMessage& message : planned.sends) {
    add_spans(message, exchange.sends.emplace_back(SendMessage{message.peer, message.round, {}}).spans);
  }
  for (const PartMessage& message : planned.receives) {
    add_spans(message, exchange.receives.emplace_back(ReceiveMessage{message.peer, message.round, {}}).spans);
  }
  tickets_[parity] = transport_.post(std::move(exchange), stream);
}

void BlockMover::wait(std::int64_t block, Stream stream, const Deadline& deadline) {
  transport_.wait(tickets_[static_cast<std::size_t>(block % 2)], stream, deadline);
  if (checksum_) verify(block);
  const KvRows& buffer = memory_.buffers[static_cast<std::size_t>(block % 2)];
  for (const RowCopy& copy : plan_.blocks[static_cast<std::size_t>(block)].copies) {
    const KvRows& from = copy.from_shard ? memory_.shard : buffer;
    const auto copy_rows = [&](std::byte* to, const std::byte* source, std::int64_t row_bytes) {
      backend_.copy_rows(to + copy.to_row * row_bytes, row_bytes, source + copy.from_row * row_bytes, row_bytes,
                         row_bytes, copy.rows, stream);
    };
    copy_rows(buffer.k, from.k, k_row_bytes(spec_));
    copy_rows(buffer.v, from.v, v_row_bytes(spec_));
  }
}

void BlockMover::verify(std::int64_t block) const {
  const BlockPlan& planned = plan_.blocks[static_cast<std::size_t>(block)];
  for (const PartMessage& message : planned.receives) {
    for (const std::int32_t index : message.parts) {
      const Part& part = planned.parts[static_cast<std::size_t>(index)];
      const std::uint64_t found =
          checksum_of(rows_of(part, block), static_cast<std::size_t>(part.rows * k_row_bytes(spec_)),
                      static_cast<std::size_t>(part.rows * v_row_bytes(spec_)));
      const std::uint64_t sent = checksums_[static_cast<std::size_t>(block % 2)][static_cast<std::size_t>(index)];
      if (found == sent) continue;
      fail(ErrorCode::kPeer,
           fmt::format("rank {} received {} rows of rank {} damaged in block {} of {}, handed on by rank {}",
                       plan_.rank, part.rows, part.owner, block + 1, plan_.blocks.size(), message.peer),
           fmt::format("checksum {:016x}, rank {} computed {:016x}", found, part.owner, sent),
           "Check the link and memory of both hosts.");
    }
  }
}

KeySource BlockMover::buffer_source(std::int64_t block) const {
  const KvRows& buffer = memory_.buffers[static_cast<std::size_t>(block % 2)];
  const std::int64_t rows = plan_.buffer_rows;
  const void* k = buffer.k;
  const void* v = buffer.v;
  return {dense_view(k, spec_.dtype, rows, spec_.kv_heads, spec_.head_dim),
          dense_view(v, spec_.dtype, rows, spec_.kv_heads, spec_.head_dim_v)};
}

}  // namespace ringattn
