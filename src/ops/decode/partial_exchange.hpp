// SPDX-License-Identifier: Apache-2.0
// Sends the records that each rank of a Decode computes to the rank that owns the row. If ranks partition KV splits,
// the records are partials of a rank's splits. If ranks partition heads, they are the results of a rank's heads. Owns
// the send and receive buffers. Called by Decode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/tokens/decode_deal.hpp"
#include "base/deadline.hpp"
#include "base/memory.hpp"
#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"
#include "ops/decode/decode_memory.hpp"

namespace ringattn {

// Shape of the exchange of a step. Equal on every rank.
struct ExchangeShape {
  std::int64_t sequences = 0;  // of the step, over all parts
  int rows = 1;                // of a sequence
  std::int64_t splits = 1;     // exchanged per rank and row; 1 if KV splits are not partitioned
};

class PartialExchange {
 public:
  // Allocates the buffers. All arguments except `records` outlive the object.
  PartialExchange(const DecodeJob& job, RowPartials records, Transport& transport, Backend& backend);

  // Announces the receive buffers of steps at the limits to the peers. Collective.
  void announce(const Deadline& deadline);

  // The number of splits to exchange if a rank has `needed` splits of the longest sequence: a power of two, or the
  // maximum.
  std::int64_t exchanged_splits(std::int64_t needed) const;

  // Where a step writes the records of all rows of the part: [rows, splits] of RowPartials::bytes.
  std::byte* own_partials() const { return own_.data(); }
  // Enqueued after that step on `stream`: sends the records to the owners of the rows and receives those of own rows.
  void move(const ExchangeShape& shape, Stream stream, const Deadline& deadline);
  // The records of this rank's rows after move(): one pointer for each rank of the part.
  std::vector<std::byte*> partials_of_owned(const ExchangeShape& shape) const;

  // Memory that the transport may use for its warm-up before the first step; at least a byte for each rank.
  std::byte* memory() const { return received_.data(); }

 private:
  SequenceRange owned(const ExchangeShape& shape, int rank) const;
  // Bytes of the records that `rank` sends for this many sequences.
  std::size_t bytes_of(const ExchangeShape& shape, int rank, std::int64_t sequences) const;
  // The records of the sequences that `rank` owns, in own_.
  std::byte* own_of(const ExchangeShape& shape, int rank) const;
  std::byte* slot_of(int peer) const;
  Exchange exchange_of(const ExchangeShape& shape) const;

  const DecodeJob& job_;
  const RowPartials records_;
  Transport& transport_;
  const DecodeDeal deal_;
  int first_rank_ = 0;  // ranks [first_rank_, end_rank_) of the part
  int end_rank_ = 0;
  std::vector<std::int64_t> split_counts_;  // possible values of exchanged_splits(), ascending
  std::size_t slot_bytes_ = 0;
  Buffer own_;       // records of all rows of the part
  Buffer received_;  // [ranks of the part − 1] slots, each for the records of this rank's rows
  std::int64_t announced_ = kNotAnnounced;
};

}  // namespace ringattn
