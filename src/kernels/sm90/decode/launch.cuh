// SPDX-License-Identifier: Apache-2.0
// From a configuration to a decode kernel and its launch; the decode_*.cu files instantiate it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "base/cuda.hpp"
#include "kernels/cuda/device/overlapping_launch.hpp"
#include "kernels/sm90/decode/decode.cuh"
#include "kernels/sm90/decode/decode.hpp"
#include "kernels/sm90/decode/prefix.cuh"
#include "kernels/sm90/decode/sliced.cuh"
#include "kernels/sm90/fold/hopper_params.hpp"

namespace ringattn::sm90 {

template <class Element_, FoldConfig kFold>
struct DecodeConfig {
  using Element = Element_;
  using Groups = FixedGroups;
  static constexpr int kDim = kFold.head_dim;
  static constexpr int kDimV = kFold.head_dim_v;
  static constexpr int kPanelsV = (kDimV + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kKeyTile = kFold.key_tile;
  static constexpr int kRounds = 1;
  static constexpr int kSlices = 1;
  static constexpr int kQBytes = kFold.q_bytes();
  static constexpr int kQRoom = kQBytes;
  static constexpr int kStages = decode_stages(kFold);
  static constexpr int kKBytes = kFold.k_bytes();
  static constexpr int kVBytes = kFold.v_bytes();
};

template <class Element_, FoldConfig kFold>
struct PrefixConfig : DecodeConfig<Element_, kFold> {
  using Whole = PrefixConfig;
  static constexpr int kScorers = kFold.head_dim_v > 128 ? 1 : 2;
  static constexpr int kPanels = kPrefixPanels;
  static constexpr int kQRoom = prefix_q_room(kFold);
  static constexpr int kStages = prefix_stages(kFold);
};

// The same by pairs of CTAs, of which each has half of the outputs' columns: kDimV are a CTA's.
template <class Element_, FoldConfig kFold>
struct PrefixPairConfig : DecodeConfig<Element_, kFold> {
  using Whole = PrefixConfig<Element_, kFold>;  // for units that are folded tile by tile
  static constexpr int kSlices = 2;
  static constexpr int kScorers = 2;
  static constexpr int kDimV = kFold.head_dim_v / kSlices;
  static constexpr int kPanelsV = kDimV / kPanelColumns;
  static constexpr int kVBytes = kFold.v_bytes() / kSlices;
  static constexpr int kPanels = kPrefixPairPanels;
  static constexpr int kQRoom = kPrefixPairQRoom;
  static constexpr int kStages = prefix_pair_stages(kFold);
};

// Head dims for which pairs are compiled: those whose halves fill a panel each. (Of 256, the warpgroup that folds whole
// units needs more registers than there are beside two that score.)
template <FoldConfig kFold>
constexpr bool pairs_prefixes() {
  return kFold.head_dim == kFold.head_dim_v && kFold.head_dim_v == 2 * kPanelColumns;
}

// kTeams_: of four warps that score; they take tiles in turn.
template <class Element_, FoldConfig kFold, int kSlices_, int kTeams_ = 1>
struct SlicedConfig {
  using Element = Element_;
  using Groups = FixedGroups;
  using Whole = DecodeConfig<Element_, kFold>;  // for units that are folded tile by tile
  static constexpr int kDim = kFold.head_dim;
  static constexpr int kDimV = kFold.head_dim_v;
  static constexpr int kKeyTile = kFold.key_tile;
  static constexpr int kRounds = 1;
  static constexpr int kSlices = kSlices_;
  static constexpr int kSliceColumns = kDimV / kSlices;
  static constexpr int kVRowBytes = kSliceColumns < kPanelColumns ? 2 * kSliceColumns : kPanelRowBytes;
  static constexpr int kKBytes = kFold.k_bytes();
  static constexpr int kVBytes = kKeyTile * kVRowBytes * ((2 * kSliceColumns + kVRowBytes - 1) / kVRowBytes);
  static constexpr int kTeams = kTeams_;
  static constexpr int kTeamWarps = 4;
  static constexpr int kScoreWarps = kTeams * kTeamWarps;
  static constexpr int kOutWarps = std::min(kSliceColumns / 8, 4);
  static constexpr int kThreads = 32 * (kScoreWarps + kOutWarps + 4);                 // two that add up, two that fetch
  static constexpr int kScoreBlocks = (kKeyTile / 16 + kTeamWarps - 1) / kTeamWarps;  // of 16 keys, a warp's
  static constexpr int kSlots = kSlices < 4 ? 4 : 2 * kSlices;
  static constexpr bool kResumes = true;  // units may go on from the states of a prefix
  static constexpr int kKStages = kKBytes > 32768 ? 2 : kKBytes > 16384 ? 3 : 5;
  static constexpr int kWeightsBytes = 20 * 1024 + kSlicedRows * cuda::padded_row_bytes(kDim);  // and more
  static constexpr int kVRoom =
      (kMostSharedBytes - kKStages * kKBytes - kSlots * ScoreSlot::kBytes - kWeightsBytes - kDecodeNumberBytes) /
      kVBytes;
  static constexpr int kVStages = kVRoom < 16 ? kVRoom : 16;
};

// Shared memory of its CTAs, whichever way they fold.
template <class S>
constexpr int sliced_bytes() {
  return std::max(int{SlicedMap<S>::kBytes}, int{DecodeMap<typename S::Whole>::kBytes});
}

// Slices of 16 columns or more that fill panels, or a part of one that the copy engine can swizzle.
template <FoldConfig kFold>
constexpr bool can_slice(int slices) {
  if (slices == 1) return true;
  const int columns = kFold.head_dim_v / slices;
  return kFold.head_dim_v % slices == 0 && (columns % kPanelColumns == 0 || columns == 32 || columns == 16);
}

// Calls with(std::integral_constant<int, n>) for the slices that kernels are compiled for.
template <FoldConfig kFold, class With>
void for_slices(With with) {
  const auto try_one = [&]<int kSlices>(std::integral_constant<int, kSlices> slices) {
    if constexpr (can_slice<kFold>(kSlices)) with(slices);
  };
  if constexpr (!can_slice<kFold>(2)) try_one(std::integral_constant<int, 1>());
  try_one(std::integral_constant<int, 2>());
  try_one(std::integral_constant<int, 4>());
}

template <class Element, FoldConfig kFold>
void prepare_decode() {
  using C = DecodeConfig<Element, kFold>;
  using P = PrefixConfig<Element, kFold>;
  check_device();
  check_cuda(
      cudaFuncSetAttribute(decode_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, int{DecodeMap<C>::kBytes}),
      "cudaFuncSetAttribute");
  check_cuda(
      cudaFuncSetAttribute(prefix_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, int{PrefixMap<P>::kBytes}),
      "cudaFuncSetAttribute");
  if constexpr (pairs_prefixes<kFold>()) {
    using Pair = PrefixPairConfig<Element, kFold>;
    check_cuda(cudaFuncSetAttribute(prefix_kernel<Pair>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    int{PrefixMap<Pair>::kBytes}),
               "cudaFuncSetAttribute");
  }
  for_slices<kFold>([]<int kSlices>(std::integral_constant<int, kSlices>) {
    using S = SlicedConfig<Element, kFold, kSlices>;
    check_cuda(cudaFuncSetAttribute(sliced_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, sliced_bytes<S>()),
               "cudaFuncSetAttribute");
  });
}

template <class Element, FoldConfig kFold>
void launch_decode(const DecodeParams& params, int ctas, Stream stream) {
  using C = DecodeConfig<Element, kFold>;
  const cuda::OverlappingLaunch launch(ctas, kDecodeThreads, DecodeMap<C>::kBytes, stream);
  check_cuda(cudaLaunchKernelEx(&launch.config, decode_kernel<C>, params), "sm90_fold's decode");
}

template <class Element, FoldConfig kFold>
void launch_prefix_groups(const DecodeParams& params, int ctas, Stream stream) {
  using C = PrefixConfig<Element, kFold>;
  const cuda::OverlappingLaunch launch(ctas, kPrefixThreads<C>, PrefixMap<C>::kBytes, stream);
  check_cuda(cudaLaunchKernelEx(&launch.config, prefix_kernel<C>, params), "sm90_fold's shared prefixes");
}

// Of pairs of CTAs, so many.
template <class Pair>
struct PairLaunch : cuda::OverlappingLaunch {
  PairLaunch(int pairs, Stream stream)
      : cuda::OverlappingLaunch(2 * pairs, kPrefixThreads<Pair>, int{PrefixMap<Pair>::kBytes}, stream) {
    in_clusters_of(2);
  }
};

template <class Element, FoldConfig kFold>
void launch_prefix_pairs(const DecodeParams& params, int pairs, Stream stream) {
  if constexpr (pairs_prefixes<kFold>()) {
    using Pair = PrefixPairConfig<Element, kFold>;
    const PairLaunch<Pair> launch(pairs, stream);
    check_cuda(cudaLaunchKernelEx(&launch.config, prefix_kernel<Pair>, params), "sm90_fold's shared prefixes");
  }
}

// How many clusters of a launch the current device holds at a time.
template <class Kernel>
int clusters_at_a_time(Kernel* kernel, cuda::OverlappingLaunch& launch) {
  int count = 0;
  launch.config.attrs = launch.attributes + 1;  // this question is asked of the clusters alone
  launch.config.numAttrs = 1;
  check_cuda(cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config), "cudaOccupancyMaxActiveClusters");
  return count;
}

template <class Element, FoldConfig kFold>
int prefix_pairs() {
  if constexpr (pairs_prefixes<kFold>()) {
    using Pair = PrefixPairConfig<Element, kFold>;
    PairLaunch<Pair> launch(1, Stream{});
    return clusters_at_a_time(prefix_kernel<Pair>, launch);
  } else {
    return 0;
  }
}

template <class Element, FoldConfig kFold>
void launch_sliced_decode(const DecodeParams& params, int clusters, Stream stream) {
  for_slices<kFold>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    if (params.slices != kSlices) return;
    using S = SlicedConfig<Element, kFold, kSlices>;
    cuda::OverlappingLaunch launch(clusters * kSlices, S::kThreads, sliced_bytes<S>(), stream);
    if (kSlices > 1) launch.in_clusters_of(kSlices);
    check_cuda(cudaLaunchKernelEx(&launch.config, sliced_kernel<S>, params), "sm90_fold's decode");
  });
}

template <class Element, FoldConfig kFold>
int sliced_clusters(int slices) {
  int count = 0;
  for_slices<kFold>([&]<int kSlices>(std::integral_constant<int, kSlices>) {
    if (slices != kSlices) return;
    using S = SlicedConfig<Element, kFold, kSlices>;
    cuda::OverlappingLaunch launch(kSlices, S::kThreads, sliced_bytes<S>(), Stream{});
    launch.in_clusters_of(kSlices);
    count = clusters_at_a_time(sliced_kernel<S>, launch);
  });
  return count;
}

template <class Element, FoldConfig kFold>
constexpr DecodeLauncher decode_launcher() {
  return {prepare_decode<Element, kFold>,       launch_decode<Element, kFold>,
          launch_sliced_decode<Element, kFold>, launch_prefix_groups<Element, kFold>,
          launch_prefix_pairs<Element, kFold>,  sliced_clusters<Element, kFold>,
          prefix_pairs<Element, kFold>};
}

}  // namespace ringattn::sm90
