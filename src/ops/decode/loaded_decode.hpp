// SPDX-License-Identifier: Apache-2.0
// A decode step on this rank: a loaded cache, all queries, and its rows of the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/attention_jobs/loaded_job.hpp"
#include "ops/decode/decode.hpp"
#include "ops/decode/loaded_cache.hpp"
#include "ops/mla/mla_decode.hpp"
#include "ops/mla/mla_weights.hpp"

namespace ringattn {

class LoadedDecode {
 public:
  // Allocates everything and reads cache and queries. `caches`: copies of the cache that steps take in turn, so that
  // none finds its keys in a device's cache memory. Collective, as all calls; `decode` outlives the object.
  LoadedDecode(const JobInput& input, Decode& decode, const Collective& collective,
               const ProgressCallback& on_progress = {}, int caches = 1);
  // The same of a cache of latents.
  LoadedDecode(const JobInput& input, MlaDecode& decode, const Collective& collective,
               const ProgressCallback& on_progress = {}, int caches = 1);

  // Begins on all ranks at once and returns when all are done.
  RunStats run();
  // Runs `count` consecutive steps, over the caches in turn, and returns the seconds of one. On one GPU they are a
  // graph that is launched.
  double run_many(int count);
  // The rows of the last step, in host memory. Ends the object's use.
  RankResult fetch(const RunStats& stats);

 private:
  LoadedDecode(const JobInput& input, Decode& decode, MlaDecode* latents, const Collective& collective,
               const ProgressCallback& on_progress, int caches);
  const CachePools& pools_of(int step) const;
  // Enqueues a step of the op; `captured`: without host copies of lengths.
  void enqueue(int step, bool captured);
  void wait();

  Decode& decode_;
  MlaDecode* latents_;  // of latents, whose `decode_` is in it; else null
  Collective collective_;
  std::optional<LoadedCache> cache_;
  std::vector<CachePools> more_;
  RankResult result_;
  Buffer q_, sinks_;
  Buffer mask_indices_, mask_counts_;  // where the job has a block mask
  MlaWeights weights_;                 // of latents
  DecodeInputs inputs_;
  DecodeOutputs outputs_;
  std::unique_ptr<Events> marks_;
  std::unique_ptr<Replay> replay_;
  int replayed_ = 0;  // steps of the replay
};

}  // namespace ringattn
