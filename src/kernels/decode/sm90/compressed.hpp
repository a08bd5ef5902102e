// SPDX-License-Identifier: Apache-2.0
// The compiled decode kernels of sm90_attention over quantized caches: one for each element type and head dims
// (kernels/instances.cmake).
#pragma once

#include <string>
#include <vector>

#include "base/memory.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/decode/sm90/compressed_params.hpp"

namespace ringattn::sm90 {

// As DecodeLauncher. The cache fields of params are set already, except the stages.
struct CompressedLauncher {
  void (*prepare)();
  void (*launch)(const CompressedParams& params, int ctas, Stream stream);
  void (*launch_sliced)(const CompressedParams& params, int clusters, Stream stream);
  int (*clusters_at_a_time)(int slices);
};

extern const CompressedLauncher compressed_bf16_64;
extern const CompressedLauncher compressed_bf16_96;
extern const CompressedLauncher compressed_bf16_128;
extern const CompressedLauncher compressed_bf16_192;
extern const CompressedLauncher compressed_bf16_256;
extern const CompressedLauncher compressed_fp16_64;
extern const CompressedLauncher compressed_fp16_96;
extern const CompressedLauncher compressed_fp16_128;
extern const CompressedLauncher compressed_fp16_192;
extern const CompressedLauncher compressed_fp16_256;

const CompressedLauncher& compressed_launcher_of(const DecodeSpec& spec, bool configured);

// Formats of a spec that sm90_attention does not support; empty: none.
std::vector<std::string> formats_missing(const DecodeSpec& spec);

// Whether the sliced kernel decodes these formats: those that the compression methods make. Other 4-bit formats, keys
// quantized by token or values by channel, are decoded tile by tile.
bool slices_formats(const CacheFormat& format);

// Sets the cache fields of a step after all others. Throws kUnsupported if TMA can't read the caches.
void set_compressed(const DecodeStep& step, CompressedParams& p);

}  // namespace ringattn::sm90
