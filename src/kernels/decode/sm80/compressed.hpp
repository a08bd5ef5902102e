// SPDX-License-Identifier: Apache-2.0
// The compiled decode kernels of sm80_attention for compressed caches: one for each pair of element type and head dims
// (kernels/instances.cmake). The MLA kernel exists for bf16 only, because the FP8 latent cache has only bf16.
#pragma once

#include <string>
#include <vector>

#include "base/memory.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/decode/sm80/compressed_params.hpp"

namespace ringattn::sm80 {

// As DecodeLauncher.
struct CompressedLauncher {
  int (*prepare)();
  void (*launch)(const CompressedParams& params, int ctas, Stream stream);
};

extern const CompressedLauncher compressed_bf16_64;
extern const CompressedLauncher compressed_bf16_96;
extern const CompressedLauncher compressed_bf16_128;
extern const CompressedLauncher compressed_bf16_192;
extern const CompressedLauncher compressed_bf16_256;
extern const CompressedLauncher compressed_bf16_576;
extern const CompressedLauncher compressed_fp16_64;
extern const CompressedLauncher compressed_fp16_96;
extern const CompressedLauncher compressed_fp16_128;
extern const CompressedLauncher compressed_fp16_192;
extern const CompressedLauncher compressed_fp16_256;

const CompressedLauncher& compressed_launcher_of(const DecodeSpec& spec, bool configured);

// Returns what sm80_attention lacks for a spec's formats, or nothing.
std::vector<std::string> formats_missing(const DecodeSpec& spec);

// Sets the caches of a decode step. Throws kUnsupported if the kernel can't read them.
void set_compressed(const DecodeSpec& spec, const DecodeStep& step, CompressedParams& p);

}  // namespace ringattn::sm80
