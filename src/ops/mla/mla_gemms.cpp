// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_gemms.hpp"

#include <optional>
#include <string>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/mla_job.hpp"

namespace ringattn {

std::size_t MlaGemms::scratch_bytes(const MlaSpec& spec) const {
  std::size_t bytes = 0;
  for (const auto& product : {queries.get(), values.get()}) {
    if (product != nullptr) bytes += product->scratch_bytes(spec.heads);
  }
  return bytes;
}

MlaGemms make_mla_gemms(const MlaSpec& spec, std::string_view backend_name, Backend& backend, KernelScope scope) {
  const KernelRequest same_backend{std::string(backend_name), "auto"};
  MlaGemms gemms;
  const auto make = [&](const std::optional<BatchedGemmSpec>& product) -> std::unique_ptr<BatchedGemmKernel> {
    if (!product) return nullptr;
    const BatchedGemmRow& row = *choose_kernel(*product, same_backend, scope).row;
    if (gemms.kernel.empty()) gemms.kernel = row.name;
    return row.make_kernel(*product, backend);
  };
  gemms.queries = make(key_gemm(spec, MlaForm::kAbsorbed));
  gemms.values = make(value_gemm(spec));
  return gemms;
}

DecodeMemory mla_decode_memory(const DecodeMemory& in_latent, const MlaSpec& spec, const DecodeLimits& limits,
                               const MlaGemms& gemms) {
  const AttentionSpec given = expanded_spec(spec, spec.heads);
  std::int64_t row_bytes = spec.q_in_latent ? 0 : q_token_bytes(given);
  if (!spec.out_in_latent) row_bytes += out_token_bytes(given);
  DecodeMemory memory = in_latent;
  memory.rows += static_cast<std::size_t>(limits.sequences * limits.rows * row_bytes + mla_weight_bytes(spec));
  memory.scratch += gemms.scratch_bytes(spec);
  return memory;
}

}  // namespace ringattn
