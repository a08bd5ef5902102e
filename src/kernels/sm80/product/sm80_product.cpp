// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/product/sm80_product.hpp"

#include <fmt/format.h>

#include "kernels/cuda/cuda_product.hpp"
#include "kernels/sm80/product/chain.hpp"
#include "kernels/sm80/product/product.hpp"

namespace ringattn::sm80 {

namespace {

std::string describe(const ProductConfig& config) {
  return fmt::format("tile {}x{}, {} warps, {} stages, {:.1f} KiB", config.rows, cuda::kProductColumns,
                     config.threads() / 32, config.stages, static_cast<double>(config.shared_bytes()) / 1024.0);
}

}  // namespace

std::vector<std::string> product_configs() {
  return {fmt::format("up to {} rows: {}", kFewRows, describe(kFewRowsConfig)),
          fmt::format("more rows: {}", describe(kManyRowsConfig))};
}

std::vector<std::string> chain_configs() {
  return {fmt::format("up to {} columns: tile {}x{}", kFewColumnsOuter, kChainRows, kFewChainColumns),
          fmt::format("more columns: tile {}x{}", kChainRows, kManyChainColumns)};
}

std::unique_ptr<HeadProductKernel> make_chain(const HeadProductSpec& spec, Backend& backend) {
  return cuda::make_cuda_product(spec, spec.dtype == Dtype::kBf16 ? chain_bf16 : chain_fp16, backend);
}

std::unique_ptr<HeadProductKernel> make_product(const HeadProductSpec& spec, Backend& backend) {
  return cuda::make_cuda_product(spec, spec.dtype == Dtype::kBf16 ? product_bf16 : product_fp16, backend);
}

}  // namespace ringattn::sm80
