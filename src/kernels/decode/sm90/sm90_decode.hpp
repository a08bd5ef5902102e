// SPDX-License-Identifier: Apache-2.0
// How the kernel `sm90_attention` decodes (decode/decode_table.cpp calls it), and the host code that it shares with MLA
// decode: from a DecodeStep to kernel parameters.
#pragma once

#include <memory>
#include <string_view>

#include "base/memory.hpp"
#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/decode/sm90/config.hpp"
#include "kernels/decode/sm90/decode_params.hpp"

namespace ringattn::sm90 {

// `backend` is a CudaBackend and must outlive the kernel. attention_missing() (config.hpp of prefill) says which specs
// are supported.
std::unique_ptr<DecodeKernel> make_decode(const DecodeSpec& spec, Backend& backend);

// Throws kUnsupported if a step may exceed the limits of `kernel`.
void check_limits(std::string_view kernel, const DecodeLimits& limits, int shares);

// Sets everything of a step except its cache and its block mask, cut into work tiles of up to block_rows query rows.
void set_step(const AttentionSpec& spec, const DecodeStep& step, int block_rows, WorkTileParams& params);
// Sets the block table, and the boxes, of up to box_rows rows, in which tiles of key_tile keys are loaded.
void set_pages(const DecodeStep& step, int key_tile, int box_rows, WorkTileParams& params);
// Throws kUnsupported if TMA can't read the cache.
MappedPages mapped_pages(std::string_view kernel, const CacheView& view);

// DecodeKernel::merge() on the current device, after its checks. `whole`: MergeParams::whole.
void merge_partitions(std::string_view kernel, const AttentionSpec& spec, std::int64_t kv_split_keys,
                      const DecodeMerge& merge, Stream stream, const std::int32_t* whole = nullptr);

}  // namespace ringattn::sm90
