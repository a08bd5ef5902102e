// SPDX-License-Identifier: Apache-2.0
// Makes the launcher of the decode kernel for compressed caches from an element type and an AttentionConfig. It is
// instantiated by kernels/instances.cmake.
#pragma once

#include "kernels/decode/sm80/compressed.cuh"
#include "kernels/decode/sm80/compressed.hpp"
#include "kernels/decode/sm80/launch.cuh"

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
