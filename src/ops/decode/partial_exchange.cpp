// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/partial_exchange.hpp"

#include <algorithm>
#include <utility>

namespace ringattn {

PartialExchange::PartialExchange(const DecodeJob& job, RowPartials records, Transport& transport, Backend& backend)
    : job_(job), records_(std::move(records)), transport_(transport), deal_(deal_of(job, transport.size())) {
  const int self = transport.rank();
  first_rank_ = first_of_part(deal_, self);
  end_rank_ = first_rank_ + deal_.heads * deal_.kv_splits;
  for (std::int64_t splits = 1; splits < records_.splits; splits *= 2) split_counts_.push_back(splits);
  split_counts_.push_back(records_.splits);
  const ExchangeShape largest{job.limits.sequences, job.limits.rows, records_.splits};
  const std::int64_t mine = owned(largest, self).count;
  for (int peer = first_rank_; peer < end_rank_; ++peer) {
    slot_bytes_ = std::max(slot_bytes_, bytes_of(largest, peer, mine));
  }
  own_ = backend.allocate(bytes_of(largest, self, kept_sequences(deal_, job.limits.sequences, self).count));
  received_ = backend.allocate(std::max(static_cast<std::size_t>(end_rank_ - first_rank_ - 1) * slot_bytes_,
                                        static_cast<std::size_t>(transport.size())));
}

SequenceRange PartialExchange::owned(const ExchangeShape& shape, int rank) const {
  return owned_sequences(shape.sequences, rank, transport_.size());
}

std::size_t PartialExchange::bytes_of(const ExchangeShape& shape, int rank, std::int64_t sequences) const {
  const std::int64_t records = sequences * shape.rows * shape.splits;
  return static_cast<std::size_t>(records * records_.bytes[static_cast<std::size_t>(rank)]);
}

std::byte* PartialExchange::own_of(const ExchangeShape& shape, int rank) const {
  const int self = transport_.rank();
  const std::int64_t before = owned(shape, rank).first - kept_sequences(deal_, shape.sequences, self).first;
  return own_.data() + bytes_of(shape, self, before);
}

std::byte* PartialExchange::slot_of(int peer) const {
  const int slot = (peer < transport_.rank() ? peer : peer - 1) - first_rank_;
  return received_.data() + static_cast<std::size_t>(slot) * slot_bytes_;
}

void PartialExchange::announce(const Deadline& deadline) {
  std::vector<Exchange> exchanges;
  for (const std::int64_t splits : split_counts_) {
    exchanges.push_back(exchange_of({job_.limits.sequences, job_.limits.rows, splits}));
  }
  announced_ = transport_.announce(exchanges, deadline);
}

std::int64_t PartialExchange::exchanged_splits(std::int64_t needed) const {
  return *std::ranges::lower_bound(split_counts_, needed);
}

Exchange PartialExchange::exchange_of(const ExchangeShape& shape) const {
  Exchange exchange;
  exchange.label = "partial results";
  const int self = transport_.rank();
  const std::int64_t mine = owned(shape, self).count;
  for (int peer = first_rank_; peer < end_rank_; ++peer) {
    if (peer == self) continue;
    const std::int64_t theirs = owned(shape, peer).count;
    if (theirs > 0) {
      exchange.sends.push_back({peer, 0, {{own_of(shape, peer), bytes_of(shape, self, theirs)}}});
    }
    if (mine > 0) exchange.receives.push_back({peer, 0, {{slot_of(peer), bytes_of(shape, peer, mine)}}});
  }
  return exchange;
}

void PartialExchange::move(const ExchangeShape& shape, Stream stream, const Deadline& deadline) {
  Exchange exchange = exchange_of(shape);
  if (announced_ != kNotAnnounced && shape.sequences == job_.limits.sequences && shape.rows == job_.limits.rows) {
    exchange.announced = announced_ + (std::ranges::lower_bound(split_counts_, shape.splits) - split_counts_.begin());
  }
  transport_.wait(transport_.post(std::move(exchange), stream), stream, deadline);
}

std::vector<std::byte*> PartialExchange::partials_of_owned(const ExchangeShape& shape) const {
  std::vector<std::byte*> records;
  for (int rank = first_rank_; rank < end_rank_; ++rank) {
    records.push_back(rank == transport_.rank() ? own_of(shape, rank) : slot_of(rank));
  }
  return records;
}

}  // namespace ringattn
