// SPDX-License-Identifier: Apache-2.0
// What a decode step needs and transfers on a number of ranks, computed only from the job: no ranks, no devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/tokens/decode_deal.hpp"
#include "kernels/decode/decode.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/decode/decode_memory.hpp"
#include "ops/mla/mla_gemms.hpp"

namespace ringattn {

struct DecodePlanSummary {
  DecodeJob job;
  DecodeDeal deal;
  int key_tile = 0;
  std::int64_t kv_split_keys = 0;
  std::int64_t kv_splits = 0;          // of the longest sequence
  DecodeMemory memory;                 // of the rank that needs most
  std::vector<std::int64_t> keys;      // of each rank's cache, those of pages that sequences share once for each
  std::vector<int> kv_heads;           // of these keys
  std::vector<std::int64_t> attended;  // keys that each rank's rows see, per K/V head, within the block mask
  std::vector<std::int64_t> rows;      // that each rank owns
  std::vector<std::int64_t> received;  // bytes of partial results
  double bytes_read = 0.0;             // decode_bytes(): of K and V, by all ranks together

  std::int64_t bytes_moved() const;
  double balance() const;  // `attended` of the rank that has most, over the mean
  int idle() const;        // ranks without keys to attend to
};

// `kernel`: of the spec of the largest part. It may be made on a backend without a device, and so may `products`, which
// are there for latents. Throws what check_decode_job() and DecodeKernel::check() throw.
DecodePlanSummary summarize_decode_plan(const JobInput& input, const DecodeKernel& kernel, int ranks,
                                        const CacheFormat& format = {}, const MlaGemms& gemms = {});

}  // namespace ringattn
