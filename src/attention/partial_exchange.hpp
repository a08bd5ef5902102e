// SPDX-License-Identifier: Apache-2.0
// How the ranks of a Decode finish rows together: the records that each leaves of its groups travel to the rank that
// owns the row. It has the memory on both ends.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/decode_memory.hpp"
#include "attention/tokens/group_deal.hpp"
#include "base/deadline.hpp"
#include "base/memory.hpp"
#include "comm/transport.hpp"
#include "kernels/decode.hpp"

namespace ringattn {

// What steps of one shape exchange. Every rank has the same.
struct PartialShape {
  std::int64_t sequences = 0;
  int rows = 1;             // of a sequence
  std::int64_t groups = 1;  // of a share, that records are exchanged of
};

class PartialExchange {
 public:
  // Allocates. All four outlive the object.
  PartialExchange(const DecodeJob& job, const DecodeKernel& kernel, Transport& transport, Backend& backend);

  // Tells peers where the records of steps as large as the limits will land. Collective.
  void announce(const Deadline& deadline);

  // The groups whose records travel where no sequence is longer than `keys`: a power of two, or what the limits need.
  std::int64_t groups_of(std::int64_t keys) const;

  // Where a step leaves the records of all its rows.
  DecodePartials partials(const PartialShape& shape) const;
  // Behind that step on `stream`: sends the records to the owners of the rows, and awaits those of this rank's rows.
  void move(const PartialShape& shape, Stream stream, const Deadline& deadline);
  // Then the records of this rank's rows lie here, those of each share: [ranks].
  std::vector<const float*> shares(const PartialShape& shape) const;

  // Of which transports may want a byte for each rank before the first step.
  std::byte* memory() const { return received_.data(); }

 private:
  SequenceRange owned(const PartialShape& shape, int rank) const;
  std::size_t bytes_of(const PartialShape& shape, std::int64_t sequences) const;
  std::byte* slot_of(int peer) const;
  Exchange exchange_of(const PartialShape& shape) const;

  const DecodeJob& job_;
  const DecodeKernel& kernel_;
  Transport& transport_;
  std::vector<std::int64_t> group_counts_;  // that groups_of() may say, ascending
  std::size_t slot_bytes_ = 0;
  Buffer own_;       // [rows, groups, heads] records of all rows
  Buffer received_;  // [ranks − 1] slots, of as much of this rank's rows
  std::int64_t announced_ = kNotAnnounced;
};

}  // namespace ringattn
