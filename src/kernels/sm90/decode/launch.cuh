// SPDX-License-Identifier: Apache-2.0
// From a configuration to a decode kernel and its launch; the decode_*.cu files instantiate it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/cuda/device/pdl_launch.hpp"
#include "kernels/sm90/decode/decode.cuh"
#include "kernels/sm90/decode/decode.hpp"
#include "kernels/sm90/decode/prefix.cuh"
#include "kernels/sm90/decode/sliced.cuh"
#include "kernels/sm90/fold/hopper_params.hpp"

namespace ringattn::sm90 {

template <class Element_, AttentionConfig kAttention>
struct DecodeConfig {
  using Element = Element_;
  using KvSplits = FixedKvSplits;
  static constexpr int kDim = kAttention.head_dim;
  static constexpr int kDimV = kAttention.head_dim_v;
  static constexpr int kPanelsV = (kDimV + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kKeyTile = kAttention.key_tile;
  static constexpr int kQStages = 1;
  static constexpr int kSlices = 1;
  static constexpr int kQBytes = kAttention.q_bytes();
  static constexpr int kQCapacity = kQBytes;
  static constexpr int kStages = decode_stages(kAttention);
  static constexpr int kKBytes = kAttention.k_bytes();
  static constexpr int kVBytes = kAttention.v_bytes();
};

template <class Element_, AttentionConfig kAttention>
struct PrefixConfig : DecodeConfig<Element_, kAttention> {
  using Whole = PrefixConfig;
  static constexpr int kScorers = kAttention.head_dim_v > 128 ? 1 : 2;
  static constexpr int kPanels = kPrefixPanels;
  static constexpr int kQCapacity = prefix_q_capacity(kAttention);
  static constexpr int kStages = prefix_stages(kAttention);
};

// The same by pairs of CTAs, of which each has half of the outputs' columns: kDimV are a CTA's.
template <class Element_, AttentionConfig kAttention>
struct PrefixCtaPairConfig : DecodeConfig<Element_, kAttention> {
  using Whole = PrefixConfig<Element_, kAttention>;  // for work_tiles that are folded tile by tile
  static constexpr int kSlices = 2;
  static constexpr int kScorers = 2;
  static constexpr int kDimV = kAttention.head_dim_v / kSlices;
  static constexpr int kPanelsV = kDimV / kPanelColumns;
  static constexpr int kVBytes = kAttention.v_bytes() / kSlices;
  static constexpr int kPanels = kPrefixCtaPairPanels;
  static constexpr int kQCapacity = kPrefixCtaPairQCapacity;
  static constexpr int kStages = prefix_cta_pair_stages(kAttention);
};

// Head dims for which pairs are compiled: those whose halves fill a panel each. (Of 256, the warpgroup that folds whole
// work_tiles needs more registers than there are beside two that score.)
template <AttentionConfig kAttention>
constexpr bool cta_pairs_prefixes() {
  return kAttention.head_dim == kAttention.head_dim_v && kAttention.head_dim_v == 2 * kPanelColumns;
}

// kScoringWarpgroups_: of four warps that score; they take tiles in turn.
template <class Element_, AttentionConfig kAttention, int kSlices_, int kScoringWarpgroups_ = 1>
struct SlicedConfig {
  using Element = Element_;
  using KvSplits = FixedKvSplits;
  using Whole = DecodeConfig<Element_, kAttention>;  // for work_tiles that are folded tile by tile
  static constexpr int kDim = kAttention.head_dim;
  static constexpr int kDimV = kAttention.head_dim_v;
  static constexpr int kKeyTile = kAttention.key_tile;
  static constexpr int kQStages = 1;
  static constexpr int kSlices = kSlices_;
  static constexpr int kSliceColumns = kDimV / kSlices;
  static constexpr int kVRowBytes = kSliceColumns < kPanelColumns ? 2 * kSliceColumns : kPanelRowBytes;
  static constexpr int kKBytes = kAttention.k_bytes();
  static constexpr int kVBytes = kKeyTile * kVRowBytes * ((2 * kSliceColumns + kVRowBytes - 1) / kVRowBytes);
  static constexpr int kScoringWarpgroups = kScoringWarpgroups_;
  static constexpr int kScoringWarpgroupWarps = 4;
  static constexpr int kScoreWarps = kScoringWarpgroups * kScoringWarpgroupWarps;
  static constexpr int kOutWarps = std::min(kSliceColumns / 8, 4);
  static constexpr int kThreads = 32 * (kScoreWarps + kOutWarps + 4);  // two that add up, two that fetch
  static constexpr int kScoreBlocks =
      (kKeyTile / 16 + kScoringWarpgroupWarps - 1) / kScoringWarpgroupWarps;  // of 16 keys, a warp's
  static constexpr int kScoreStages = kSlices < 4 ? 4 : 2 * kSlices;
  static constexpr bool kResumes = true;  // work_tiles may go on from the states of a prefix
  static constexpr int kKStages = kKBytes > 32768 ? 2 : kKBytes > 16384 ? 3 : 5;
  static constexpr int kWeightsBytes = 20 * 1024 + kSlicedRows * cuda::padded_row_bytes(kDim);  // and more
  static constexpr int kVCapacity = (kMaxSharedBytes - kKStages * kKBytes - kScoreStages * ScoreStage::kBytes -
                                     kWeightsBytes - kDecodeMetadataBytes) /
                                    kVBytes;
  static constexpr int kVStages = kVCapacity < 16 ? kVCapacity : 16;
};

// Shared memory of its CTAs, whichever path they fold.
template <class S>
constexpr int sliced_bytes() {
  return std::max(int{SlicedMap<S>::kBytes}, int{DecodeMap<typename S::Whole>::kBytes});
}

// Slices of 16 columns or more that fill panels, or a part of one that the copy engine can swizzle.
template <AttentionConfig kAttention>
constexpr bool can_slice(int slices) {
  if (slices == 1) return true;
  const int columns = kAttention.head_dim_v / slices;
  return kAttention.head_dim_v % slices == 0 && (columns % kPanelColumns == 0 || columns == 32 || columns == 16);
}

// Calls with(std::integral_constant<int, n>) for the slices that kernels are compiled for.
template <AttentionConfig kAttention, class With>
void for_slices(With with) {
  const auto try_one = [&]<int kSlices>(std::integral_constant<int, kSlices> slices) {
    if constexpr (can_slice<kAttention>(kSlices)) with(slices);
  };
  if constexpr (!can_slice<kAttention>(2)) try_one(std::integral_constant<int, 1>());
  try_one(std::integral_constant<int, 2>());
  try_one(std::integral_constant<int, 4>());
}

template <class Element, AttentionConfig kAttention>
void prepare_decode() {
  using C = DecodeConfig<Element, kAttention>;
  using P = PrefixConfig<Element, kAttention>;
  check_device();
  check_cuda(
      cudaFuncSetAttribute(decode_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, int{DecodeMap<C>::kBytes}),
      "cudaFuncSetAttribute");
  check_cuda(
      cudaFuncSetAttribute(prefix_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, int{PrefixMap<P>::kBytes}),
      "cudaFuncSetAttribute");
  if constexpr (cta_pairs_prefixes<kAttention>()) {
    using Pair = PrefixCtaPairConfig<Element, kAttention>;
    check_cuda(cudaFuncSetAttribute(prefix_kernel<Pair>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    int{PrefixMap<Pair>::kBytes}),
               "cudaFuncSetAttribute");
  }
  for_slices<kAttention>([]<int kSlices>(std::integral_constant<int, kSlices>) {
    using S = SlicedConfig<Element, kAttention, kSlices>;
    check_cuda(cudaFuncSetAttribute(sliced_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, sliced_bytes<S>()),
               "cudaFuncSetAttribute");
  });
}

template <class Element, AttentionConfig kAttention>
void launch_decode(const DecodeParams& params, int ctas, Stream stream) {
  using C = DecodeConfig<Element, kAttention>;
  const cuda::PdlLaunch launch(ctas, kDecodeThreads, DecodeMap<C>::kBytes, stream);
  check_cuda(cudaLaunchKernelEx(&launch.config, decode_kernel<C>, params), "sm90_attention's decode");
}

template <class Element, AttentionConfig kAttention>
void launch_prefix_splits(const DecodeParams& params, int ctas, Stream stream) {
  using C = PrefixConfig<Element, kAttention>;
  const cuda::PdlLaunch launch(ctas, kPrefixThreads<C>, PrefixMap<C>::kBytes, stream);
  check_cuda(cudaLaunchKernelEx(&launch.config, prefix_kernel<C>, params), "sm90_attention's shared prefixes");
}

// Of pairs of CTAs, so many.
template <class Pair>
struct CtaPairLaunch : cuda::PdlLaunch {
  CtaPairLaunch(int pairs, Stream stream)
      : cuda::PdlLaunch(2 * pairs, kPrefixThreads<Pair>, int{PrefixMap<Pair>::kBytes}, stream) {
    set_cluster_size(2);
  }
};

template <class Element, AttentionConfig kAttention>
void launch_prefix_cta_pairs(const DecodeParams& params, int pairs, Stream stream) {
  if constexpr (cta_pairs_prefixes<kAttention>()) {
    using Pair = PrefixCtaPairConfig<Element, kAttention>;
    const CtaPairLaunch<Pair> launch(pairs, stream);
    check_cuda(cudaLaunchKernelEx(&launch.config, prefix_kernel<Pair>, params), "sm90_attention's shared prefixes");
  }
}

// How many clusters of a launch the current device holds at a time.
template <class Kernel>
int clusters_at_a_time(Kernel* kernel, cuda::PdlLaunch& launch) {
  int count = 0;
  launch.config.attrs = launch.attributes + 1;  // this question is asked of the clusters alone
  launch.config.numAttrs = 1;
  check_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config), "cudaOccupancyMaxActiveClusters");
  return count;
}

