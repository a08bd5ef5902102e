// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_products.hpp"

#include <string>

#include "attention/tokens/cost.hpp"

namespace ringattn {

std::size_t LatentProducts::scratch_bytes(const LatentSpec& spec) const {
  return queries->scratch_bytes(spec.heads) + values->scratch_bytes(spec.heads);
}

LatentProducts make_latent_products(const LatentSpec& spec, std::string_view backend_name, Backend& backend,
                                    KernelPlace place) {
  const KernelRequest beside{std::string(backend_name), "auto"};
  const HeadProductSpec of_queries = query_absorption(spec);
  const HeadProductSpec of_values = value_expansion(spec);
  const HeadProductRow* const row = choose_kernel(of_queries, beside, place).row;
  return {row->name, row->make_kernel(of_queries, backend),
          choose_kernel(of_values, beside, place).row->make_kernel(of_values, backend)};
}

DecodeMemory latent_decode_memory(const DecodeMemory& in_latent, const LatentSpec& spec, const DecodeLimits& limits,
                                  const LatentProducts& products) {
  const FoldSpec given = expanded_spec(spec, spec.heads);
  DecodeMemory memory = in_latent;
  memory.rows += static_cast<std::size_t>(
      limits.sequences * limits.rows * (q_token_bytes(given) + out_token_bytes(given)) + latent_weight_bytes(spec));
  memory.scratch += products.scratch_bytes(spec);
  return memory;
}

}  // namespace ringattn
