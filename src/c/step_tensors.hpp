// SPDX-License-Identifier: Apache-2.0
// What all steps of decoding take: rows, lengths and tables. `Tensors` has the members of ringattn_decode_tensors of
// these names, `Inputs` those of DecodeInputs.
#pragma once

#include <fmt/format.h>

#include "attention/decode.hpp"
#include "base/error.hpp"
#include "c/status.hpp"
#include "c/tensors.hpp"

namespace ringattn::c {

// `inputs.q` is there already. Throws kUsage.
template <class Tensors, class Inputs>
void read_step(const TensorReader& reader, const Tensors& tensors, Inputs& inputs) {
  inputs.rows = tensors.rows == 0 ? 1 : tensors.rows;
  if (inputs.rows < 0 || inputs.q.tokens % inputs.rows != 0) {
    fail(ErrorCode::kUsage, fmt::format("a step has {} rows of q, {} a sequence", inputs.q.tokens, inputs.rows),
         "each sequence has as many", "Pass rows sequence by sequence.");
  }
  const std::int64_t sequences = inputs.q.tokens / inputs.rows;
  need(tensors.lengths, "lengths");
  inputs.lengths = reader.integers("lengths", tensors.lengths, sequences);
  inputs.block_table = reader.table("block_table", tensors.block_table, sequences, inputs.table_pages);
  inputs.grow = tensors.grow != 0;
  const TensorReader host(MemoryKind::kHost);
  inputs.host_lengths = host.integers("host_lengths", tensors.host_lengths, sequences);
  std::int64_t host_pages = 0;
  inputs.host_table = host.table("host_table", tensors.host_table, sequences, host_pages);
  if (tensors.host_table != nullptr && host_pages != inputs.table_pages) {
    fail(ErrorCode::kUsage, fmt::format("host_table has {} pages a sequence", host_pages),
         fmt::format("block_table has {}", inputs.table_pages), "Pass a copy of it.");
  }
}

}  // namespace ringattn::c
