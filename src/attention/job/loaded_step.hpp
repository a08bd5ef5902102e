// SPDX-License-Identifier: Apache-2.0
// A decoding step on this rank: its share of the cache, all queries, and its rows of the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/decode.hpp"
#include "attention/files/job_input.hpp"
#include "attention/job/loaded_job.hpp"
#include "attention/job/rank_cache.hpp"
#include "attention/latent_decode.hpp"
#include "base/memory.hpp"
#include "comm/meeting.hpp"

namespace ringattn {

// K and V of one cache, in the kernel's memory. Of latents `k` holds the rows [c, k_r], whose first numbers are the
// values, and `v` nothing.
struct CachePools {
  Buffer k;
  Buffer v;
};

// The cache of one rank, filled. Slots that hold no token are NaN, but for those of a file's pages, which are as they
// lie there.
class LoadedCache {
 public:
  // `held_back`: so many tokens at the end of each sequence are not there yet; pages of a file are whole. Throws what
  // JobInput::read() throws, and kMemory.
  LoadedCache(const JobInput& input, Decode& decode, const Meeting& meeting, const StepDone& step_done = {},
              std::int64_t held_back = 0);

  const RankCache& share() const { return share_; }
  const CachePools& pools() const { return pools_; }
  // Another cache of the same contents.
  CachePools copy() const;
  // Of a cache that is not plain: packed().
  MutableCacheView k(const CachePools& pools) const { return view(pools.k, decode_.job().spec.head_dim); }
  CompressedCache packed(const CachePools& pools) const;
  MutableCacheView v(const CachePools& pools) const { return view(pools.v, decode_.job().spec.head_dim_v); }
  // Gives a step this cache's table and lengths, those that are held back left out; and, where nothing is held back,
  // the prefixes that sequences share.
  void place(DecodeInputs& inputs) const;
  // What the host knows of both, for a step whose lengths are these.
  void place_host_copies(DecodeInputs& inputs) const;
  const NonFinite& non_finite() const { return non_finite_; }

 private:
  MutableCacheView view(const Buffer& pool, int dim) const;
  // Numbers of 16 bits that a row of k has.
  std::int64_t k_width() const;
  void fill_latents(std::span<const PackedRun> runs, const MutableTensorView& host);
  void fill_rows(std::optional<SyntheticTensor> tensor, const MutableTensorView& rows, const StepDone& step_done);
  std::int64_t fill_pages(SyntheticTensor tensor, const Buffer& pool, int dim, const StepDone& step_done);

  const JobInput& input_;
  Decode& decode_;
  Meeting meeting_;
  RankCache share_;
  CachePools pools_;
  std::vector<std::int32_t> host_lengths_;
  Buffer lengths_;  // [sequences]
  Buffer table_;    // [sequences, columns]
  SharedPages prefixes_;
  Buffer prefix_of_, prefix_keys_;  // the same on the device
  NonFinite non_finite_;
};

class LoadedStep {
 public:
  // Allocates everything and reads cache and queries. `caches`: copies of the cache that steps take in turn, so that
  // none finds its keys in a device's cache memory. Collective, as all calls; `decode` outlives the object.
  LoadedStep(const JobInput& input, Decode& decode, const Meeting& meeting, const StepDone& step_done = {},
             int caches = 1);
  // The same of a cache of latents.
  LoadedStep(const JobInput& input, LatentDecode& decode, const Meeting& meeting, const StepDone& step_done = {},
             int caches = 1);

  // Begins on all ranks at once and returns when all are done.
  RunStats run();
  // Does `count` steps one behind the other, over the caches in turn, and returns the seconds of one. On one GPU they
  // are a graph that is launched.
  double run_many(int count);
  // The rows of the last step, in host memory. Ends the object's use.
  RankResult fetch(const RunStats& stats);

 private:
  LoadedStep(const JobInput& input, Decode& decode, LatentDecode* latents, const Meeting& meeting,
             const StepDone& step_done, int caches);
  const CachePools& pools_of(int step) const;
  void load_matrices(const JobInput& input);
  // Enqueues a step of the front door; `captured`: without what the host knows of lengths.
  void enqueue(int step, bool captured);
  void wait();

  Decode& decode_;
  LatentDecode* latents_;  // of latents, whose `decode_` is in it; else null
  Meeting meeting_;
  std::optional<LoadedCache> cache_;
  std::vector<CachePools> more_;
  RankResult result_;
  Buffer q_, sinks_, w_uk_, w_uv_;
  Buffer list_blocks_, list_counts_;  // where the job has lists of key blocks
  HeadMatrices keys_, values_;        // of latents: views of w_uk_, where queries need it, and of w_uv_
  DecodeInputs inputs_;
  DecodeOutputs outputs_;
  std::unique_ptr<Marks> marks_;
  std::unique_ptr<Replay> replay_;
  int replayed_ = 0;  // steps of the replay
};

}  // namespace ringattn
