// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_products.hpp"

#include <optional>
#include <string>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/latent_job.hpp"

namespace ringattn {

std::size_t LatentProducts::scratch_bytes(const LatentSpec& spec) const {
  std::size_t bytes = 0;
  for (const auto& product : {queries.get(), values.get()}) {
    if (product != nullptr) bytes += product->scratch_bytes(spec.heads);
  }
  return bytes;
}

LatentProducts make_latent_products(const LatentSpec& spec, std::string_view backend_name, Backend& backend,
                                    KernelPlace place) {
  const KernelRequest beside{std::string(backend_name), "auto"};
  LatentProducts products;
  const auto make = [&](const std::optional<HeadProductSpec>& product) -> std::unique_ptr<HeadProductKernel> {
    if (!product) return nullptr;
    const HeadProductRow& row = *choose_kernel(*product, beside, place).row;
    if (products.kernel.empty()) products.kernel = row.name;
    return row.make_kernel(*product, backend);
  };
  products.queries = make(key_product(spec, LatentForm::kAbsorbed));
  products.values = make(value_product(spec));
  return products;
}

DecodeMemory latent_decode_memory(const DecodeMemory& in_latent, const LatentSpec& spec, const DecodeLimits& limits,
                                  const LatentProducts& products) {
  const FoldSpec given = expanded_spec(spec, spec.heads);
  std::int64_t row_bytes = spec.q_in_latent ? 0 : q_token_bytes(given);
  if (!spec.out_in_latent) row_bytes += out_token_bytes(given);
  DecodeMemory memory = in_latent;
  memory.rows += static_cast<std::size_t>(limits.sequences * limits.rows * row_bytes + latent_weight_bytes(spec));
  memory.scratch += products.scratch_bytes(spec);
  return memory;
}

}  // namespace ringattn
