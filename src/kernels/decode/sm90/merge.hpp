// SPDX-License-Identifier: Apache-2.0
// The last kernel of a decode step whose KV splits are on several ranks or in several launches: merges their partials
// into output rows (split-KV combine).
#pragma once

#include "base/dtype.hpp"
#include "base/memory.hpp"
#include "kernels/decode/sm90/decode_params.hpp"

namespace ringattn::sm90 {

inline constexpr int kMaxPartitions = 64;

struct MergeParams {
  cuda::AttentionParams attention;  // shape and output
  DecodeRows rows;
  std::int64_t partial_splits;  // splits of each row in `partials`
  std::int32_t kv_split_keys;
  std::int32_t partitions;
  const float* partials[kMaxPartitions];  // [partitions], each in the layout of DecodePartials
  // MlaParams::whole: if it is 1, rows that have splits are finished already; null: none is
  const std::int32_t* whole;
};

// Loads the code on the current device. Otherwise the first launch would do it, and might block.
void prepare_merge(Dtype dtype);
void launch_merge(const MergeParams& params, Dtype dtype, Stream stream);

}  // namespace ringattn::sm90
