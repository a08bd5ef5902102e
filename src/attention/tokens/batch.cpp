// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/batch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/error.hpp"
#include "base/size.hpp"
#include "kernels/attention/visibility.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kFar = std::int64_t{1} << 60;

std::int64_t queries_of(const Sequence& sequence) { return sequence.q_len; }
std::int64_t keys_of(const Sequence& sequence) { return sequence.keys(); }

template <class Length>
std::vector<std::int64_t> lengths(const SequenceList& sequences, const Length& length) {
  std::vector<std::int64_t> result;
  result.reserve(sequences.size());
  for (const Sequence& sequence : sequences) result.push_back(length(sequence));
  return result;
}

template <class Length>
std::vector<std::int64_t> cumulate(const SequenceList& sequences, const Length& length) {
  std::vector<std::int64_t> cumulative{0};
  cumulative.reserve(sequences.size() + 1);
  for (const Sequence& sequence : sequences) cumulative.push_back(cumulative.back() + length(sequence));
  return cumulative;
}

template <class Length>
std::int64_t sum(const SequenceList& sequences, const Length& length) {
  std::int64_t total = 0;
  for (const Sequence& sequence : sequences) total += length(sequence);
  return total;
}

void check_cumulative(std::string_view name, std::span<const std::int64_t> cu) {
  if (cu.size() < 2 || cu[0] != 0) {
    fail(ErrorCode::kFile, fmt::format("{} is not a list of cumulative lengths", name),
         cu.empty()      ? "it is empty"
         : cu.size() < 2 ? "it has one entry"
                         : fmt::format("it starts with {}", cu[0]),
         "It starts with 0 and holds one entry more than there are sequences.");
  }
  for (std::size_t i = 1; i < cu.size(); ++i) {
    if (cu[i] < cu[i - 1]) {
      fail(ErrorCode::kFile, fmt::format("{} descends at entry {}", name, i),
           fmt::format("{} after {}", cu[i], cu[i - 1]),
           "It holds the ends of the sequences, each at least the one before.");
    }
  }
}

}  // namespace

SequenceList SequenceList::with_offset(std::int64_t q_offset) const {
  if (!all_) return {static_cast<std::int64_t>(count_), {each_.q_len, each_.k_len, q_offset, each_.k_begin}};
  std::vector<Sequence> moved = *all_;
  for (Sequence& sequence : moved) sequence.q_offset = q_offset;
  return moved;
}

void SequenceList::push_back(const Sequence& sequence) {
  if (!all_ || all_.use_count() > 1) all_ = std::make_shared<std::vector<Sequence>>(begin(), end());
  all_->push_back(sequence);
  ++count_;
}

bool SequenceList::operator==(const SequenceList& other) const {
  if (count_ != other.count_) return false;
  if (all_ && all_ == other.all_) return true;
  if (!all_ && !other.all_) return count_ == 0 || each_ == other.each_;
  return std::equal(begin(), end(), other.begin());
}

std::int64_t Batch::q_tokens() const { return sum(sequences, queries_of); }
std::int64_t Batch::k_tokens() const { return sum(sequences, keys_of); }
std::vector<std::int64_t> Batch::q_lengths() const { return lengths(sequences, queries_of); }
std::vector<std::int64_t> Batch::k_lengths() const { return lengths(sequences, keys_of); }
std::vector<std::int64_t> Batch::cu_q() const { return cumulate(sequences, queries_of); }
std::vector<std::int64_t> Batch::cu_k() const { return cumulate(sequences, keys_of); }

Batch uniform_batch(std::int64_t count, std::int64_t q_len, std::int64_t k_len) {
  return SequenceList(count, {q_len, k_len, k_len - q_len});
}

Batch packed_batch(std::span<const std::int64_t> cu_q, std::span<const std::int64_t> cu_k,
                   std::span<const std::int64_t> q_offset) {
  check_cumulative("cu_seqlens_q", cu_q);
  check_cumulative("cu_seqlens_k", cu_k);
  if (cu_q.size() != cu_k.size()) {
    fail(ErrorCode::kFile,
         fmt::format("cu_seqlens_q names {}, cu_seqlens_k {}", counted(cu_q.size() - 1, "sequence"), cu_k.size() - 1),
         "every sequence has queries and keys", "Give both as many entries; a sequence may be empty on either side.");
  }
  if (!q_offset.empty() && q_offset.size() != cu_q.size() - 1) {
    fail(ErrorCode::kFile, fmt::format("q_offset has {} entries", q_offset.size()),
         fmt::format("the job has {}", counted(cu_q.size() - 1, "sequence")), "It holds one position per sequence.");
  }
  std::vector<Sequence> sequences;
  sequences.reserve(cu_q.size() - 1);
  for (std::size_t i = 0; i + 1 < cu_q.size(); ++i) {
    const std::int64_t q_len = cu_q[i + 1] - cu_q[i];
    const std::int64_t k_len = cu_k[i + 1] - cu_k[i];
    sequences.push_back({q_len, k_len, q_offset.empty() ? k_len - q_len : q_offset[i]});
  }
  return sequences;
}

Batch transposed(const Batch& batch, int tile) {
  const auto of = [tile](const Sequence& s) -> Sequence {
    if (s.q_len == 0) return {s.k_len, 0, 0};
    const std::int64_t before = s.q_offset - query_tile_begin(s.q_offset, tile);  // positions of the first tile
    return {s.k_len, s.q_len + before, before - s.q_offset, before};
  };
  const SequenceList& all = batch.sequences;
  if (all.distinct() <= 1) {
    return all.empty() ? Batch() : Batch(SequenceList(static_cast<std::int64_t>(all.size()), of(all[0])));
  }
  std::vector<Sequence> result;
  result.reserve(all.size());
  for (const Sequence& sequence : all) result.push_back(of(sequence));
  return result;
}

void check_batch(const Batch& batch) {
  if (batch.sequences.size() > static_cast<std::size_t>(kMaxSequences)) {
    fail(ErrorCode::kUsage, fmt::format("a batch of {}", counted(batch.sequences.size(), "sequence")),
         fmt::format("at most {} are possible", kMaxSequences), "Compute them in several jobs.");
  }
  for (std::size_t i = 0; i < batch.sequences.distinct(); ++i) {
    const Sequence& s = batch.sequences[i];
    if (s.q_len < 0 || s.k_len < 0 || s.q_len > kFar || s.k_len > kFar) {
      fail(ErrorCode::kUsage, fmt::format("sequence {} has {} queries and {} keys", i, s.q_len, s.k_len),
           "lengths lie between 0 and 2^60", "Check the lengths of the job's sequences.");
    }
    if (s.q_offset > kFar || s.q_offset < -kFar) {
      fail(ErrorCode::kUsage, fmt::format("sequence {} starts at position {}", i, s.q_offset),
           "positions lie between -2^60 and 2^60", {"Check ", setting("query_offset"), ", or q_offset."});
    }
  }
}

}  // namespace ringattn
