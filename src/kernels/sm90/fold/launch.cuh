// SPDX-License-Identifier: Apache-2.0
// From a configuration to a kernel and its launch; the fold_*.cu files instantiate it.
#pragma once

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/sm90/fold/fold.cuh"
#include "kernels/sm90/fold/fold.hpp"
#include "kernels/sm90/fold/hopper_params.hpp"

namespace ringattn::sm90 {

template <class Element_, FoldConfig kConfig>
struct KernelConfig {
  using Element = Element_;
  static constexpr int kDim = kConfig.head_dim;
  static constexpr int kDimV = kConfig.head_dim_v;
  static constexpr int kPanels = (kDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDimV + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kBoxColumns = FoldConfig::box_columns(kDim);
  static constexpr int kWalkCtas = kConfig.walk_ctas;
  static constexpr int kKeyBoxRows = kConfig.key_box_rows();
  static constexpr int kBoxColumnsK = kConfig.key_box_columns(kDim);
  static constexpr int kBoxColumnsV = kConfig.key_box_columns(kDimV);
  static constexpr int kKeyTile = kConfig.key_tile;
  static constexpr int kUnits = kConfig.warpgroups;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kRounds = kConfig.rounds;
  static constexpr bool kOverlaps = kConfig.overlaps;
  static constexpr bool kKeysAhead = kConfig.keys_ahead();
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kFetchRegisters = kConfig.fetch_registers();
  static constexpr int kFoldRegisters = kConfig.fold_registers();
  static constexpr int kQBytes = kConfig.q_bytes();
  static constexpr int kKBytes = kConfig.k_bytes();
  static constexpr int kVBytes = kConfig.v_bytes();
  static constexpr int kScratchFloats = kConfig.scratch_floats();
};

template <class Element, FoldConfig kConfig>
void prepare_kernel() {
  using C = KernelConfig<Element, kConfig>;
  check_cuda(
      cudaFuncSetAttribute(fold_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, int{SharedMap<C>::kBytes}),
      "cudaFuncSetAttribute");
}

template <class Element, FoldConfig kConfig>
void launch_kernel(const cuda::FoldParams& p, Stream stream) {
  using C = KernelConfig<Element, kConfig>;
  static_assert(C::kUnits > 1);  // WorkBuilder makes bundles of units
  static_assert(C::kWalkCtas <= 2);
  const HopperParams params = hopper_params(p, kConfig);
  const std::int64_t work = std::int64_t{p.tables.bundle_count} * p.schedule.piece_heads;
  const std::int64_t most = p.schedule.multiprocessors / C::kWalkCtas;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {C::kWalkCtas, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = static_cast<unsigned>((work < most ? work : most) * C::kWalkCtas);
  launch.blockDim = C::kThreads;
  launch.dynamicSmemBytes = SharedMap<C>::kBytes;
  launch.stream = cuda_stream(stream);
  launch.attrs = &cluster;
  launch.numAttrs = C::kWalkCtas > 1 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&launch, fold_kernel<C>, params), "sm90_fold");
}

// A configuration whose CTAs walk side by side has a second kernel, for tasks where they walk alone.
template <class Element, FoldConfig kConfig>
void prepare_fold() {
  check_device();
  prepare_kernel<Element, kConfig>();
  if constexpr (kConfig.walk_ctas > 1) prepare_kernel<Element, kConfig.alone()>();
}

template <class Element, FoldConfig kConfig>
void launch_fold(const cuda::FoldParams& p, Stream stream) {
  if (p.schedule.walk_ctas == kConfig.walk_ctas) return launch_kernel<Element, kConfig>(p, stream);
  if constexpr (kConfig.walk_ctas > 1) {
    if (p.schedule.walk_ctas == 1) return launch_kernel<Element, kConfig.alone()>(p, stream);
  }
  fail(ErrorCode::kInternal, "sm90_fold has no kernel for a task", "so many CTAs side by side are not its own");
}

template <class Element, FoldConfig kConfig>
constexpr cuda::Launcher launcher_of() {
  return {prepare_fold<Element, kConfig>, launch_fold<Element, kConfig>};
}

}  // namespace ringattn::sm90
