// SPDX-License-Identifier: Apache-2.0
// The platforms that kernels run on. An entry of a kernel table begins with one (registry.hpp).
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "kernels/common/backend.hpp"

namespace ringattn {

struct KernelPlatform {
  std::string_view backend;  // "cpu", "cuda"
  // Why its kernels cannot run on this machine. Empty: they can.
  std::string (*unavailable)();
  std::unique_ptr<Backend> (*make_backend)(const BackendOptions& options);
};

namespace cpu {

// Throws kUsage for invalid numbers of threads, and kUnsupported for more threads than the process can start, because
// OpenMP would end the process.
std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

}  // namespace cpu

// Defined in builds with CUDA.
namespace cuda {

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options);
// No driver, no GPU, or a GPU older than sm_80.
std::string cuda_unavailable();
// The same, or a GPU that is not sm_90: sm_90a code runs on no other.
std::string hopper_unavailable();

}  // namespace cuda

inline constexpr KernelPlatform kCpuPlatform{"cpu", [] { return std::string(); }, cpu::make_cpu_backend};
inline constexpr KernelPlatform kCudaPlatform{"cuda", cuda::cuda_unavailable, cuda::make_cuda_backend};
inline constexpr KernelPlatform kHopperPlatform{"cuda", cuda::hopper_unavailable, cuda::make_cuda_backend};

}  // namespace ringattn
