// SPDX-License-Identifier: Apache-2.0
// Turns a configuration into a decode kernel for compressed caches and its launch. The compressed_*.cu files
// instantiate it.
#pragma once

#include "kernels/sm80/decode/compressed.cuh"
#include "kernels/sm80/decode/compressed.hpp"
#include "kernels/sm80/decode/launch.cuh"

namespace ringattn::sm80 {

template <class Element, AttentionConfig kAttention>
constexpr CompressedLauncher compressed_launcher() {
  using C = DecodeConfig<Element, kAttention>;
  return {[] { return prepare_decode<Element, kAttention>(compressed_kernel<C>); },
          [](const CompressedParams& params, int ctas, Stream stream) {
            launch_decode<Element, kAttention>(compressed_kernel<C>, params, ctas, stream);
          }};
}

}  // namespace ringattn::sm80
