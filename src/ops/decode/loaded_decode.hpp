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
  // Allocates everything and reads cache and queries. `caches`: copies of the cache that steps use in turn, so that no
  // step finds its keys in a device's L2 cache. Collective, as all calls. `decode` outlives the object.
  LoadedDecode(const JobInput& input, Decode& decode, const Collective& collective,
               const ProgressCallback& on_progress = {}, int caches = 1);
  // The same for MLA.
  LoadedDecode(const JobInput& input, MlaDecode& decode, const Collective& collective,
               const ProgressCallback& on_progress = {}, int caches = 1);

  // Starts on all ranks at once and returns when all are done.
  RunStats run();
  // Runs `count` consecutive steps, over the caches in turn, and returns the seconds per step. With one rank on a GPU
  // they are launched as a graph.
  double run_many(int count);
  // Returns the rows of the last step, in host memory. The object can't be used afterwards.
  RankResult fetch(const RunStats& stats);

 private:
  LoadedDecode(const JobInput& input, Decode& decode, MlaDecode* latents, const Collective& collective,
               const ProgressCallback& on_progress, int caches);
  const CachePools& pools_of(int step) const;
  // Enqueues a step of the op; `captured`: without host copies of lengths.
  void enqueue(int step, bool captured);
  void wait();

  Decode& decode_;
  MlaDecode* latents_;  // MLA only: the op that contains `decode_`; otherwise null
  Collective collective_;
  std::optional<LoadedCache> cache_;
  std::vector<CachePools> more_;
  RankResult result_;
  Buffer q_, sinks_;
  Buffer mask_indices_, mask_counts_;  // if the job has a block mask
  MlaWeights weights_;                 // MLA only
  DecodeInputs inputs_;
  DecodeOutputs outputs_;
  std::unique_ptr<Events> marks_;
  std::unique_ptr<Replay> replay_;
  int replayed_ = 0;  // steps replayed so far
};

}  // namespace ringattn
