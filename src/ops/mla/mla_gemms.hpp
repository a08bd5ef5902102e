// SPDX-License-Identifier: Apache-2.0
// The GEMMs of MLA decode, which map queries into the latent space and outputs back, and the memory of an MLA decode.
// Called by MlaDecode and by plans.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "kernels/common/registry.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/mla/mla.hpp"
#include "ops/decode/decode_memory.hpp"

namespace ringattn {

// The GEMMs of the absorbed form whose matrices are given.
struct MlaGemms {
  std::string_view kernel;                     // kernel name; empty: there is no GEMM
  std::unique_ptr<BatchedGemmKernel> queries;  // of key_gemm(); null if queries are given in the latent space
  std::unique_ptr<BatchedGemmKernel> values;   // of value_gemm(); null if O stays in the latent space

  std::size_t scratch_bytes(const MlaSpec& spec) const;
};

// Uses the first kernel of this backend that supports them. `backend` outlives them. Throws kUnsupported.
MlaGemms make_mla_gemms(const MlaSpec& spec, std::string_view backend_name, Backend& backend,
                        KernelScope scope = KernelScope::kThisMachine);

// Memory of a decode step: `in_latent` of its Decode, inputs and outputs of the GEMMs, the caller's q and out, and the
// matrices and scratch of the GEMMs.
DecodeMemory mla_decode_memory(const DecodeMemory& in_latent, const MlaSpec& spec, const DecodeLimits& limits,
                               const MlaGemms& gemms);

}  // namespace ringattn
