// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm80/sm80_plain.hpp"

#include <fmt/format.h>

#include <string_view>

#include "kernels/cuda/cuda_fold.hpp"
#include "kernels/cuda/device/export_state.hpp"
#include "kernels/cuda/device/merge_state.hpp"
#include "kernels/cuda/device/plain.hpp"
#include "kernels/merge.hpp"

namespace ringattn::sm80 {

namespace {

void require_dim(std::string_view name, int dim, std::vector<std::string>& missing) {
  if (dim >= 8 && dim <= cuda::kPlainMaxHeadDim && dim % 8 == 0) return;
  missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, cuda::kPlainMaxHeadDim));
}

}  // namespace

std::vector<std::string> plain_missing(const FoldSpec& spec) {
  std::vector<std::string> missing;
  require_dim("head_dim", spec.head_dim, missing);
  if (spec.head_dim_v != spec.head_dim) require_dim("head_dim_v", spec.head_dim_v, missing);
  const std::string lists = missing_for_lists(spec.lists, {/*query=*/1, cuda::kPlainKeyTile});
  if (!lists.empty()) missing.push_back(lists);
  return missing;
}

std::unique_ptr<FoldKernel> make_plain(const FoldSpec& spec, Backend& backend) {
  cuda::DeviceKernel kernel;
  kernel.shape = {cuda::kPlainItemRows, /*query_tile=*/1, cuda::kPlainKeyTile};
  kernel.state_floats = static_cast<std::size_t>(cuda::state_floats(spec.head_dim_v));
  kernel.reference_unit = {1.0F, kLog2E};  // of scaled scores themselves
  kernel.launcher = &cuda::plain_fold;
  kernel.merge_state = cuda::merge_plain_state;
  kernel.export_state = cuda::export_plain_state;
  return cuda::make_cuda_fold(spec, kernel, backend);
}

}  // namespace ringattn::sm80
