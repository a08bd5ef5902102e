// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/sm80/sm80_linear.hpp"

#include "kernels/linear/cuda/cuda_linear.hpp"

namespace ringattn::sm80 {

std::vector<std::string> linear_configs() {
  return {"tile 128x128, 8 warps, 3 stages, 96.0 KiB", "gated: tile 128x64, 8 warps, 3 stages, 96.0 KiB",
          "row-parallel: tile 64x128, 8 warps, 3 stages, 72.0 KiB"};
}

std::vector<std::string> simt_linear_configs() {
  return {"up to 32 rows: 16 columns of sums, a warp for each split or leaf",
          "more rows: tile 128x128, 4 warps, 3 stages, 96.0 KiB; or 64x64, 4 warps, 3 stages, 48.0 KiB"};
}

std::unique_ptr<LinearKernel> make_linear(const LinearSpec& spec, Backend& backend) {
  return cuda::make_cuda_linear(spec, cuda::mma_linear, backend);
}

std::unique_ptr<LinearKernel> make_simt_linear(const LinearSpec& spec, Backend& backend) {
  return cuda::make_cuda_linear(spec, cuda::simt_linear, backend);
}

}  // namespace ringattn::sm80
