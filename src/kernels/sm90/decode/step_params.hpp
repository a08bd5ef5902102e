// SPDX-License-Identifier: Apache-2.0
// What decoding on Hopper has in common on the host, whichever kernel: from a step to a launch's parameters.
#pragma once

#include <string_view>

#include "base/memory.hpp"
#include "kernels/decode.hpp"
#include "kernels/sm90/decode/decode_params.hpp"
#include "kernels/sm90/fold/tensor_maps.hpp"

namespace ringattn::sm90 {

// Throws kUnsupported where steps would be larger than `kernel` can do.
void check_limits(std::string_view kernel, const DecodeLimits& limits, int shares);

// All of a step but its cache, cut into work_tiles of up to block_rows query rows.
void set_step(const AttentionSpec& spec, const DecodeStep& step, int block_rows, DecodeParams& params);
// Where the cache's pages are, and the boxes that tiles of key_tile keys are fetched in, of up to box_rows each.
void set_pages(const DecodeStep& step, int key_tile, int box_rows, DecodeParams& params);
// Throws kUnsupported where the copy engine can't read the cache.
MappedPages mapped_pages(std::string_view kernel, const CacheView& view);

// DecodeKernel::merge(), checked already, on the current device. `whole`: MergeParams::whole.
void merge_partitions(std::string_view kernel, const AttentionSpec& spec, std::int64_t kv_split_keys,
                      const DecodeMerge& merge, Stream stream, const std::int32_t* whole = nullptr);

}  // namespace ringattn::sm90
