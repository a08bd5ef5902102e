// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/product/sm90_product.hpp"

#include <fmt/format.h>

#include "kernels/cuda/cuda_product.hpp"
#include "kernels/sm90/fold/tensor_maps.hpp"
#include "kernels/sm90/product/product.hpp"

namespace ringattn::sm90 {

namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr int kManyRows = 1024;  // where large tiles are worth it

std::string describe(const ProductConfig& config) {
  return fmt::format("tile {}x{}, {} warpgroup{}, {} stages, {:.1f} KiB", config.rows(), cuda::kProductColumns,
                     config.warpgroups, config.warpgroups == 1 ? "" : "s", config.stages,
                     static_cast<double>(config.shared_bytes()) / 1024.0);
}

// `count` rows of each head. One head's distance to the next, and one row's, have no meaning where there is one: the
// copy engine wants a number, and gets one that it takes.
MappedTensor mapped(const cuda::ProductRows<const char>& rows, std::int64_t count, std::int64_t columns) {
  MappedTensor tensor{
      rows.data, count, rows.heads, columns, rows.stride / kElementBytes, rows.head_stride / kElementBytes};
  if (tensor.rows == 1) tensor.token_stride = columns;
  if (tensor.heads == 1) tensor.head_stride = columns;
  return tensor;
}

MappedTensor mapped_rows(const cuda::ProductParams& p) { return mapped(p.rows, p.row_count, p.inner); }
MappedTensor mapped_weights(const cuda::ProductParams& p) {
  return p.across ? mapped(p.weights, p.inner, p.outer) : mapped(p.weights, p.outer, p.inner);
}

}  // namespace

const ProductConfig& choose_product(const cuda::ProductParams& p) {
  if (p.row_count <= kFewRowsConfig.rows()) return kFewRowsConfig;
  const bool fills_device = cuda::product_tiles(p, kManyRowsConfig.rows()) >= 2 * std::int64_t{p.multiprocessors};
  return p.row_count >= kManyRows && fills_device ? kManyRowsConfig : kSomeRowsConfig;
}

bool can_map_product(const cuda::ProductParams& p) { return can_map(mapped_rows(p)) && can_map(mapped_weights(p)); }

HopperProduct map_product(const cuda::ProductParams& p, const ProductConfig& config) {
  return {p, map_tensor(mapped_rows(p), p.dtype, config.rows(), cuda::kPanelColumns),
          map_tensor(mapped_weights(p), p.dtype, p.across ? cuda::kProductDepth : cuda::kProductColumns,
                     cuda::kPanelColumns)};
}

std::vector<std::string> product_configs() {
  return {fmt::format("up to {} rows: {}", kFewRowsConfig.rows(), describe(kFewRowsConfig)),
          fmt::format("more rows: {}", describe(kSomeRowsConfig)),
          fmt::format("many rows: {}", describe(kManyRowsConfig)),
          fmt::format("views not aligned to 16 bytes: {}, copied by threads", describe(kUnalignedConfig))};
}

std::unique_ptr<HeadProductKernel> make_product(const HeadProductSpec& spec, Backend& backend) {
  return cuda::make_cuda_product(spec, spec.dtype == Dtype::kBf16 ? product_bf16 : product_fp16, backend);
}

}  // namespace ringattn::sm90
