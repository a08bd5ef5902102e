// SPDX-License-Identifier: Apache-2.0
// `cpu_convolution`: threads over pieces of the runs. Channels that are multiples of 8.
#pragma once

#include <memory>

#include "kernels/convolution.hpp"

namespace ringattn::cpu {

// What the threads of a backend, which make_cpu_backend() made, reach together where nobody has measured.
double cpu_convolution_speed(const Backend& backend);

// `backend` is a CpuBackend and outlives the kernel.
std::unique_ptr<ConvolutionKernel> make_cpu_convolution(const ConvolutionSpec& spec, Backend& backend);

}  // namespace ringattn::cpu
