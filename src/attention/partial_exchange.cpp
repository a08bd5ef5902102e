// SPDX-License-Identifier: Apache-2.0
#include "attention/partial_exchange.hpp"

#include <algorithm>
#include <utility>

#include "kernels/backend.hpp"

namespace ringattn {

PartialExchange::PartialExchange(const DecodeJob& job, const DecodeKernel& kernel, Transport& transport,
                                 Backend& backend)
    : job_(job), kernel_(kernel), transport_(transport) {
  const DecodeLimits& limits = job.limits;
  const int ranks = transport.size();
  const std::int64_t most = share_groups(limits.keys, ranks, kernel.key_tile());
  for (std::int64_t groups = 1; groups < most; groups *= 2) group_counts_.push_back(groups);
  group_counts_.push_back(most);
  const PartialShape largest{limits.sequences, limits.rows, most};
  slot_bytes_ = bytes_of(largest, owned(largest, transport.rank()).count);
  own_ = backend.allocate(bytes_of(largest, limits.sequences));
  received_ =
      backend.allocate(std::max(static_cast<std::size_t>(ranks - 1) * slot_bytes_, static_cast<std::size_t>(ranks)));
}

SequenceRange PartialExchange::owned(const PartialShape& shape, int rank) const {
  return owned_sequences(shape.sequences, rank, transport_.size());
}

std::size_t PartialExchange::bytes_of(const PartialShape& shape, std::int64_t sequences) const {
  return partial_bytes(job_.spec, kernel_, sequences * shape.rows, shape.groups);
}

std::byte* PartialExchange::slot_of(int peer) const {
  const int slot = peer < transport_.rank() ? peer : peer - 1;
  return received_.data() + static_cast<std::size_t>(slot) * slot_bytes_;
}

void PartialExchange::announce(const Deadline& deadline) {
  std::vector<Exchange> exchanges;
  for (const std::int64_t groups : group_counts_) {
    exchanges.push_back(exchange_of({job_.limits.sequences, job_.limits.rows, groups}));
  }
  announced_ = transport_.announce(exchanges, deadline);
}

std::int64_t PartialExchange::groups_of(std::int64_t keys) const {
  const std::int64_t needed = share_groups(keys, transport_.size(), kernel_.key_tile());
  return *std::ranges::lower_bound(group_counts_, needed);
}

DecodePartials PartialExchange::partials(const PartialShape& shape) const {
  return {reinterpret_cast<float*>(own_.data()), shape.groups};
}

Exchange PartialExchange::exchange_of(const PartialShape& shape) const {
  Exchange exchange;
  exchange.label = "partial results";
  const std::size_t mine = bytes_of(shape, owned(shape, transport_.rank()).count);
  for (int peer = 0; peer < transport_.size(); ++peer) {
    if (peer == transport_.rank()) continue;
    const SequenceRange theirs = owned(shape, peer);
    if (theirs.count > 0) {
      exchange.sends.push_back(
          {peer, 0, {{own_.data() + bytes_of(shape, theirs.first), bytes_of(shape, theirs.count)}}});
    }
    if (mine > 0) exchange.receives.push_back({peer, 0, {{slot_of(peer), mine}}});
  }
  return exchange;
}

void PartialExchange::move(const PartialShape& shape, Stream stream, const Deadline& deadline) {
  Exchange exchange = exchange_of(shape);
  if (announced_ != kNotAnnounced && shape.sequences == job_.limits.sequences && shape.rows == job_.limits.rows) {
    exchange.announced = announced_ + (std::ranges::lower_bound(group_counts_, shape.groups) - group_counts_.begin());
  }
  transport_.wait(transport_.post(std::move(exchange), stream), stream, deadline);
}

std::vector<const float*> PartialExchange::shares(const PartialShape& shape) const {
  std::vector<const float*> shares;
  for (int rank = 0; rank < transport_.size(); ++rank) {
    const std::byte* const records =
        rank == transport_.rank() ? own_.data() + bytes_of(shape, owned(shape, rank).first) : slot_of(rank);
    shares.push_back(reinterpret_cast<const float*>(records));
  }
  return shares;
}

}  // namespace ringattn
