// SPDX-License-Identifier: Apache-2.0
// A batch: the sequences that are computed together, as lengths alone. Plain data, the same on every rank; it knows no
// op, so jobs, layouts and plans share it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

namespace ringattn {

// Tokens that may attend to each other. Query i stands at key position i + q_offset.
struct Sequence {
  std::int64_t q_len = 0;
  std::int64_t k_len = 0;
  std::int64_t q_offset = 0;

  bool operator==(const Sequence&) const = default;
};

// Sequences lie packed one after the other on the token axis of queries and on that of keys.
struct Batch {
  std::vector<Sequence> sequences;

  Batch() = default;
  Batch(std::vector<Sequence> all) : sequences(std::move(all)) {}
  Batch(std::initializer_list<Sequence> all) : sequences(all) {}

  std::int64_t q_tokens() const;
  std::int64_t k_tokens() const;
  // Length of each sequence: [sequences].
  std::vector<std::int64_t> q_lengths() const;
  std::vector<std::int64_t> k_lengths() const;
  // Packed token where each sequence begins, with the total behind: [sequences + 1].
  std::vector<std::int64_t> cu_q() const;
  std::vector<std::int64_t> cu_k() const;

  bool operator==(const Batch&) const = default;
};

// `count` sequences of equal length, queries aligned to the end of the keys.
Batch uniform_batch(std::int64_t count, std::int64_t q_len, std::int64_t k_len);

// Sequences from cumulative lengths [sequences + 1] and, if not empty, the offset of each; without offsets queries are
// aligned to the end of the keys (q_offset = k_len − q_len). Throws kFile when the lists don't fit each other.
Batch packed_batch(std::span<const std::int64_t> cu_q, std::span<const std::int64_t> cu_k,
                   std::span<const std::int64_t> q_offset);

// Throws kUsage for negative lengths, and for lengths or offsets beyond ±2^60.
void check_batch(const Batch& batch);

}  // namespace ringattn
