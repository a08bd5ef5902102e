// SPDX-License-Identifier: Apache-2.0
// From a product's parameters to a kernel and its launch; the product_*.cu files instantiate it.
#pragma once

#include "base/cuda.hpp"
#include "kernels/sm80/product/product.cuh"
#include "kernels/sm80/product/product.hpp"

namespace ringattn::sm80 {

template <class C>
void prepare_kernel() {
  check_cuda(cudaFuncSetAttribute(product_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes),
             "cudaFuncSetAttribute");
}

template <class C>
void launch_kernel(const cuda::ProductParams& p, Stream stream) {
  const auto tiles = static_cast<unsigned>(cuda::product_tiles(p, C::kRows));
  product_kernel<C><<<tiles, C::kThreads, C::kSharedBytes, cuda_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), "sm80_product");
}

template <class Element>
void prepare_product() {
  prepare_kernel<ProductKernel<Element, kFewRowsConfig, false>>();
  prepare_kernel<ProductKernel<Element, kFewRowsConfig, true>>();
  prepare_kernel<ProductKernel<Element, kManyRowsConfig, false>>();
  prepare_kernel<ProductKernel<Element, kManyRowsConfig, true>>();
}

template <class Element>
void launch_product(const cuda::ProductParams& p, Stream stream) {
  if (p.row_count <= kFewRows) {
    p.across ? launch_kernel<ProductKernel<Element, kFewRowsConfig, true>>(p, stream)
             : launch_kernel<ProductKernel<Element, kFewRowsConfig, false>>(p, stream);
  } else {
    p.across ? launch_kernel<ProductKernel<Element, kManyRowsConfig, true>>(p, stream)
             : launch_kernel<ProductKernel<Element, kManyRowsConfig, false>>(p, stream);
  }
}

template <class Element>
constexpr cuda::ProductLauncher product_launcher() {
  return {prepare_product<Element>, launch_product<Element>};
}

}  // namespace ringattn::sm80
