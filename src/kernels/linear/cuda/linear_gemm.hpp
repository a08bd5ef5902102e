// SPDX-License-Identifier: Apache-2.0
// Parameters of a product with floating-point weights on the GPU, and the launchers of its kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "base/host_device.hpp"
#include "base/memory.hpp"
#include "kernels/linear/linear_constants.hpp"

namespace ringattn::cuda {

// The runs of K that are each summed from zero: splits, or the leaves of one aligned node of the tree. Leaves may be
// empty.
struct LinearChains {
  std::int32_t features;  // K
  std::int32_t count;     // splits, or 1, 2, 4 or 8 leaves
  bool leaves;
  std::int32_t leaf_ends[kLinearLeaves];

  RINGATTN_HOST_DEVICE std::int32_t begin(std::int32_t chain) const {
    return chain == 0 ? 0 : leaves ? leaf_ends[chain - 1] : chain * static_cast<std::int32_t>(kLinearSplit);
  }
  RINGATTN_HOST_DEVICE std::int32_t end(std::int32_t chain) const {
    if (leaves) return leaf_ends[chain];
    const auto end = (chain + 1) * static_cast<std::int32_t>(kLinearSplit);
    return end < features ? end : features;
  }
};

// Strides count bytes. Elements of a row are contiguous.
struct LinearGemm {
  const char* x;  // [rows, K]
  std::int64_t x_stride;
  const char* weights[2];  // [columns, K]; gated: the gate and the up matrix
  std::int64_t weight_strides[2];
  const void* bias[2];  // [columns], or null
  LinearChains chains;
  std::int32_t rows;     // M, at least 1
  std::int32_t columns;  // N of y
  Dtype dtype;
  LinearActivation activation;
  bool gated;
  // Write fp32 sums instead of y, without bias and activation. Not gated.
  bool writes_sums;
  char* out;  // [rows, columns] of the dtype, or fp32
  std::int64_t out_stride;
  // Memory of scratch_bytes(). It is zero before the first launch, and each launch leaves its counters at zero.
  char* scratch;
  std::int32_t multiprocessors;
};

// Functions of a compiled GPU kernel.
struct LinearLauncher {
  // Loads the kernels on the current device, so that no launch has to load them while peers wait.
  void (*prepare)(Dtype dtype);
  // Bytes of LinearGemm::scratch for products of up to `rows` rows.
  std::size_t (*scratch_bytes)(const LinearGemm& gemm, std::int64_t rows);
  // Enqueues. Throws if the launch fails.
  void (*launch)(const LinearGemm& gemm, Stream stream);
};

// On every GPU, for operands of any alignment: bf16 and fp16 (mma_linear.cu), which needs no scratch, and fp32
// (simt_linear.cu).
extern const LinearLauncher mma_linear;
extern const LinearLauncher simt_linear;

}  // namespace ringattn::cuda
