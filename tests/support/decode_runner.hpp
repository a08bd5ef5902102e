// SPDX-License-Identifier: Apache-2.0
// Runs a decode kernel over AttentionInputs whose queries are at the ends of their sequences, with the keys in a cache
// of any layout: dense or paged, pages in any order, shared or not. Entries that no sequence owns are NaN.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "kernels/decode/decode.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/attention_runner.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/page_pool.hpp"

namespace ringattn::testing {

using DecodeRow = KernelRow<DecodeSpec>;

struct CacheLayout {
  std::int64_t page_size = 0;  // 0: dense
  bool head_major = false;     // within a page, or a dense sequence
  std::uint64_t shuffle = 1;   // the order of pages
  // The first `shared` tokens of every sequence (a multiple of the page size) are the same, in pages of sequence 0.
  std::int64_t shared = 0;
  bool strided = false;     // q and out have padding after each head and row
  int slices = 0;           // DecodeLimits::slices
  KvPartition partition{};  // the KV splits that the cache holds
  // The values are read from the first head_dim_v columns of the keys. inputs.v must equal them.
  bool values_in_keys = false;
  // With values_in_keys, instead of inputs.k and inputs.v: FP8 rows of all tokens (kernels/quant/latent_rows.hpp).
  std::vector<std::byte> codes = {};
  // SharedPrefixes of the step: the prefix of each sequence, or −1, and the keys of each prefix.
  std::vector<std::int32_t> prefix_of = {};
  std::vector<std::int32_t> prefix_keys = {};
  bool mask_with_own = false;  // of inputs with block masks: names a block that the rows stand in, and one after it
};

// Inputs in a backend's memory, and a kernel that decodes them.
class DecodeRunner {
 public:
  // All sequences have the same number of queries, at the ends of their keys. The cache holds all keys of `inputs`, or
  // those of the layout's partition.
  DecodeRunner(const DecodeRow& row, const AttentionInputs& inputs, const CacheLayout& layout = {}, int threads = 1);

  // Overwrites the block mask on the device by the mask of `inputs`, which has the same shape.
  void set_block_mask(const AttentionInputs& inputs);
  // Overwrites the lengths on the device; none is longer than in the inputs.
  void set_lengths(const std::vector<std::int64_t>& lengths);
  // From now on steps are enqueued in parts of at most that many sequences; 0: whole.
  void set_part_limit(std::int64_t sequences) { part_limit_ = sequences; }
  // Enqueues a step.
  void enqueue(Stream stream);
  // Enqueues a step with outputs for a cache that holds this partition.
  void run_partition(const KvPartition& partition);
  // The partials of a step: that many KV splits per row, all NaN.
  void make_partials(std::int64_t groups);
  const float* partials() const { return partials_->floats(); }
  // Enqueues a step that leaves partials, and has no outputs.
  void enqueue_leave(Stream stream);
  // Enqueues merges of the partials that partitions of these inputs have left, which have as many KV splits as this
  // runner's. The first sequence's rows and the other rows are merged separately, as owners of parts of a batch do.
  void enqueue_merge(const std::vector<const float*>& partitions, Stream stream);
  void wait();
  // Waits, and reads what the last step wrote. Then the outputs are NaN again.
  AttentionResult read();
  AttentionResult run() {
    enqueue(backend_->stream());
    return read();
  }

  Backend& backend() { return *backend_; }
  const DecodeKernel& kernel() const { return *kernel_; }

  // The pools of the cache. From now on steps use these pools, which have the same pages.
  const DecodeStep& step() const { return step_; }
  void set_pools(const CacheView& k, const CacheView& v) {
    step_.k = k;
    step_.v = v;
  }

 private:
  void enqueue(const DecodeStep& step, Stream stream);

  std::unique_ptr<Backend> backend_;
  DecodeSpec spec_;
  std::unique_ptr<DecodeKernel> kernel_;
  bool strided_;
  KvPartition partition_;
  std::int64_t partial_kv_splits_ = 0;
  std::int64_t part_limit_ = 0;
  bool mask_with_own_;
  std::int64_t mask_stride_ = 0;
  std::optional<DeviceArray> q_, k_, v_, table_, lengths_, sinks_, out_, lse_, partials_, prefix_of_, prefix_keys_,
      mask_indices_, mask_counts_;
  DecodeStep step_;
};

// Inputs of `rows` queries at the end of each of the sequences.
AttentionInputs decode_inputs(const AttentionSpec& spec, int rows, const std::vector<std::int64_t>& lengths,
                              std::uint64_t seed);

// The same inputs with other keys and values: sequences that share a prefix (SharedPrefixes) begin with the keys and
// values of the first sequence that has it.
AttentionInputs with_prefixes(AttentionInputs inputs, const std::vector<std::int32_t>& prefix_of,
                              const std::vector<std::int32_t>& prefix_keys);

// The keys of the partition's KV splits, as a cache of that partition has them. Queries and their positions are not
// meaningful in it.
AttentionInputs dealt(const AttentionInputs& inputs, const KvPartition& partition, std::int64_t kv_split_keys);

// Sequences [first, first + count) of the inputs, as inputs of their own, without a block mask.
AttentionInputs sequences_of(const AttentionInputs& inputs, std::size_t first, std::size_t count);
// The rows of these inputs, whose first sequence is sequence `first` of `result`. All sequences have the same number of
// queries.
AttentionResult rows_of(const AttentionResult& result, const AttentionInputs& inputs, std::size_t first);

// The same with shorter sequences: their first keys, and the same queries at their ends.
AttentionInputs shortened(const AttentionInputs& inputs, const std::vector<std::int64_t>& lengths);

}  // namespace ringattn::testing
