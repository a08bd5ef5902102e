// SPDX-License-Identifier: Apache-2.0
// The end of a decoding step whose keys were dealt to several caches: what each left of its splits becomes rows of the
// output.
#pragma once

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "kernels/sm90/decode/decode_params.hpp"

namespace ringattn::sm90 {

inline constexpr int kMaxPartitions = 64;

struct MergeParams {
  DecodeParams step;  // the job's shape, lengths and output; neither a cache nor scratch
  std::int32_t kv_split_keys;
  std::int32_t partitions;
  const float* partials[kMaxPartitions];  // of each share, as DecodePartials says
  const std::int32_t* whole;  // DecodeParams::whole: where it is 1 rows that have splits are done; null: none is
};

// Loads the code to the current device, which a first launch would do otherwise, and might wait for.
void prepare_merge(Dtype dtype);
void launch_merge(const MergeParams& params, Dtype dtype, Stream stream);

}  // namespace ringattn::sm90
