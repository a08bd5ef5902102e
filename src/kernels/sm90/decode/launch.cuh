// SPDX-License-Identifier: Apache-2.0
// From a configuration to a decode kernel and its launch; the decode_*.cu files instantiate it.
#pragma once

#include "base/cuda.hpp"
#include "kernels/sm90/decode/decode.cuh"
#include "kernels/sm90/decode/decode.hpp"
#include "kernels/sm90/fold/hopper_params.hpp"

namespace ringattn::sm90 {

template <class Element_, FoldConfig kFold>
struct DecodeConfig {
  using Element = Element_;
  static constexpr int kDim = kFold.head_dim;
  static constexpr int kDimV = kFold.head_dim_v;
  static constexpr int kPanelsV = (kDimV + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kKeyTile = kFold.key_tile;
  static constexpr int kRounds = 1;
  static constexpr int kStages = decode_stages(kFold);
  static constexpr int kQBytes = kFold.q_bytes();
  static constexpr int kKBytes = kFold.k_bytes();
  static constexpr int kVBytes = kFold.v_bytes();
};

template <class Element, FoldConfig kFold>
void prepare_decode() {
  using C = DecodeConfig<Element, kFold>;
  check_device();
  check_cuda(
      cudaFuncSetAttribute(decode_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, int{DecodeMap<C>::kBytes}),
      "cudaFuncSetAttribute");
}

template <class Element, FoldConfig kFold>
void launch_decode(const DecodeParams& params, int ctas, Stream stream) {
  using C = DecodeConfig<Element, kFold>;
  decode_kernel<C><<<static_cast<unsigned>(ctas), kDecodeThreads, DecodeMap<C>::kBytes, cuda_stream(stream)>>>(params);
  check_cuda(cudaGetLastError(), "sm90_fold's decode");
}

template <class Element, FoldConfig kFold>
constexpr DecodeLauncher decode_launcher() {
  return {prepare_decode<Element, kFold>, launch_decode<Element, kFold>};
}

}  // namespace ringattn::sm90
