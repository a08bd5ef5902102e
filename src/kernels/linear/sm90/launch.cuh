// SPDX-License-Identifier: Apache-2.0
// Launches the kernels of sm90_linear. kernels/instances.cmake lists the instantiations.
#pragma once

#include "base/cuda.hpp"
#include "kernels/common/cuda/pdl_launch.hpp"
#include "kernels/linear/sm90/few_rows.cuh"
#include "kernels/linear/sm90/many_rows.cuh"

namespace ringattn::sm90 {

template <class Kernel>
void allow_shared(Kernel* kernel, int bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
}

// Calls visit(ManyRows<…>{}) for each configuration, or visit(FewRows<…>{}).
template <class Element, class Visit>
void for_each_many_rows(Visit visit) {
  visit(ManyRows<Element, kNarrowTiles>{}, kNarrowTiles);
  visit(ManyRows<Element, kWideTiles>{}, kWideTiles);
  visit(ManyRows<Element, kWidestTiles>{}, kWidestTiles);
  visit(ManyRows<Element, kGatedTiles>{}, kGatedTiles);
  visit(ManyRows<Element, kWideGatedTiles>{}, kWideGatedTiles);
  visit(ManyRows<Element, kLeafTiles>{}, kLeafTiles);
  visit(ManyRows<Element, kGatedLeafTiles>{}, kGatedLeafTiles);
}
template <class Element, int kRows, class Visit>
void for_each_few_rows_of(Visit visit) {
  constexpr FewRowsConfig kSplits{kRows, false, false}, kGated{kRows, true, false}, kLeaves{kRows, false, true};
  visit(FewRows<Element, kSplits>{}, kSplits);
  visit(FewRows<Element, kGated>{}, kGated);
  visit(FewRows<Element, kLeaves>{}, kLeaves);
}
template <class Element, class Visit>
void for_each_few_rows(Visit visit) {
  for_each_few_rows_of<Element, 8>(visit);
  for_each_few_rows_of<Element, 16>(visit);
  for_each_few_rows_of<Element, 32>(visit);
  for_each_few_rows_of<Element, 64>(visit);
}

template <class Element>
void prepare_linear() {
  for_each_many_rows<Element>([](auto kernel, const ManyRowsConfig&) {
    using C = decltype(kernel);
    allow_shared(many_rows_kernel<C>, C::kSharedBytes);
  });
  for_each_few_rows<Element>([](auto kernel, const FewRowsConfig&) {
    using C = decltype(kernel);
    allow_shared(few_rows_kernel<C>, FewRowsConfig::kSharedBytes);
  });
}

template <class Element>
void launch_many_rows(const ManyRowsParams& params, const ManyRowsConfig& config, int ctas, Stream stream) {
  for_each_many_rows<Element>([&](auto kernel, const ManyRowsConfig& compiled) {
    using C = decltype(kernel);
    if (compiled != config) return;
    const cuda::PdlLaunch launch(ctas, kManyRowsThreads, C::kSharedBytes, stream);
    check_cuda(cudaLaunchKernelEx(&launch.config, many_rows_kernel<C>, params), "sm90_linear");
  });
}

template <class Element>
void launch_few_rows(const FewRowsParams& params, const FewRowsConfig& config, int ctas, Stream stream) {
  for_each_few_rows<Element>([&](auto kernel, const FewRowsConfig& compiled) {
    using C = decltype(kernel);
    if (compiled != config) return;
    cuda::PdlLaunch launch(ctas, params.warpgroups * kWarpgroup + 32, FewRowsConfig::kSharedBytes, stream);
    if (C::kCluster > 1) launch.set_cluster_size(C::kCluster);
    check_cuda(cudaLaunchKernelEx(&launch.config, few_rows_kernel<C>, params), "sm90_linear");
  });
}

template <class Element>
constexpr HopperLinearLauncher linear_launcher() {
  return {prepare_linear<Element>, launch_many_rows<Element>, launch_few_rows<Element>};
}

}  // namespace ringattn::sm90
