// SPDX-License-Identifier: Apache-2.0
// A job: which attention, over which sequences. Plain data, the same on every rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/fold.hpp"

namespace ringattn {

// Tokens that may attend to each other. Query i stands at key position i + q_offset.
struct Sequence {
  std::int64_t q_len = 0;
  std::int64_t k_len = 0;
  std::int64_t q_offset = 0;

  bool operator==(const Sequence&) const = default;
};

// Sequences lie packed one after the other on the token axis of q and of k, v.
struct Job {
  FoldSpec spec;
  std::vector<Sequence> sequences;

  std::int64_t q_tokens() const;
  std::int64_t k_tokens() const;
  // Packed token where each sequence begins, with the total behind: [sequences + 1].
  std::vector<std::int64_t> cu_q() const;
  std::vector<std::int64_t> cu_k() const;
};

// `batch` sequences of equal length, queries aligned to the end of the keys.
std::vector<Sequence> uniform_sequences(std::int64_t batch, std::int64_t q_len, std::int64_t k_len);

// Sequences from cumulative lengths [sequences + 1] and, if not empty, the offset of each; without offsets queries are
// aligned to the end of the keys (q_offset = k_len − q_len). Throws kFile when the lists don't fit each other.
std::vector<Sequence> packed_sequences(std::span<const std::int64_t> cu_q, std::span<const std::int64_t> cu_k,
                                       std::span<const std::int64_t> q_offset);

// (query, key) pairs that the mask lets through, all sequences.
double visible_pairs(const Job& job);

// The field's convention, whatever is skipped or masked inside tiles: 2 · pairs · heads · (head_dim + head_dim_v).
double job_flops(const Job& job);

// Throws kUsage when the job contradicts itself: heads, dims, negative lengths, offsets or windows beyond ±2^62.
void check_job(const Job& job);

}  // namespace ringattn
