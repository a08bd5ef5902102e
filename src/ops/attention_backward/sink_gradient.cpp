// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/sink_gradient.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

#include "comm/exchange.hpp"
#include "ops/common/staging.hpp"

namespace ringattn {

namespace {

// What a rank sends in one piece: the sum of a tile, or the term of one query.
struct Part {
  std::int64_t sequence = 0;
  std::int64_t tile = 0;      // of kBackwardTile positions, from position 0; may be negative
  std::int64_t position = 0;  // position of its first query
  std::int64_t rows = 0;      // number of this rank's terms in the sum

  auto order() const { return std::tie(sequence, position); }
  bool same_tile(const Part& other) const { return sequence == other.sequence && tile == other.tile; }
};

// The parts of a rank, in the order of its rows.
std::vector<Part> parts_of(const Batch& batch, std::span<const TokenRun> queries) {
  std::vector<Part> parts;
  for (const TokenRun& run : queries) {
    const Sequence& sequence = batch.sequences[static_cast<std::size_t>(run.sequence)];
    const std::int64_t end = sequence.q_offset + run.end;
    for (std::int64_t position = sequence.q_offset + run.begin; position < end;) {
      const std::int64_t tile = floor_quotient(position, kBackwardTile);
      const std::int64_t tile_begin = std::max(tile * kBackwardTile, sequence.q_offset);
      const std::int64_t tile_end = std::min((tile + 1) * kBackwardTile, sequence.q_offset + sequence.q_len);
      const bool whole = position == tile_begin && end >= tile_end;
      const std::int64_t rows = whole ? tile_end - position : 1;
      parts.push_back({run.sequence, tile, position, rows});
      position += rows;
    }
  }
  return parts;
}

}  // namespace

std::size_t sink_gradient_bytes(const Batch& batch, int heads) {
  std::int64_t sums = 1 + std::ssize(batch.sequences);
  for (const Sequence& s : batch.sequences)
    sums += 2 * (s.q_len / kBackwardTile + 2);  // counted as parts, and as tiles
  return static_cast<std::size_t>(sums * heads) * sizeof(float);
}

SinkGradient::SinkGradient(const Batch& batch, const Layout& queries, int heads, AttentionBackwardKernel& kernel,
                           Backend& backend, Transport& transport, const Timeouts& timeouts)
    : heads_(heads), kernel_(kernel), backend_(backend), transport_(transport), timeouts_(timeouts), first_part_{0} {
  std::vector<std::pair<Part, std::int64_t>> all;  // parts with their numbers
  std::vector<std::int64_t> own_begins{0};
  for (int rank = 0; rank < queries.world(); ++rank) {
    for (const Part& part : parts_of(batch, queries.runs(rank))) {
      if (rank == transport.rank()) own_begins.push_back(own_begins.back() + part.rows);
      all.emplace_back(part, std::ssize(all));
    }
    first_part_.push_back(std::ssize(all));
  }
  std::ranges::sort(all, [](const auto& a, const auto& b) { return a.first.order() < b.first.order(); });
  std::vector<std::int64_t> order, tile_begins, sequence_begins;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Part& part = all[i].first;
    order.push_back(all[i].second);
    if (i > 0 && part.same_tile(all[i - 1].first)) continue;
    if (i == 0 || part.sequence != all[i - 1].first.sequence) sequence_begins.push_back(std::ssize(tile_begins));
    tile_begins.push_back(static_cast<std::int64_t>(i));
  }
  sequence_begins.push_back(std::ssize(tile_begins));
  tile_begins.push_back(std::ssize(order));
  const std::int64_t all_sequences[] = {0, std::ssize(sequence_begins) - 1};
  own_ = make_sums({}, own_begins);
  tiles_ = make_sums(order, tile_begins);
  sequences_ = make_sums({}, sequence_begins);
  total_ = make_sums({}, all_sequences);
  const auto bytes_of = [heads](std::int64_t rows) { return static_cast<std::size_t>(rows * heads) * sizeof(float); };
  parts_ = backend.allocate(bytes_of(std::max<std::int64_t>(1, std::ssize(all))));
  tiles_.values = backend.allocate(bytes_of(tiles_.count));
  sequences_.values = backend.allocate(bytes_of(sequences_.count));
  await(backend, timeouts);
}

// Copies the tables to the backend. The caller keeps them until the copy is done.
SinkGradient::Sums SinkGradient::make_sums(std::span<const std::int64_t> order, std::span<const std::int64_t> begins) {
  Sums sums;
  if (!order.empty()) sums.order = upload<std::int64_t>(backend_, order);
  sums.begins = upload<std::int64_t>(backend_, begins);
  sums.count = std::ssize(begins) - 1;
  return sums;
}

float* SinkGradient::part(std::int64_t number) const {
  return reinterpret_cast<float*>(parts_.data()) + number * heads_;
}

Exchange SinkGradient::parts_exchange() const {
  OneRound round;
  const auto span_of = [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const auto bytes = static_cast<std::size_t>((first_part_[r + 1] - first_part_[r]) * heads_) * sizeof(float);
    return ReceiveSpan{reinterpret_cast<std::byte*>(part(first_part_[r])), bytes};
  };
  const ReceiveSpan mine = span_of(transport_.rank());
  for (int peer = 0; peer < transport_.size(); ++peer) {
    if (peer == transport_.rank()) continue;
    const ReceiveSpan theirs = span_of(peer);
    if (mine.bytes > 0) round.send(peer, {mine.data, mine.bytes});
    if (theirs.bytes > 0) round.receive(peer, theirs);
  }
  return std::move(round).exchange("the gradient of the sinks");
}

void SinkGradient::connect() {
  if (transport_.size() == 1) return;
  const Exchange only[] = {parts_exchange()};
  announced_ = transport_.announce(only, timeouts_.for_peer());
}

void SinkGradient::run(const Sums& sums, const float* rows, float* values, Stream stream) {
  const auto table = [](const Buffer& buffer) { return reinterpret_cast<const std::int64_t*>(buffer.data()); };
  kernel_.sum_rows({rows, table(sums.order), table(sums.begins), sums.count, values}, stream);
}

void SinkGradient::sum_own(const float* terms, Stream stream) {
  run(own_, terms, part(first_part_[static_cast<std::size_t>(transport_.rank())]), stream);
}

void SinkGradient::exchange(Stream stream, double seconds) {
  if (transport_.size() == 1) return;
  Exchange exchange = parts_exchange();
  exchange.announced = announced_;
  const Ticket ticket = transport_.post(std::move(exchange), stream);
  transport_.wait(ticket, stream, timeouts_.for_work(seconds));
}

void SinkGradient::sum_all(float* dsinks, Stream stream) {
  auto* const tiles = reinterpret_cast<float*>(tiles_.values.data());
  auto* const sequences = reinterpret_cast<float*>(sequences_.values.data());
  run(tiles_, part(0), tiles, stream);
  run(sequences_, tiles, sequences, stream);
  run(total_, sequences, dsinks, stream);
}

}  // namespace ringattn
