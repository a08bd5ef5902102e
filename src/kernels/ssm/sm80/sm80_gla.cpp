// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/sm80/sm80_gla.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/ssm/cuda/device_ssm.hpp"

namespace ringattn::sm80 {

namespace {

struct CompiledGla {
  int head_dim, state_dim;
  const GlaLauncher* launcher;
};
constexpr CompiledGla kCompiledGla[] = {
    {64, 64, &gla_bf16_64_64}, {64, 128, &gla_bf16_64_128}, {128, 64, &gla_bf16_128_64}, {128, 128, &gla_bf16_128_128}};

const GlaLauncher& gla_launcher_of(const SsmSpec& spec) {
  for (const CompiledGla& entry : kCompiledGla) {
    if (entry.head_dim == spec.head_dim && entry.state_dim == spec.state_dim) return *entry.launcher;
  }
  fail(ErrorCode::kInternal, "sm80_gla was made for " + describe(spec), "it can't do that");
}

int shared_memory_of(int device) {
  int shared = 0;
  check_cuda(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  return shared;
}

class GlaKernels final : public cuda::SegmentKernels {
 public:
  GlaKernels(const SsmSpec& spec, int device) : launcher_(gla_launcher_of(spec)) {
    if (device != kNoDevice && launcher_.shared(2) > shared_memory_of(device)) stages_ = 1;
  }

  void load() const override { launcher_.load(stages_); }
  std::size_t da_cumsum_floats() const override { return 0; }
  void accumulate_states(const SsmParams& params, cudaStream_t stream) const override {
    launcher_.accumulate_states(params, stages_, stream);
  }
  void finish(const SsmParams& params, cudaStream_t stream) const override {
    launcher_.finish(params, stages_, stream);
  }

 private:
  const GlaLauncher& launcher_;
  int stages_ = 2;  // of loaded chunks. Does not affect bits.
};

void require_gla_dim(std::string_view name, int dim, std::vector<std::string>& missing) {
  if (dim == 64 || dim == 128) return;
  missing.push_back(fmt::format("{} {} (supported: 64, 128)", name, dim));
}

// Adds an entry if a chunk does not fit into the shared memory of a CTA on some visible GPU.
void require_gla_memory(const SsmSpec& spec, std::vector<std::string>& missing) {
  for (const Gpu& gpu : visible_gpus()) {
    const int needed = gla_launcher_of(spec).shared(1);
    const int shared = shared_memory_of(gpu.device);
    if (needed <= shared) continue;
    missing.push_back(fmt::format(
        "state_dim {} with head_dim {} and a decay per key dim on GPU {}, {} (supported: {} KiB of shared memory; a "
        "chunk takes {})",
        spec.state_dim, spec.head_dim, gpu.device, gpu.name, shared / 1024, (needed + 1023) / 1024));
    return;
  }
}

}  // namespace

std::vector<std::string> gla_missing(const SsmSpec& spec) {
  std::vector<std::string> missing;
  if (spec.decay != SsmDecay::kDim) missing.push_back("a decay per head (supported: a decay per key dim)");
  if (spec.dtype != Dtype::kBf16) missing.push_back(fmt::format("{} (supported: bf16)", dtype_name(spec.dtype)));
  require_gla_dim("head_dim", spec.head_dim, missing);
  require_gla_dim("state_dim", spec.state_dim, missing);
  if (missing.empty()) require_gla_memory(spec, missing);
  return missing;
}

std::unique_ptr<SsmKernel> make_gla(const SsmSpec& spec, Backend& backend) {
  const int device = static_cast<const cuda::CudaBackend&>(backend).device();
  return cuda::make_device_ssm(spec, std::make_unique<GlaKernels>(spec, device), backend);
}

}  // namespace ringattn::sm80
