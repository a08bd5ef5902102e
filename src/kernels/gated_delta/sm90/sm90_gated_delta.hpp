// SPDX-License-Identifier: Apache-2.0
// The gated delta rule kernel `sm90_gated_delta` (Gated DeltaNet and KDA), with wgmma, for H100 and H200. bf16, keys
// and values of 128 dims. Views may have any alignment: rows that are not aligned to 16 bytes are copied by threads,
// which is slower and gives the same bits. What it rounds to bf16, once each: T · diag(β), the scores of q and k with
// decay and scale, the state before a chunk as a factor, v minus its product with keys, u, and in GDN u times its
// decay, where q, k and v are factors as they are. In KDA it rounds q and k times their decays. States, T and all sums
// are fp32.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/backend.hpp"
#include "kernels/gated_delta/gated_delta.hpp"

namespace ringattn::sm90 {

// Requirements of `spec` that the kernel does not support. See KernelRow::missing.
std::vector<std::string> gated_delta_missing(const GatedDeltaSpec& spec);

// `backend` must be a CudaBackend and must outlive the kernel.
std::unique_ptr<GatedDeltaKernel> make_gated_delta(const GatedDeltaSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
