// SPDX-License-Identifier: Apache-2.0
// The convolution's kernels, in order of preference.
#include "kernels/convolution.hpp"
#include "kernels/cpu/cpu_convolution.hpp"
#include "kernels/cpu/cpu_fold.hpp"
#ifdef RINGATTN_HAVE_CUDA
#include "kernels/cuda/cuda_fold.hpp"
#include "kernels/sm80/scan/sm80_convolution.hpp"
#endif
#include "kernels/registry.hpp"

namespace ringattn {

namespace {

constexpr KernelRow<ConvolutionSpec> kTable[] = {
#ifdef RINGATTN_HAVE_CUDA
    {{"sm80_convolution", "cuda", "fp32, bf16, fp16; channels that are multiples of 8, width 2 to 4",
      [] { return std::vector<std::string>(); },
      [](const Backend&) { return 4e12; },  // it waits for memory: four terms for four bytes
      cuda::cuda_unavailable, cuda::make_cuda_backend},
     vector_convolution_missing,
     sm80::make_convolution},
#endif
    {{"cpu_convolution", "cpu", "fp32, bf16, fp16; channels that are multiples of 8, width 2 to 4",
      [] { return std::vector<std::string>(); }, cpu::cpu_convolution_speed, [] { return std::string(); },
      cpu::make_cpu_backend},
     vector_convolution_missing,
     cpu::make_cpu_convolution},
};

}  // namespace

template <>
std::span<const KernelRow<ConvolutionSpec>> kernel_table<ConvolutionSpec>() {
  return kTable;
}

}  // namespace ringattn
