// SPDX-License-Identifier: Apache-2.0
// A LinearKernel for quantized weights on a GPU: everything except the device code.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/linear/cuda/quantized_params.hpp"
#include "kernels/linear/linear.hpp"

namespace ringattn::cuda {

// The GEMM of one weight format, as an architecture has it.
template <class Gemm>
struct QuantizedLauncher {
  // Loads the kernels on the current device, so that no launch has to load them while peers wait.
  void (*prepare)(Dtype dtype);
  // Memory for tasks of up to `rows` rows: bytes of sums that CTAs share, and counters.
  std::int64_t (*shared_bytes)(const LinearSpec& spec, std::int64_t rows, int multiprocessors);
  std::int64_t (*counters)(const LinearSpec& spec, std::int64_t rows, int multiprocessors);
  void (*launch)(const Gemm& params, Stream stream);
};

// What these kernels lack for `spec` (KernelRow::missing).
std::vector<std::string> int8_linear_missing(const LinearSpec& spec);
std::vector<std::string> int4_linear_missing(const LinearSpec& spec);

// `backend` is a CudaBackend and outlives the kernel. Tasks may run in any stream, one at a time, and in a graph.
std::unique_ptr<LinearKernel> make_int8_linear(const LinearSpec& spec, const QuantizedLauncher<Int8Gemm>& launcher,
                                               Backend& backend);
std::unique_ptr<LinearKernel> make_int4_linear(const LinearSpec& spec, const QuantizedLauncher<Int4Gemm>& launcher,
                                               Backend& backend);

}  // namespace ringattn::cuda
