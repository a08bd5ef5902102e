// SPDX-License-Identifier: Apache-2.0
// Kernel traits and launch of a configuration. kernels/instances.cmake lists its instantiations.
#pragma once

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/attention/sm90/attention.cuh"
#include "kernels/attention/sm90/attention.hpp"
#include "kernels/attention/sm90/hopper_params.hpp"

namespace ringattn::sm90 {

template <class Element_, AttentionConfig kConfig>
struct KernelConfig {
  using Element = Element_;
  static constexpr int kDim = kConfig.head_dim;
  static constexpr int kDimV = kConfig.head_dim_v;
  static constexpr int kPanels = (kDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kPanelsV = (kDimV + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kBoxColumns = AttentionConfig::box_columns(kDim);
  static constexpr int kClusterCtas = kConfig.cluster_ctas;
  static constexpr int kKeyBoxRows = kConfig.key_box_rows();
  static constexpr int kBoxColumnsK = kConfig.key_box_columns(kDim);
  static constexpr int kBoxColumnsV = kConfig.key_box_columns(kDimV);
  static constexpr int kKeyTile = kConfig.key_tile;
  static constexpr int kHeadTiles = kConfig.warpgroups;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kQStages = kConfig.q_stages;
  static constexpr bool kOverlaps = kConfig.overlaps;
  static constexpr bool kKeysAhead = kConfig.keys_ahead();
  static constexpr int kThreads = kConfig.threads();
  static constexpr int kProducerRegisters = kConfig.producer_registers();
  static constexpr int kConsumerRegisters = kConfig.consumer_registers();
  static constexpr int kQBytes = kConfig.q_bytes();
  static constexpr int kKBytes = kConfig.k_bytes();
  static constexpr int kVBytes = kConfig.v_bytes();
  static constexpr int kScratchFloats = kConfig.scratch_floats();
};

template <class Element, AttentionConfig kConfig>
void prepare_kernel() {
  using C = KernelConfig<Element, kConfig>;
  check_cuda(
      cudaFuncSetAttribute(attention_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, int{SharedMap<C>::kBytes}),
      "cudaFuncSetAttribute");
}

template <class Element, AttentionConfig kConfig>
void launch_kernel(const cuda::AttentionParams& p, Stream stream) {
  using C = KernelConfig<Element, kConfig>;
  static_assert(C::kHeadTiles > 1);  // WorkBuilder packs several head work tiles into a GQA-packed tile
  static_assert(C::kClusterCtas <= 2);
  const HopperParams params = hopper_params(p, kConfig);
  const std::int64_t work = std::int64_t{p.tables.gqa_tile_count} * p.schedule.entry_heads;
  const std::int64_t max_work = p.schedule.multiprocessors / C::kClusterCtas;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {C::kClusterCtas, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = static_cast<unsigned>((work < max_work ? work : max_work) * C::kClusterCtas);
  launch.blockDim = C::kThreads;
  launch.dynamicSmemBytes = SharedMap<C>::kBytes;
  launch.stream = cuda_stream(stream);
  launch.attrs = &cluster;
  launch.numAttrs = C::kClusterCtas > 1 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&launch, attention_kernel<C>, params), "sm90_attention");
}

// A configuration with a cluster has a second kernel without it, for tasks where a cluster doesn't pay.
template <class Element, AttentionConfig kConfig>
void prepare_attention() {
  check_device();
  prepare_kernel<Element, kConfig>();
  if constexpr (kConfig.cluster_ctas > 1) prepare_kernel<Element, kConfig.without_cluster()>();
}

template <class Element, AttentionConfig kConfig>
void launch_attention(const cuda::AttentionParams& p, Stream stream) {
  if (p.schedule.cluster_ctas == kConfig.cluster_ctas) return launch_kernel<Element, kConfig>(p, stream);
  if constexpr (kConfig.cluster_ctas > 1) {
    if (p.schedule.cluster_ctas == 1) return launch_kernel<Element, kConfig.without_cluster()>(p, stream);
  }
  fail(ErrorCode::kInternal, "sm90_attention has no kernel for a task", "none is compiled for this cluster size");
}

template <class Element, AttentionConfig kConfig>
constexpr cuda::Launcher launcher_of() {
  return {prepare_attention<Element, kConfig>, launch_attention<Element, kConfig>};
}

}  // namespace ringattn::sm90
