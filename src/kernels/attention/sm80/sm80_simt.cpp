// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/sm80/sm80_simt.hpp"

#include <fmt/format.h>

#include <string_view>

#include "kernels/attention/cuda/attention_params.hpp"
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention/cuda/simt.hpp"
#include "kernels/attention/merge.hpp"

namespace ringattn::sm80 {

namespace {

void require_dim(std::string_view name, int dim, std::vector<std::string>& missing) {
  if (dim >= 8 && dim <= cuda::kSimtMaxHeadDim && dim % 8 == 0) return;
  missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, cuda::kSimtMaxHeadDim));
}

}  // namespace

std::vector<std::string> simt_missing(const AttentionSpec& spec) {
  std::vector<std::string> missing;
  require_dim("head_dim", spec.head_dim, missing);
  if (spec.head_dim_v != spec.head_dim) require_dim("head_dim_v", spec.head_dim_v, missing);
  const std::string block_mask = missing_for_block_mask(spec.block_mask, {/*query=*/1, cuda::kSimtKeyTile});
  if (!block_mask.empty()) missing.push_back(block_mask);
  return missing;
}

std::unique_ptr<AttentionKernel> make_simt(const AttentionSpec& spec, Backend& backend) {
  cuda::DeviceKernel kernel;
  kernel.shape = {cuda::kSimtTileRows, /*query_tile=*/1, cuda::kSimtKeyTile};
  kernel.state_floats = static_cast<std::size_t>(cuda::state_floats(spec.head_dim_v));
  kernel.offset_scale = {1.0F, kLog2E};  // softmax_offsets are scaled scores
  kernel.launcher = &cuda::simt_attention;
  kernel.merge_state = cuda::merge_simt_state;
  kernel.export_state = cuda::export_simt_state;
  return cuda::make_cuda_attention(spec, kernel, backend);
}

}  // namespace ringattn::sm80
