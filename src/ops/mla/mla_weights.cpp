// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_weights.hpp"

#include <span>

#include "ops/common/non_finite.hpp"
#include "ops/common/staging.hpp"

namespace ringattn {

MlaWeights load_mla_weights(const JobInput& input, Backend& backend, const Collective& collective, int threads) {
  const MlaSpec& spec = input.mla()->spec;
  const PackedRun heads[] = {{0, spec.heads}};
  MlaWeights weights;
  const auto load = [&](SyntheticTensor tensor, int dim_n, Buffer& buffer) {
    const MutableTensorView rows = make_rows(backend, spec.dtype, spec.heads, dim_n, spec.latent_dim, buffer);
    if (input.is_made(tensor)) {
      backend.fill_synthetic(*input.seed(), tensor, input.made_tokens(tensor, heads), rows, backend.stream());
    } else {
      const auto fill = [&](std::span<const PackedRun> runs, const MutableTensorView& host) {
        input.read(tensor, runs, host, threads);
        if (collective.rank() == 0) weights.non_finite += count_non_finite(host);
      };
      Staging(backend, collective.timeouts()).load(heads, rows, fill, {});
    }
    return GemmWeights{rows.data, rows.dtype,        rows.tokens,      rows.heads,
                       rows.dim,  rows.token_stride, rows.head_stride, 1};
  };
  if (!spec.q_in_latent) weights.keys = load(SyntheticTensor::kWeightKeys, spec.head_dim, weights.w_uk);
  if (!spec.out_in_latent) weights.values = load(SyntheticTensor::kWeightValues, spec.head_dim_v, weights.w_uv);
  await(backend, collective.timeouts());
  return weights;
}

MlaDecodeInputs mla_decode_inputs(const DecodeInputs& step, const MlaWeights& weights) {
  MlaDecodeInputs rows;
  rows.q = step.q;
  rows.rows = step.rows;
  rows.cache = step.k;
  rows.fp8_rows = step.quantized_k;
  rows.block_table = step.block_table;
  rows.table_pages = step.table_pages;
  rows.lengths = step.lengths;
  rows.lengths_before = step.lengths_before;
  rows.update_lengths = step.update_lengths;
  rows.sinks = step.sinks;
  rows.w_uk = weights.keys;
  rows.w_uv = weights.values;
  rows.host_lengths = step.host_lengths;
  rows.host_table = step.host_table;
  return rows;
}

}  // namespace ringattn
