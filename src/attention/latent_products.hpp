// SPDX-License-Identifier: Apache-2.0
// What a step over a cache of latents has around its Decode: the products that bring queries into the latent and
// results back, and the memory of the whole. Pure but for the making of kernels, so a plan can ask for it too.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "attention/decode_memory.hpp"
#include "kernels/head_product.hpp"
#include "kernels/latent.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// Those that are not the caller's, of the absorbed form.
struct LatentProducts {
  std::string_view kernel;                     // its name; empty: there is no product
  std::unique_ptr<HeadProductKernel> queries;  // of key_product(); null where there is none, as the next
  std::unique_ptr<HeadProductKernel> values;   // of value_product()

  std::size_t scratch_bytes(const LatentSpec& spec) const;
};

// By the first kernel of this backend that can. `backend` outlives them. Throws kUnsupported.
LatentProducts make_latent_products(const LatentSpec& spec, std::string_view backend_name, Backend& backend,
                                    KernelPlace place = KernelPlace::kHere);

// Bytes of a step, of `in_latent` for its Decode: beside that what the products come from and give, q and out as the
// caller has them, and the products' matrices and scratch.
DecodeMemory latent_decode_memory(const DecodeMemory& in_latent, const LatentSpec& spec, const DecodeLimits& limits,
                                  const LatentProducts& products);

}  // namespace ringattn
