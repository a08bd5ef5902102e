// SPDX-License-Identifier: Apache-2.0
// From a configuration to a decode kernel and its launch; the decode_*.cu files instantiate it.
#pragma once

#include "base/cuda.hpp"
#include "kernels/sm80/decode/decode.cuh"
#include "kernels/sm80/decode/decode.hpp"

namespace ringattn::sm80 {

template <class Element_, FoldConfig kFold>
struct DecodeConfig {
  using Element = Element_;
  static constexpr int kDim = kFold.head_dim;
  static constexpr int kDimV = kFold.head_dim_v;
  static constexpr int kKeyTile = kFold.key_tile;
  static constexpr int kPrefillTile = kFold.query_tile();  // rows of one fold the same key tiles
  static constexpr int kQueryTile = decode_rows(kFold);
  static constexpr int kRowBlocks = kFold.slices > 1 ? kFold.rows_of_warp / 16 : 1;  // of a warp
  static constexpr int kThreads = decode_threads(kFold);
  static constexpr int kStages = decode_stages(kFold);
  static constexpr int kPages = decode_pages(kFold);
  static constexpr int kCtas = kFold.slices > 1 ? kFold.ctas : 2;
  static constexpr int kColumnsAtOnce = kFold.slices > 1 ? kFold.columns_at_once : kFold.head_dim_v > 128 ? 1 : 2;
  static constexpr bool kSeam = kFold.seam;
  static constexpr bool kPositions = false;
  static constexpr int kSlices = kFold.slices;
};

// `kernel` decodes plain caches or compressed ones.
template <class Element, FoldConfig kFold, class Params>
int prepare_decode(void (*kernel)(Params)) {
  using C = DecodeConfig<Element, kFold>;
  constexpr int kBytes = decode_kernel_bytes<C>();
  static_assert(kBytes == decode_bytes(kFold, C::kStages) && kBytes + 256 <= kMostSharedBytes);
  static_assert(sizeof(DecodeUnit) <= 256);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "cudaFuncSetAttribute");
  int ctas = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, C::kThreads, kBytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return ctas;
}

template <class Element, FoldConfig kFold, class Params>
void launch_decode(void (*kernel)(Params), const Params& params, int ctas, Stream stream) {
  using C = DecodeConfig<Element, kFold>;
  kernel<<<static_cast<unsigned>(ctas), C::kThreads, decode_kernel_bytes<C>(), cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm80_fold's decode");
}

template <class Element, FoldConfig kFold>
constexpr DecodeLauncher decode_launcher() {
  using C = DecodeConfig<Element, kFold>;
  return {[] { return prepare_decode<Element, kFold>(decode_kernel<C>); },
          [](const DecodeParams& params, int ctas, Stream stream) {
            launch_decode<Element, kFold>(decode_kernel<C>, params, ctas, stream);
          }};
}

}  // namespace ringattn::sm80