template <class Element, AttentionConfig kAttention>
int prefix_cta_pairs() {
  if constexpr (cta_pairs_prefixes<kAttention>()) {
    using Pair = PrefixCtaPairConfig<Element, kAttention>;
    CtaPairLaunch<Pair> launch(1, Stream{});
    return clusters_at_a_time(prefix_kernel<Pair>, launch);
  } else {
    return 0;
  }
}

template <class Element, AttentionConfig kAttention>
void launch_sliced_decode(const DecodeParams& params, int clusters, Stream stream) {
  for_slices<kAttention>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    if (params.slices != kSlices) return;
    using S = SlicedConfig<Element, kAttention, kSlices>;
    cuda::PdlLaunch launch(clusters * kSlices, S::kThreads, sliced_bytes<S>(), stream);
    if (kSlices > 1) launch.set_cluster_size(kSlices);
    check_cuda(cudaLaunchKernelEx(&launch.config, sliced_kernel<S>, params), "sm90_attention's decode");
  });
}

template <class Element, AttentionConfig kAttention>
int sliced_clusters(int slices) {
  int count = 0;
  for_slices<kAttention>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    if (slices != kSlices) return;
    using S = SlicedConfig<Element, kAttention, kSlices>;
    cuda::PdlLaunch launch(kSlices, S::kThreads, sliced_bytes<S>(), Stream{});
    launch.set_cluster_size(kSlices);
    count = clusters_at_a_time(sliced_kernel<S>, launch);
  });
  return count;
}

template <class Element, AttentionConfig kAttention>
constexpr DecodeLauncher decode_launcher() {
  return {prepare_decode<Element, kAttention>,          launch_decode<Element, kAttention>,
          launch_sliced_decode<Element, kAttention>,    launch_prefix_splits<Element, kAttention>,
          launch_prefix_cta_pairs<Element, kAttention>, sliced_clusters<Element, kAttention>,
          prefix_cta_pairs<Element, kAttention>};
}

}  // namespace ringattn::sm90
