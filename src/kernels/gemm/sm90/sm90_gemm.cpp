// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/sm90/sm90_gemm.hpp"

#include <fmt/format.h>

#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/gemm/cuda/cuda_gemm.hpp"
#include "kernels/gemm/sm90/gemm.hpp"

namespace ringattn::sm90 {

namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr int kLargeM = 1024;  // M from which large tiles are faster

std::string describe(const GemmConfig& config) {
  return fmt::format("tile {}x{}, {} warpgroup{}, {} stages, {:.1f} KiB", config.rows(), cuda::kGemmTileN,
                     config.warpgroups, config.warpgroups == 1 ? "" : "s", config.stages,
                     static_cast<double>(config.shared_bytes()) / 1024.0);
}

// Describes [count, heads, columns] of an operand. The stride of a dimension of size 1 has no meaning, but a tensor map
// needs a valid one.
MappedTensor mapped(const cuda::GemmOperand<const char>& rows, std::int64_t count, std::int64_t columns) {
  MappedTensor tensor{
      rows.data, count, rows.heads, columns, rows.stride / kElementBytes, rows.head_stride / kElementBytes};
  if (tensor.rows == 1) tensor.token_stride = columns;
  if (tensor.heads == 1) tensor.head_stride = columns;
  return tensor;
}

MappedTensor mapped_rows(const cuda::GemmParams& p) { return mapped(p.rows, p.row_count, p.dim_k); }
MappedTensor mapped_weights(const cuda::GemmParams& p) {
  return p.transposed ? mapped(p.weights, p.dim_k, p.dim_n) : mapped(p.weights, p.dim_n, p.dim_k);
}

}  // namespace

const GemmConfig& choose_gemm(const cuda::GemmParams& p) {
  if (p.row_count <= kSmallMConfig.rows()) return kSmallMConfig;
  const bool fills_device = cuda::gemm_tiles(p, kLargeMConfig.rows()) >= 2 * std::int64_t{p.multiprocessors};
  return p.row_count >= kLargeM && fills_device ? kLargeMConfig : kMediumMConfig;
}

bool can_map_gemm(const cuda::GemmParams& p) { return can_map(mapped_rows(p)) && can_map(mapped_weights(p)); }

HopperGemm map_gemm(const cuda::GemmParams& p, const GemmConfig& config) {
  return {
      p, map_tensor(mapped_rows(p), p.dtype, config.rows(), cuda::kPanelColumns),
      map_tensor(mapped_weights(p), p.dtype, p.transposed ? cuda::kGemmTileK : cuda::kGemmTileN, cuda::kPanelColumns)};
}

std::vector<std::string> gemm_configs() {
  return {fmt::format("up to {} rows: {}", kSmallMConfig.rows(), describe(kSmallMConfig)),
          fmt::format("more rows: {}", describe(kMediumMConfig)), fmt::format("many rows: {}", describe(kLargeMConfig)),
          fmt::format("views not aligned to 16 bytes: {}, copied by threads", describe(kUnalignedConfig))};
}

std::unique_ptr<BatchedGemmKernel> make_gemm(const BatchedGemmSpec& spec, Backend& backend) {
  return cuda::make_cuda_gemm(spec, spec.dtype == Dtype::kBf16 ? gemm_bf16 : gemm_fp16, backend);
}

}  // namespace ringattn::sm90
