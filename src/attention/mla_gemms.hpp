// SPDX-License-Identifier: Apache-2.0
// What a step over a cache of latents has around its Decode: the products that bring queries into the latent and
// results back, and the memory of the whole. Pure but for the making of kernels, so a plan can ask for it too.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "attention/decode_memory.hpp"
#include "kernels/batched_gemm.hpp"
#include "kernels/mla.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// Those that are not the caller's, of the absorbed form.
struct MlaGemms {
  std::string_view kernel;                     // its name; empty: there is no product
  std::unique_ptr<BatchedGemmKernel> queries;  // of key_gemm(); null where there is none, as the next
  std::unique_ptr<BatchedGemmKernel> values;   // of value_gemm()

  std::size_t scratch_bytes(const MlaSpec& spec) const;
};

// By the first kernel of this backend that can. `backend` outlives them. Throws kUnsupported.
MlaGemms make_mla_gemms(const MlaSpec& spec, std::string_view backend_name, Backend& backend,
                        KernelScope scope = KernelScope::kThisMachine);

// Bytes of a step, of `in_latent` for its Decode: beside that what the products come from and give, q and out as the
// caller has them, and the products' matrices and scratch.
DecodeMemory mla_decode_memory(const DecodeMemory& in_latent, const MlaSpec& spec, const DecodeLimits& limits,
                               const MlaGemms& gemms);

}  // namespace ringattn
