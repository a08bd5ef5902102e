// SPDX-License-Identifier: Apache-2.0
// Launches the int4 wgmma kernels. kernels/instances.cmake lists its instantiations.
#pragma once

#include <algorithm>

#include "base/cuda.hpp"
#include "kernels/common/cuda/pdl_launch.hpp"
#include "kernels/linear/sm90/int4_few_rows.cuh"
#include "kernels/linear/sm90/int4_many_rows.cuh"

namespace ringattn::sm90 {

template <class Kernel>
void prepare_int4_kernel(Kernel* kernel, int shared_bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "cudaFuncSetAttribute");
}

template <class Element, int kRows>
void launch_few_rows_int4(const cuda::Int4Gemm& gemm, Stream stream) {
  using C = FewRowsInt4<Element, kRows>;
  const HopperInt4 p = map_int4(gemm, kRows, kRows, cuda::kInt4TileRows);
  const int ctas_of_chain = (p.column_tiles * gemm.out.matrices + C::kWarpgroups - 1) / C::kWarpgroups;
  cuda::PdlLaunch launch(p.row_tiles * ctas_of_chain * gemm.chains.count, C::kThreads, C::kSharedBytes, stream);
  check_cuda(cudaLaunchKernelEx(&launch.config, int4_few_rows_kernel<C>, p), "int4_few_rows");
}

template <class Element>
void launch_many_rows_int4(const cuda::Int4Gemm& gemm, Stream stream) {
  using C = ManyRowsInt4<Element>;
  const HopperInt4 p = map_int4(gemm, kInt4ManyRows, kInt4ManyRows / 2, gemm.out.columns_of_tile(128));
  const int pairs = std::min(p.row_tiles * ((p.column_tiles + 1) / 2), gemm.multiprocessors / 2);
  cuda::PdlLaunch launch(2 * pairs, C::kThreads, C::kSharedBytes, stream);
  launch.set_cluster_size(2);
  check_cuda(cudaLaunchKernelEx(&launch.config, int4_many_rows_kernel<C>, p), "int4_many_rows");
}

template <class Element>
void prepare_int4() {
  const auto prepare_few = [](auto config) {
    using C = decltype(config);
    prepare_int4_kernel(int4_few_rows_kernel<C>, C::kSharedBytes);
  };
  prepare_few(FewRowsInt4<Element, 8>());
  prepare_few(FewRowsInt4<Element, 16>());
  prepare_few(FewRowsInt4<Element, 32>());
  prepare_few(FewRowsInt4<Element, 64>());
  prepare_int4_kernel(int4_many_rows_kernel<ManyRowsInt4<Element>>, ManyRowsInt4<Element>::kSharedBytes);
}

template <class Element>
void launch_int4(const cuda::Int4Gemm& gemm, int tile_rows, Stream stream) {
  switch (tile_rows) {
    case 8:
      return launch_few_rows_int4<Element, 8>(gemm, stream);
    case 16:
      return launch_few_rows_int4<Element, 16>(gemm, stream);
    case 32:
      return launch_few_rows_int4<Element, 32>(gemm, stream);
    case 64:
      return launch_few_rows_int4<Element, 64>(gemm, stream);
    default:
      return launch_many_rows_int4<Element>(gemm, stream);
  }
}

template <class Element>
constexpr Int4Launcher int4_launcher() {
  return {prepare_int4<Element>, launch_int4<Element>};
}

}  // namespace ringattn::sm90
