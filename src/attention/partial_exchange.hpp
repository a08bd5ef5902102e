// SPDX-License-Identifier: Apache-2.0
// How the ranks of a Decode finish rows together: the records that each leaves of the rows of its part travel to the
// rank that owns the row. Of ranks that deal groups of keys they are the partials of a rank's groups, of ranks that
// deal heads the results of a rank's heads. It has the memory on both ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/decode_memory.hpp"
#include "attention/tokens/decode_deal.hpp"
#include "base/deadline.hpp"
#include "base/memory.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

// What steps of one shape exchange. Every rank has the same.
struct ExchangeShape {
  std::int64_t sequences = 0;  // of the step, those of all parts
  int rows = 1;                // of a sequence
  std::int64_t splits = 1;     // of a share, that records are exchanged of; 1 where no groups are dealt
};

class PartialExchange {
 public:
  // Allocates. All but `records` outlive the object.
  PartialExchange(const DecodeJob& job, RowPartials records, Transport& transport, Backend& backend);

  // Tells peers where the records of steps as large as the limits will land. Collective.
  void announce(const Deadline& deadline);

  // The groups whose records travel where a share has so many of the longest sequence: a power of two, or the most.
  std::int64_t exchanged_splits(std::int64_t needed) const;

  // Where a step leaves the records of all rows of the part: [rows, groups] of RowPartials::bytes.
  std::byte* own_partials() const { return own_.data(); }
  // Behind that step on `stream`: sends the records to the owners of the rows, and awaits those of this rank's rows.
  void move(const ExchangeShape& shape, Stream stream, const Deadline& deadline);
  // Then the records of this rank's rows lie here, those of each rank of the part.
  std::vector<std::byte*> partials_of_owned(const ExchangeShape& shape) const;

  // Of which transports may want a byte for each rank before the first step.
  std::byte* memory() const { return received_.data(); }

 private:
  SequenceRange owned(const ExchangeShape& shape, int rank) const;
  // Of records that `rank` leaves of so many sequences.
  std::size_t bytes_of(const ExchangeShape& shape, int rank, std::int64_t sequences) const;
  // Where records of a rank's sequences begin among this rank's own.
  std::byte* own_of(const ExchangeShape& shape, int rank) const;
  std::byte* slot_of(int peer) const;
  Exchange exchange_of(const ExchangeShape& shape) const;

  const DecodeJob& job_;
  const RowPartials records_;
  Transport& transport_;
  const DecodeDeal deal_;
  int first_rank_ = 0;  // of the part
  int end_rank_ = 0;
  std::vector<std::int64_t> split_counts_;  // that exchanged_splits() may say, ascending
  std::size_t slot_bytes_ = 0;
  Buffer own_;       // records of all rows of the part
  Buffer received_;  // [ranks of the part − 1] slots, of as much of this rank's rows
  std::int64_t announced_ = kNotAnnounced;
};

}  // namespace ringattn
