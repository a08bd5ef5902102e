// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/sm90/sm90_ssd.hpp"

#include <fmt/format.h>

#include <string_view>

#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"
#include "kernels/ssm/cuda/device_ssm.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"
#include "kernels/ssm/sm90/ssd.hpp"

namespace ringattn::sm90 {

namespace {

class HopperSsdKernels final : public cuda::SegmentKernels {
 public:
  HopperSsdKernels(const SsmSpec& spec, int device)
      : dt_dtype_(dt_rows(spec).dtype),
        launcher_(spec.state_dim == 64 ? ssd_64 : ssd_128),
        multiprocessors_(cuda::multiprocessors_of(device)) {}

  void load() const override {
    cuda::load_da_cumsum(dt_dtype_);
    launcher_.load();
  }
  std::size_t da_cumsum_floats() const override { return std::size_t{kChunksOfSegment} * kChunkDaCumsumFloats; }
  void accumulate_states(const SsmParams& params, cudaStream_t stream) const override {
    cuda::compute_da_cumsum(params, dt_dtype_, stream);
    launcher_.accumulate_states(params, multiprocessors_, stream);
  }
  void finish(const SsmParams& params, cudaStream_t stream) const override {
    launcher_.finish(params, multiprocessors_, stream);
  }

 private:
  Dtype dt_dtype_;
  const HopperSsdLauncher& launcher_;
  int multiprocessors_;
};

void require_dim(std::string_view name, int dim, std::vector<std::string>& missing) {
  if (dim == 64 || dim == 128) return;
  missing.push_back(fmt::format("{} {} (supported: 64, 128)", name, dim));
}

}  // namespace

std::vector<std::string> ssd_missing(const SsmSpec& spec) {
  std::vector<std::string> missing;
  if (spec.state_decays || spec.decay == SsmDecay::kDim) {
    missing.push_back("a decay per state (supported: one per head)");
  }
  if (spec.dtype != Dtype::kBf16) missing.push_back(fmt::format("{} (supported: bf16)", dtype_name(spec.dtype)));
  require_dim("head_dim", spec.head_dim, missing);
  require_dim("state_dim", spec.state_dim, missing);
  return missing;
}

std::unique_ptr<SsmKernel> make_ssd(const SsmSpec& spec, Backend& backend) {
  const int device = static_cast<const cuda::CudaBackend&>(backend).device();
  return cuda::make_device_ssm(spec, std::make_unique<HopperSsdKernels>(spec, device), backend);
}

}  // namespace ringattn::sm90
