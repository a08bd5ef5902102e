// SPDX-License-Identifier: Apache-2.0
// From a product's parameters to a kernel and its launch; the product_*.cu files instantiate it.
#pragma once

#include "base/cuda.hpp"
#include "kernels/sm90/product/product.cuh"
#include "kernels/sm90/product/product.hpp"

namespace ringattn::sm90 {

template <class C>
void prepare_kernel() {
  check_cuda(cudaFuncSetAttribute(product_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
             "cudaFuncSetAttribute");
}

template <class C>
void launch_kernel(const HopperProduct& params, Stream stream) {
  const cuda::ProductParams& p = params.product;
  const std::int64_t tiles = cuda::product_tiles(p, C::kRows);
  const std::int64_t most = std::int64_t{p.multiprocessors} * C::kCtas;
  product_kernel<C>
      <<<static_cast<unsigned>(tiles < most ? tiles : most), C::kThreads, C::kSharedBytes, cuda_stream(stream)>>>(
          params);
  check_cuda(cudaGetLastError(), "sm90_product");
}

// The matrices either way round.
template <class Element, ProductConfig kConfig>
void prepare_config() {
  prepare_kernel<ProductKernel<Element, kConfig, false>>();
  prepare_kernel<ProductKernel<Element, kConfig, true>>();
}
template <class Element, ProductConfig kConfig>
void launch_config(const cuda::ProductParams& p, Stream stream) {
  const HopperProduct params = kConfig.fetch_warps == 1 ? map_product(p, kConfig) : HopperProduct{p, {}, {}};
  p.across ? launch_kernel<ProductKernel<Element, kConfig, true>>(params, stream)
           : launch_kernel<ProductKernel<Element, kConfig, false>>(params, stream);
}

template <class Element>
void prepare_product() {
  prepare_config<Element, kFewRowsConfig>();
  prepare_config<Element, kSomeRowsConfig>();
  prepare_config<Element, kManyRowsConfig>();
  prepare_config<Element, kUnalignedConfig>();
}

template <class Element>
void launch_product(const cuda::ProductParams& p, Stream stream) {
  if (!can_map_product(p)) return launch_config<Element, kUnalignedConfig>(p, stream);
  const ProductConfig& config = choose_product(p);
  if (&config == &kFewRowsConfig) return launch_config<Element, kFewRowsConfig>(p, stream);
  if (&config == &kSomeRowsConfig) return launch_config<Element, kSomeRowsConfig>(p, stream);
  launch_config<Element, kManyRowsConfig>(p, stream);
}

template <class Element>
constexpr cuda::ProductLauncher product_launcher() {
  return {prepare_product<Element>, launch_product<Element>};
}

}  // namespace ringattn::sm90
