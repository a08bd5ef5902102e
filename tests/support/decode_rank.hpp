// SPDX-License-Identifier: Apache-2.0
// A rank's side of a Decode: its share of the keys of a job in a cache of any layout, the rows of a step, and the
// results, in the memory of the kernel. Unowned entries are NaN, in caches and in tables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/decode/decode.hpp"
#include "tests/support/decode_runner.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

// A job of steps of `rows` rows, over sequences as long as those of `job`.
DecodeJob decode_job(const Job& job, int rows, const CacheLayout& layout);

// The tensors after a Rope, each query and key at its position.
JobTensors rotated_tensors(const Job& job, const JobTensors& tensors, const RopeSpec& spec);

class DecodeRank {
 public:
  // `job` has the sequences at their final lengths, with the queries of all steps.
  DecodeRank(Decode& decode, const Job& job, const JobTensors& tensors, const CacheLayout& layout);

  // The cache holds the first lengths[s] keys of each sequence, and the lengths say so.
  void fill(const std::vector<std::int64_t>& lengths);
  // A step of `rows` rows of each sequence, of which the last one has position lengths[s] − 1: its queries, and its
  // keys and values as new rows.
  void load(const std::vector<std::int64_t>& lengths, int rows);

  // Later steps take their rows from `tensors`. The cache is unchanged.
  void use(const JobTensors& tensors) { tensors_ = tensors; }

  // The loaded step. `update`: the lengths are passed without the step's rows, and the step updates them. `append`: new
  // rows are appended to the cache.
  DecodeInputs inputs(bool update, bool append);
  DecodeOutputs outputs();
  Stream stream() { return decode_.backend().stream(); }

  // Waits, and compares this rank's rows of the step with the reference by memcmp. Returns which rows differ, or an
  // empty string. Then the outputs are NaN again.
  std::string difference(const JobResult& reference);
  // Whether the step has written O = 0 and LSE = −∞ for the sequence, which this rank owns. Does not reset the outputs.
  bool is_empty(std::int64_t sequence);
  // Whether no output has been written.
  bool untouched();

  // Lengths and block table as they were uploaded last, for tests that corrupt them. upload() restores the rank's own.
  std::vector<std::int32_t> lengths;
  std::vector<std::int32_t> table;  // [sequences, table_pages]
  std::int64_t table_pages = 0;
  std::vector<std::int32_t> prefix_of;  // as in CacheLayout
  std::vector<std::int32_t> prefix_keys;
  // Block masks of the rank's heads, in a job whose steps get them as input. set_block_mask() sets the masks of the
  // last `rows` queries.
  std::vector<std::int32_t> list_blocks;
  std::vector<std::int32_t> list_counts;
  void set_block_mask(const BlockMask& block_mask, int rows);
  void upload();
  std::int64_t pages() const { return pages_; }
  // The bytes of both caches, and the lengths, as they are now.
  std::vector<std::byte> cache_bytes();
  std::vector<std::int32_t> lengths_now();

 private:
  MutableCacheView view(std::byte* data, int dim) const;
  void put_row(std::vector<std::byte>& cache, const std::vector<std::byte>& rows, int dim, std::size_t sequence,
               std::int64_t position) const;
  void make_pages(const CacheLayout& layout);

  Decode& decode_;
  Job job_;
  JobTensors tensors_;
  bool head_major_;
  std::int64_t page_size_ = 0;
  std::int64_t pages_ = 0;
  std::vector<std::int64_t> cu_q_, cu_k_;
  std::vector<std::int64_t> step_;  // lengths of the step that is loaded
  int rows_ = 1;
  std::int64_t mask_stride_ = 0;  // 0: there are none
  DeviceArray k_, v_, q_, k_new_, v_new_, out_, lse_, lengths_, table_, prefix_of_, prefix_keys_, sinks_;
  DeviceArray mask_indices_, mask_counts_;
};

}  // namespace ringattn::testing
