// SPDX-License-Identifier: Apache-2.0
// The cache of a decode step on this rank: its share of a job's keys and values, in the kernel's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/decode/decode.hpp"
#include "ops/decode/rank_cache.hpp"

namespace ringattn {

// K and V of one cache, in the kernel's memory. A compressed cache has its streams, concatenated. For MLA `k` holds the
// rows [latent, rotary key], whose first elements are the values, and `v` is empty.
struct CachePools {
  Buffer k;
  Buffer v;
};

// The filled cache of one rank. Slots without a token are NaN, or arbitrary quantized values, except in plain pages of
// a file whose heads the rank has all: these are copied as they are.
class LoadedCache {
 public:
  // `held_back`: number of tokens at the end of each sequence that are not filled yet; pages of a file are copied
  // whole. Throws the errors of JobInput::read(), and kMemory.
  LoadedCache(const JobInput& input, Decode& decode, const Collective& collective,
              const ProgressCallback& on_progress = {}, std::int64_t held_back = 0);

  const RankCache& rank_cache() const { return rank_cache_; }
  const CachePools& pools() const { return pools_; }
  // Another cache with the same contents. The tables of formats are shared.
  CachePools copy() const;
  // Makes a step use the cache in these pools.
  void bind_pools(const CachePools& pools, DecodeInputs& inputs) const;
  // Makes a step use this cache's block table and its lengths, without the keys that are held back. If none are, also
  // the shared prefixes.
  void bind_tables(DecodeInputs& inputs) const;
  // The same for steps that update the lengths: passes them as lengths_before.
  void bind_growing_tables(DecodeInputs& inputs) const;
  // Binds the host copies of lengths and block table, for a step with these lengths.
  void bind_host_tables(DecodeInputs& inputs) const;
  const NonFinite& non_finite() const { return non_finite_; }

 private:
  // The pool of k or of v.
  struct CachedTensor {
    SyntheticTensor tensor;
    RowFormat format;
    RowShape shape;
    std::vector<Buffer> tables;  // of the format
  };
  using LoadRows = std::function<void(const std::vector<PackedRun>& runs, std::int64_t first)>;

  void load(CachedTensor& part, Buffer& pool, std::int64_t& non_finite, const ProgressCallback& on_progress);
  MutableCacheView view(const CachedTensor& part, const Buffer& pool) const;
  CompressedCache packed(const CachedTensor& part, const Buffer& pool) const;
  // True if the pool has the pages of a file in the file's layout.
  bool as_in_file(const CachedTensor& part) const;
  // True if the rank has only some of the heads.
  bool has_some_heads() const { return kv_heads_.count < input_.job().spec.kv_heads; }
  // Fills dense rows with this rank's heads of these tokens. In host memory it reads the input; in the backend's memory
  // it generates synthetic rows.
  void read_heads(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& host) const;
  void make_heads(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows) const;
  std::int64_t rows() const { return rank_cache_.pages * rank_cache_.page_size; }
  // Calls `load` with keys whose rows are adjacent, and the first of these rows, until all are loaded.
  void for_each_stretch(const LoadRows& load) const;
  void fill_latents(std::span<const PackedRun> runs, const MutableTensorView& host);
  void fill_rows(std::optional<SyntheticTensor> tensor, const MutableTensorView& rows, std::int64_t* non_finite,
                 const ProgressCallback& on_progress);
  void fill_quantized(const CompressedSource& source, const CachedTensor& part, const Buffer& pool,
                      const ProgressCallback& on_progress);
  std::int64_t fill_pages(const CachedTensor& part, const Buffer& pool, const ProgressCallback& on_progress);

  const JobInput& input_;
  Decode& decode_;
  Collective collective_;
  RankCache rank_cache_;
  HeadRange kv_heads_;
  CachedTensor k_, v_;
  CachePools pools_;
  std::vector<std::int32_t> host_lengths_;
  Buffer lengths_;  // [sequences]
  Buffer table_;    // [sequences, columns]
  SharedPrefixPages prefixes_;
  Buffer prefix_of_, prefix_keys_;  // the same on the device
  NonFinite non_finite_;
};

}  // namespace ringattn
