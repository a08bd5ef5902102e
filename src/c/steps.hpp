// SPDX-License-Identifier: Apache-2.0
// Common parts of decode and MLA decode. In addition to object.hpp's requirements, a handle defines
//
//   const ringattn::Decode& steps() const;   // partition and owned sequences
//   std::uint64_t memory_bytes() const;
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "attention/tokens/batch.hpp"
#include "base/error.hpp"
#include "c/object.hpp"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "ops/decode/decode.hpp"

namespace ringattn::c {

// Reads the tensors struct of a step, of any header. In structs without lengths_before, the former member `grow` says
// that lengths are lengths_before.
template <class Tensors>
Tensors read_tensors(const char* name, const Tensors* given, std::size_t first) {
  Tensors tensors = read_struct(name, given, first);
  if (given->size <= offsetof(Tensors, lengths_before) && tensors.update_lengths != 0) {
    std::swap(tensors.lengths, tensors.lengths_before);
  }
  return tensors;
}

// Reads the common tensors of decode steps: q, rows, lengths, tables, sinks, out and lse. `Tensors` has these members
// of ringattn_decode_tensors, `In` those of DecodeInputs, `Out` those of DecodeOutputs. Throws kUsage.
template <class Tensors, class In, class Out>
void read_step(const TensorReader& reader, const Tensors& tensors, std::int64_t heads, In& inputs, Out& outputs) {
  need(tensors.q, "q");
  need(tensors.out, "out");
  inputs.q = reader.rows("q", tensors.q);
  inputs.rows = tensors.rows == 0 ? 1 : tensors.rows;
  if (inputs.rows < 0 || inputs.q.tokens % inputs.rows != 0) {
    fail(ErrorCode::kUsage, fmt::format("a step has {} rows of q, {} a sequence", inputs.q.tokens, inputs.rows),
         "each sequence has the same number", "Pass rows sequence by sequence.");
  }
  const std::int64_t sequences = inputs.q.tokens / inputs.rows;
  inputs.lengths = reader.integers("lengths", tensors.lengths, sequences);
  inputs.lengths_before = reader.integers("lengths_before", tensors.lengths_before, sequences);
  inputs.update_lengths = tensors.update_lengths != 0;
  inputs.block_table = reader.table("block_table", tensors.block_table, sequences, inputs.table_pages);
  const TensorReader host(MemoryKind::kHost);
  inputs.host_lengths = host.integers("host_lengths", tensors.host_lengths, sequences);
  std::int64_t host_pages = 0;
  inputs.host_table = host.table("host_table", tensors.host_table, sequences, host_pages);
  if (tensors.host_table != nullptr && host_pages != inputs.table_pages) {
    fail(ErrorCode::kUsage, fmt::format("host_table has {} pages a sequence", host_pages),
         fmt::format("block_table has {}", inputs.table_pages), "Pass a copy of it.");
  }
  inputs.sinks = reader.numbers("sinks", tensors.sinks, std::array{heads});
  outputs.out = reader.rows("out", tensors.out);
  outputs.lse = reader.row_values("lse", tensors.lse, outputs.out.tokens, heads);
}

template <class Handle>
ringattn_status get_facts(const Handle* object, ringattn_decode_facts* facts) noexcept {
  constexpr std::size_t kFirstFacts = 48;
  return with(object, [&](const Handle& handle) {
    const Decode& steps = handle.steps();
    const KvPartition partition = steps.partition();
    // Kernel names are literals, so they end in a zero byte.
    write_struct("ringattn_decode_facts",
                 {0, steps.kv_split_keys(), partition.first, partition.stride, handle.memory_bytes(),
                  steps.kernel().row->name.data()},
                 facts, kFirstFacts);
  });
}

template <class Handle>
ringattn_status owned(const Handle* object, std::int64_t sequences, std::int64_t* first, std::int64_t* count) noexcept {
  return with(object, [&](const Handle& handle) {
    need(first, "first");
    need(count, "count");
    if (sequences < 0 || sequences > kMaxSequences) {
      fail(ErrorCode::kUsage, fmt::format("a step of {} sequences", sequences),
           fmt::format("it has 0 to {}", kMaxSequences), "Check the number.");
    }
    const SequenceRange range = handle.steps().owned(sequences);
    *first = range.first;
    *count = range.count;
  });
}

}  // namespace ringattn::c

// Defines ringattn_OP_get_facts(), _owned() and _cache_tokens(). Use it inside `extern "C"`.
#define RINGATTN_STEPS(op)                                                                               \
  ringattn_status ringattn_##op##_get_facts(const ringattn_##op* decode, ringattn_decode_facts* facts) { \
    return ringattn::c::get_facts(decode, facts);                                                        \
  }                                                                                                      \
  ringattn_status ringattn_##op##_owned(const ringattn_##op* decode, int64_t sequences, int64_t* first,  \
                                        int64_t* count) {                                                \
    return ringattn::c::owned(decode, sequences, first, count);                                          \
  }                                                                                                      \
  int64_t ringattn_##op##_cache_tokens(const ringattn_##op* decode, int64_t length) {                    \
    return decode == nullptr ? -1 : decode->steps().cache_tokens(length);                                \
  }                                                                                                      \
  static_assert(true)
