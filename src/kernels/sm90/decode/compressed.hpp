// SPDX-License-Identifier: Apache-2.0
// The compiled decode kernels of sm90_attention over compressed caches: one for each pair of element type and head dims
// (compressed_*.cu).
#pragma once

#include <string>
#include <vector>

#include "base/memory.hpp"
#include "kernels/decode.hpp"
#include "kernels/sm90/decode/compressed_params.hpp"

namespace ringattn::sm90 {

// As DecodeLauncher. What the params say of the cache is filled in already, but for stages.
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

// What sm90_attention lacks of a spec's formats; empty: nothing.
std::vector<std::string> formats_missing(const DecodeSpec& spec);

// Whether the sliced kernel decodes caches of these formats: those that methods of compression make. Others of 4 bits,
// keys by token or values by channel, are folded tile by tile.
bool slices_formats(const CacheFormat& format);

// The caches of a step, p.step being filled but for its maps. Throws kUnsupported where the copy engine can't read
// them.
void set_compressed(const DecodeStep& step, CompressedParams& p);

}  // namespace ringattn::sm90
