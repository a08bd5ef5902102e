// SPDX-License-Identifier: Apache-2.0
// Turns a configuration into a decode kernel and its launch. kernels/instances.cmake lists its instantiations.
#pragma once

#include "base/cuda.hpp"
#include "kernels/decode/sm80/decode.cuh"
#include "kernels/decode/sm80/decode.hpp"

namespace ringattn::sm80 {

template <class Element_, AttentionConfig kAttention>
struct DecodeConfig {
  using Element = Element_;
  static constexpr int kDim = kAttention.head_dim;
  static constexpr int kDimV = kAttention.head_dim_v;
  static constexpr int kKeyTile = kAttention.key_tile;
  // Rows of one prefill query tile attend to the same KV tiles.
  static constexpr int kPrefillTile = kAttention.query_tile();
  static constexpr int kQueryTile = decode_rows(kAttention);
  static constexpr int kRowBlocks = kAttention.slices > 1 ? kAttention.rows_of_warp / 16 : 1;  // of 16 rows, per warp
  static constexpr int kThreads = decode_threads(kAttention);
  static constexpr int kStages = decode_stages(kAttention);
  static constexpr int kPages = decode_pages(kAttention);
  static constexpr int kCtas = kAttention.slices > 1 ? kAttention.ctas : 2;
  static constexpr int kColumnsAtOnce = kAttention.slices > 1         ? kAttention.columns_at_once
                                        : kAttention.head_dim_v > 128 ? 1
                                                                      : 2;
  static constexpr bool kEndBasicBlock = kAttention.end_basic_block;
  static constexpr bool kPositions = false;
  static constexpr int kSlices = kAttention.slices;
};

// `kernel` decodes plain or compressed caches.
template <class Element, AttentionConfig kAttention, class Params>
int prepare_decode(void (*kernel)(Params)) {
  using C = DecodeConfig<Element, kAttention>;
  constexpr int kBytes = kDecodeLaunchBytes<C>;
  static_assert(decode_layout_bytes<C>() == decode_bytes(kAttention, C::kStages));
  static_assert(kBytes + 256 <= kMaxSharedBytes);
  static_assert(sizeof(DecodeWorkTile) <= 256);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  int ctas = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, C::kThreads, kBytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return ctas;
}

template <class Element, AttentionConfig kAttention, class Params>
void launch_decode(void (*kernel)(Params), const Params& params, int ctas, Stream stream) {
  using C = DecodeConfig<Element, kAttention>;
  kernel<<<static_cast<unsigned>(ctas), C::kThreads, kDecodeLaunchBytes<C>, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_attention's decode");
}

template <class Element, AttentionConfig kAttention>
constexpr DecodeLauncher decode_launcher() {
  using C = DecodeConfig<Element, kAttention>;
  return {[] { return prepare_decode<Element, kAttention>(decode_kernel<C>); },
          [](const DecodeParams& params, int ctas, Stream stream) {
            launch_decode<Element, kAttention>(decode_kernel<C>, params, ctas, stream);
          }};
}

}  // namespace ringattn::sm80
