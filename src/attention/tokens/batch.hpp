// SPDX-License-Identifier: Apache-2.0
// A batch: the lengths of the sequences that are computed together. The same on every rank. Jobs, layouts and plans of
// all ops use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/packed_tokens.hpp"

namespace ringattn {

// Query and key lengths of a sequence, in tokens. Query i has key position i + q_offset.
struct Sequence {
  std::int64_t q_len = 0;
  std::int64_t k_len = 0;
  std::int64_t q_offset = 0;
  // Keys before this one don't exist, so the first key tile may be incomplete. 0 unless transposed() made the sequence.
  std::int64_t k_begin = 0;

  std::int64_t keys() const { return k_len - k_begin; }

  bool operator==(const Sequence&) const = default;
};

// Sequences in order. Equal sequences are stored as one sequence and a count, others as a list that copies share until
// one of them is changed. So a huge batch can be described before its memory is checked, and ranks of a process share
// it.
class SequenceList {
 public:
  class Iterator {
   public:
    using iterator_category = std::forward_iterator_tag;
    using value_type = Sequence;
    using difference_type = std::ptrdiff_t;
    using pointer = const Sequence*;
    using reference = const Sequence&;

    Iterator() = default;
    Iterator(const SequenceList& list, std::size_t at) : list_(&list), at_(at) {}
    reference operator*() const { return (*list_)[at_]; }
    pointer operator->() const { return &(*list_)[at_]; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    Iterator operator++(int) {
      Iterator before = *this;
      ++at_;
      return before;
    }
    bool operator==(const Iterator& other) const { return at_ == other.at_; }

   private:
    const SequenceList* list_ = nullptr;
    std::size_t at_ = 0;
  };
  using const_iterator = Iterator;
  using iterator = Iterator;
  using value_type = Sequence;

  SequenceList() = default;
  SequenceList(std::vector<Sequence> all)
      : count_(all.size()), all_(std::make_shared<std::vector<Sequence>>(std::move(all))) {}
  SequenceList(std::initializer_list<Sequence> all) : SequenceList(std::vector<Sequence>(all)) {}
  // `count` equal sequences.
  SequenceList(std::int64_t count, const Sequence& each) : count_(static_cast<std::size_t>(count)), each_(each) {}

  std::size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  const Sequence& operator[](std::size_t i) const { return all_ ? (*all_)[i] : each_; }
  Iterator begin() const { return {*this, 0}; }
  Iterator end() const { return {*this, count_}; }
  void push_back(const Sequence& sequence);
  // Number of entries that may differ: all of a list, one for equal sequences.
  std::size_t distinct() const { return all_ ? count_ : count_ > 0 ? 1 : 0; }
  // The same sequences with another q_offset.
  SequenceList with_offset(std::int64_t q_offset) const;

  bool operator==(const SequenceList& other) const;

 private:
  std::size_t count_ = 0;
  Sequence each_;                               // if there is no list
  std::shared_ptr<std::vector<Sequence>> all_;  // [count_]
};

// Sequences are packed one after the other on the query token axis and on the key token axis.
struct Batch {
  SequenceList sequences;

  Batch() = default;
  Batch(SequenceList all) : sequences(std::move(all)) {}
  Batch(std::vector<Sequence> all) : sequences(std::move(all)) {}
  Batch(std::initializer_list<Sequence> all) : sequences(all) {}

  std::int64_t q_tokens() const;
  std::int64_t k_tokens() const;
  // [sequences]
  std::vector<std::int64_t> q_lengths() const;
  std::vector<std::int64_t> k_lengths() const;
  // Packed token at which each sequence begins, then the number of tokens: [sequences + 1].
  std::vector<std::int64_t> cu_q() const;
  std::vector<std::int64_t> cu_k() const;

  bool operator==(const Batch&) const = default;
};

// `count` sequences of equal lengths; queries end where keys end.
Batch uniform_batch(std::int64_t count, std::int64_t q_len, std::int64_t k_len);

// Sequences from cumulative lengths [sequences + 1], and q_offset [sequences], or empty: queries end where keys end
// (q_offset = k_len − q_len). Throws kFile if the lists are inconsistent.
Batch packed_batch(std::span<const std::int64_t> cu_q, std::span<const std::int64_t> cu_k,
                   std::span<const std::int64_t> q_offset);

// The same sequences with queries and keys exchanged: key positions of the result are those of the queries, and its
// tiles of `tile` keys begin at positions of `batch` that are multiples of `tile`.
Batch transposed(const Batch& batch, int tile);

// Throws kUsage for more than kMaxSequences, negative lengths, and lengths or offsets beyond ±2^60.
void check_batch(const Batch& batch);

}  // namespace ringattn
