// SPDX-License-Identifier: Apache-2.0
// The memory and transfers of a decode step on a number of ranks, computed only from the job, without ranks and
// devices.
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
  std::vector<std::int64_t> keys;      // in each rank's cache; keys of shared pages count once per rank
  std::vector<int> kv_heads;           // K/V heads of these keys
  std::vector<std::int64_t> attended;  // keys that each rank's rows see, per K/V head, within the block mask
  std::vector<std::int64_t> rows;      // rows that each rank owns
  std::vector<std::int64_t> received;  // bytes of partial results
  double bytes_read = 0.0;             // decode_bytes(): of K and V, by all ranks together

  std::int64_t bytes_moved() const;
  double balance() const;  // `attended` of the rank with most, divided by the mean
  int idle() const;        // ranks without keys to attend to
};

// `kernel`: for the spec of the largest part. Its backend may have no device. Neither may that of `products`, which is
// given for MLA. Throws the errors of check_decode_job() and DecodeKernel::check().
DecodePlanSummary summarize_decode_plan(const JobInput& input, const DecodeKernel& kernel, int ranks,
                                        const CacheFormat& format = {}, const MlaGemms& gemms = {});

}  // namespace ringattn
