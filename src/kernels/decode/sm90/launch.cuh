// SPDX-License-Identifier: Apache-2.0
// Kernel traits and launch of the decode kernels. kernels/instances.cmake lists its instantiations.
#pragma once

#include <algorithm>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/attention/sm90/hopper_params.hpp"
#include "kernels/common/cuda/pdl_launch.hpp"
#include "kernels/decode/sm90/decode.cuh"
#include "kernels/decode/sm90/decode_params.hpp"
#include "kernels/decode/sm90/prefix.cuh"
#include "kernels/decode/sm90/sliced.cuh"

namespace ringattn::sm90 {

template <class Element_, AttentionConfig kAttention>
struct DecodeConfig {
  using Element = Element_;
  using Params = DecodeParams;
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
  using Params = PrefixParams;
  using Whole = PrefixConfig;
  static constexpr int kScorers = kAttention.head_dim_v > 128 ? 1 : 2;
  static constexpr int kPanels = kPrefixPanels;
  static constexpr int kQCapacity = prefix_q_capacity(kAttention);
  static constexpr int kStages = prefix_stages(kAttention);
};

// The prefix kernel on CTA pairs. Each CTA of a pair has half of the output columns, and kDimV is its number of
// columns.
template <class Element_, AttentionConfig kAttention>
struct PrefixCtaPairConfig : DecodeConfig<Element_, kAttention> {
  using Params = PrefixParams;
  using Whole = PrefixConfig<Element_, kAttention>;  // recomputes failed work tiles tile by tile
  static constexpr int kSlices = 2;
  static constexpr int kScorers = 2;
  static constexpr int kDimV = kAttention.head_dim_v / kSlices;
  static constexpr int kPanelsV = kDimV / kPanelColumns;
  static constexpr int kVBytes = kAttention.v_bytes() / kSlices;
  static constexpr int kPanels = kPrefixCtaPairPanels;
  static constexpr int kQCapacity = kPrefixCtaPairQCapacity;
  static constexpr int kStages = prefix_cta_pair_stages(kAttention);
};

// Head dims for which CTA pairs are compiled: each half fills one panel. With 256 the warpgroup that recomputes whole
// work tiles needs more registers than two scoring warpgroups leave.
template <AttentionConfig kAttention>
constexpr bool cta_pairs_prefixes() {
  return kAttention.head_dim == kAttention.head_dim_v && kAttention.head_dim_v == 2 * kPanelColumns;
}

// kScoringWarpgroups_: scoring warpgroups of four warps, which take tiles in turn.
template <class Element_, AttentionConfig kAttention, int kSlices_, int kScoringWarpgroups_ = 1>
struct ColumnSliceConfig {
  using Element = Element_;
  using KvSplits = FixedKvSplits;
  using Params = SlicedParams;
  using Whole = DecodeConfig<Element_, kAttention>;  // recomputes failed work tiles tile by tile
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
  static constexpr int kThreads = 32 * (kScoreWarps + kOutWarps + 4);  // two sum warps and two producer warps
  static constexpr int kScoreBlocks =
      (kKeyTile / 16 + kScoringWarpgroupWarps - 1) / kScoringWarpgroupWarps;  // blocks of 16 keys for each warp
  static constexpr int kScoreStages = kSlices < 4 ? 4 : 2 * kSlices;
  static constexpr int kKStages = kKBytes > 32768 ? 2 : kKBytes > 16384 ? 3 : 5;
  // unrounded probabilities, barriers and other metadata; an upper bound without Q
  static constexpr int kOtherBytes = 20 * 1024 + kColumnSliceRows * cuda::padded_row_bytes(kDim);
  static constexpr int kVCapacity =
      (kMaxSharedBytes - kKStages * kKBytes - kScoreStages * ScoreStage::kBytes - kOtherBytes - kDecodeMetadataBytes) /
      kVBytes;
  static constexpr int kVStages = kVCapacity < 16 ? kVCapacity : 16;
};

// Dynamic shared memory of a CTA for either of its paths.
template <class S>
constexpr int sliced_bytes() {
  return std::max(int{ColumnSliceMap<S>::kBytes}, int{DecodeMap<typename S::Whole>::kBytes});
}

// Slices of at least 16 columns that fill panels, or a part of a panel that TMA can swizzle.
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
    using S = ColumnSliceConfig<Element, kAttention, kSlices>;
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
void launch_prefix_splits(const PrefixParams& params, int ctas, Stream stream) {
  using C = PrefixConfig<Element, kAttention>;
  const cuda::PdlLaunch launch(ctas, kPrefixThreads<C>, PrefixMap<C>::kBytes, stream);
  check_cuda(cudaLaunchKernelEx(&launch.config, prefix_kernel<C>, params), "sm90_attention's shared prefixes");
}

// A launch of `pairs` CTA pairs.
template <class Pair>
struct CtaPairLaunch : cuda::PdlLaunch {
  CtaPairLaunch(int pairs, Stream stream)
      : cuda::PdlLaunch(2 * pairs, kPrefixThreads<Pair>, int{PrefixMap<Pair>::kBytes}, stream) {
    set_cluster_size(2);
  }
};

template <class Element, AttentionConfig kAttention>
void launch_prefix_cta_pairs(const PrefixParams& params, int pairs, Stream stream) {
  if constexpr (cta_pairs_prefixes<kAttention>()) {
    using Pair = PrefixCtaPairConfig<Element, kAttention>;
    const CtaPairLaunch<Pair> launch(pairs, stream);
    check_cuda(cudaLaunchKernelEx(&launch.config, prefix_kernel<Pair>, params), "sm90_attention's shared prefixes");
  }
}

// How many clusters of a launch are resident on the current device at a time.
template <class Kernel>
int clusters_at_a_time(Kernel* kernel, cuda::PdlLaunch& launch) {
  int count = 0;
  launch.config.attrs = launch.attributes + 1;  // the query accepts only the cluster attribute
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
void launch_sliced_decode(const SlicedParams& params, int clusters, Stream stream) {
  for_slices<kAttention>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    if (params.slices != kSlices) return;
    using S = ColumnSliceConfig<Element, kAttention, kSlices>;
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
    using S = ColumnSliceConfig<Element, kAttention, kSlices>;
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
