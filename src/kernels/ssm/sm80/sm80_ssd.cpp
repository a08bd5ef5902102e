// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssm/sm80/sm80_ssd.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/common/cuda/cuda_backend.hpp"
#include "kernels/ssm/cuda/device_ssm.hpp"
#include "kernels/ssm/cuda/ssm_params.hpp"

namespace ringattn::sm80 {

namespace {

constexpr int kMaxHeadDim = kMaxWarps * kWarpDims;
constexpr int kMaxStates = 256;
constexpr int kChannels = 8;  // the channels of a group must be a multiple of this

struct CompiledSsd {
  Dtype dtype;
  int state_dim;  // max.
  const SsdLauncher* launcher;
};
constexpr CompiledSsd kCompiled[] = {
    {Dtype::kBf16, 16, &ssd_bf16_16},   {Dtype::kBf16, 64, &ssd_bf16_64},  {Dtype::kBf16, 128, &ssd_bf16_128},
    {Dtype::kBf16, 256, &ssd_bf16_256}, {Dtype::kF16, 16, &ssd_fp16_16},   {Dtype::kF16, 64, &ssd_fp16_64},
    {Dtype::kF16, 128, &ssd_fp16_128},  {Dtype::kF16, 256, &ssd_fp16_256},
};

const SsdLauncher& launcher_of(const SsmSpec& spec) {
  for (const CompiledSsd& entry : kCompiled) {
    if (entry.dtype == spec.dtype && spec.state_dim <= entry.state_dim) return *entry.launcher;
  }
  fail(ErrorCode::kInternal, "sm80_ssd was made for " + describe(spec), "it can't do that");
}

void require_dim(std::string_view name, int dim, int max_dim, std::vector<std::string>& missing) {
  if (dim >= 8 && dim <= max_dim && dim % 8 == 0) return;
  missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, max_dim));
}

class SsdKernels final : public cuda::SegmentKernels {
 public:
  SsdKernels(const SsmSpec& spec, int device)
      : dt_dtype_(dt_rows(spec).dtype), launcher_(launcher_of(spec)), device_(device) {}

  void load() const override {
    cuda::load_da_cumsum(dt_dtype_);
    launcher_.load();
  }
  std::size_t da_cumsum_floats() const override { return std::size_t{kChunksOfSegment} * kChunkDaCumsumFloats; }
  void accumulate_states(const SsmParams& params, cudaStream_t stream) const override {
    cuda::compute_da_cumsum(params, dt_dtype_, stream);
    launcher_.accumulate_states(params, device_, stream);
  }
  void finish(const SsmParams& params, cudaStream_t stream) const override {
    launcher_.finish(params, device_, stream);
  }

 private:
  Dtype dt_dtype_;
  const SsdLauncher& launcher_;
  int device_;
};

class SelectiveScanKernels final : public cuda::SegmentKernels {
 public:
  explicit SelectiveScanKernels(const SsmSpec& spec) : dtype_(spec.dtype) {}

  void load() const override { load_selective_scan(dtype_); }
  std::size_t da_cumsum_floats() const override { return 0; }
  void accumulate_states(const SsmParams& params, cudaStream_t stream) const override {
    selective_scan_states(params, dtype_, stream);
  }
  void finish(const SsmParams& params, cudaStream_t stream) const override {
    selective_scan_outputs(params, dtype_, stream);
  }

 private:
  Dtype dtype_;
};

// Adds an entry if a chunk does not fit into the shared memory of a CTA on some visible GPU.
void require_shared_memory(const SsmSpec& spec, std::vector<std::string>& missing) {
  for (const Gpu& gpu : visible_gpus()) {
    const std::size_t needed = launcher_of(spec).min_shared(spec.head_dim);
    int shared = 0;
    check_cuda(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu.device),
               "cudaDeviceGetAttribute");
    if (needed <= static_cast<std::size_t>(shared)) continue;
    missing.push_back(fmt::format(
        "state_dim {} with head_dim {} on GPU {}, {} (supported: {:.0f} KiB of shared memory; "
        "a chunk takes {:.0f})",
        spec.state_dim, spec.head_dim, gpu.device, gpu.name, shared / 1024.0, static_cast<double>(needed) / 1024.0));
    return;
  }
}

}  // namespace

std::vector<std::string> ssd_missing(const SsmSpec& spec) {
  std::vector<std::string> missing;
  if (spec.state_decays || spec.decay == SsmDecay::kDim) {
    missing.push_back("a decay per state (supported: one per head)");
  }
  if (spec.dtype == Dtype::kF32) missing.push_back("fp32 (supported: bf16, fp16)");
  require_dim("head_dim", spec.head_dim, kMaxHeadDim, missing);
  require_dim("state_dim", spec.state_dim, kMaxStates, missing);
  if (missing.empty()) require_shared_memory(spec, missing);
  return missing;
}

std::vector<std::string> selective_scan_missing(const SsmSpec& spec) {
  std::vector<std::string> missing;
  if (!spec.state_decays) missing.push_back("one decay per head (supported: one per state)");
  if (spec.heads % spec.groups != 0 || spec.heads / spec.groups % kChannels != 0) {
    missing.push_back(fmt::format("{} channels in {} groups (supported: multiples of {} in each)", spec.heads,
                                  spec.groups, kChannels));
  }
  require_dim("state_dim", spec.state_dim, kMaxStates, missing);
  return missing;
}

std::unique_ptr<SsmKernel> make_ssd(const SsmSpec& spec, Backend& backend) {
  const int device = static_cast<const cuda::CudaBackend&>(backend).device();
  return cuda::make_device_ssm(spec, std::make_unique<SsdKernels>(spec, device), backend);
}

std::unique_ptr<SsmKernel> make_selective_scan(const SsmSpec& spec, Backend& backend) {
  return cuda::make_device_ssm(spec, std::make_unique<SelectiveScanKernels>(spec), backend);
}

}  // namespace ringattn::sm80
