// SPDX-License-Identifier: Apache-2.0
#include "kernels/ssd_backward/sm80/sm80_ssd_backward.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/ssd_backward/cuda/device_ssd_backward.hpp"
#include "kernels/ssd_backward/sm80/ssd_backward_params.hpp"

namespace ringattn::sm80 {

namespace {

constexpr int kMaxDim = 128;  // of heads and of states

struct CompiledSsdBackward {
  Dtype dtype;
  int head_dim, state_dim;  // max.
  const SsdBackwardLauncher* launcher;
  int bytes;  // of shared memory
};
template <int kDims, int kStates>
constexpr CompiledSsdBackward compiled(Dtype dtype, const SsdBackwardLauncher& launcher) {
  return {dtype, kDims, kStates, &launcher,
          std::max({SsdStatesShape<kDims, kStates>::kBytes, SsdRowsShape<kDims, kStates>::kBytes,
                    SsdGateShape<kDims, kStates>::kBytes})};
}
const CompiledSsdBackward kCompiled[] = {
    compiled<64, 64>(Dtype::kBf16, ssd_backward_bf16_64_64),
    compiled<64, 128>(Dtype::kBf16, ssd_backward_bf16_64_128),
    compiled<128, 64>(Dtype::kBf16, ssd_backward_bf16_128_64),
    compiled<128, 128>(Dtype::kBf16, ssd_backward_bf16_128_128),
    compiled<64, 64>(Dtype::kF16, ssd_backward_fp16_64_64),
    compiled<64, 128>(Dtype::kF16, ssd_backward_fp16_64_128),
    compiled<128, 64>(Dtype::kF16, ssd_backward_fp16_128_64),
    compiled<128, 128>(Dtype::kF16, ssd_backward_fp16_128_128),
};

const CompiledSsdBackward& compiled_for(const SsmSpec& spec) {
  for (const CompiledSsdBackward& entry : kCompiled) {
    if (entry.dtype == spec.dtype && spec.head_dim <= entry.head_dim && spec.state_dim <= entry.state_dim) {
      return entry;
    }
  }
  fail(ErrorCode::kInternal, "sm80_ssd_backward was made for " + describe(spec), "it can't do that");
}

void require_dim(std::string_view name, int dim, std::vector<std::string>& missing) {
  if (dim >= 8 && dim <= kMaxDim && dim % 8 == 0) return;
  missing.push_back(fmt::format("{} {} (supported: multiples of 8 up to {})", name, dim, kMaxDim));
}

// Adds an entry if a CTA needs more shared memory than some visible GPU has.
void require_shared_memory(const SsmSpec& spec, std::vector<std::string>& missing) {
  const int needed = compiled_for(spec).bytes;
  for (const Gpu& gpu : visible_gpus()) {
    int shared = 0;
    check_cuda(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu.device),
               "cudaDeviceGetAttribute");
    if (needed <= shared) continue;
    missing.push_back(fmt::format(
        "state_dim {} with head_dim {} on GPU {}, {} (supported: {:.0f} KiB of shared memory; it takes {:.0f})",
        spec.state_dim, spec.head_dim, gpu.device, gpu.name, shared / 1024.0, needed / 1024.0));
    return;
  }
}

}  // namespace

std::vector<std::string> ssd_backward_missing(const SsdBackwardSpec& spec) {
  std::vector<std::string> missing = missing_in_ssd_backward(spec);
  const SsmSpec& forward = spec.forward;
  if (forward.dtype == Dtype::kF32) missing.emplace_back("fp32 (supported: bf16, fp16)");
  require_dim("head_dim", forward.head_dim, missing);
  require_dim("state_dim", forward.state_dim, missing);
  if (missing.empty()) require_shared_memory(forward, missing);
  return missing;
}

std::unique_ptr<SsdBackwardKernel> make_ssd_backward(const SsdBackwardSpec& spec, Backend& backend) {
  const CompiledSsdBackward& compiled = compiled_for(spec.forward);
  return cuda::make_device_ssd_backward(spec, *compiled.launcher, compiled.head_dim, compiled.state_dim, backend);
}

}  // namespace ringattn::sm80
