// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/oracle_rows.hpp"

#include <algorithm>

#include "base/memory.hpp"
#include "base/rank_liveness.hpp"
#include "ops/decode/rank_cache.hpp"
#include "ops/mla/mla_projections.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kStagedTokens = 4096;

// Dense rows in host memory.
struct HostTensor {
  HostTensor(Dtype dtype, std::int64_t tokens, int heads, int dim)
      : memory(allocate_host(static_cast<std::size_t>(tokens * heads * dim) * size_of(dtype))),
        view(dense_view(static_cast<void*>(memory.data()), dtype, tokens, heads, dim)) {}

  MutableTensorView first(std::int64_t tokens) const {
    MutableTensorView piece = view;
    piece.tokens = tokens;
    return piece;
  }

  Buffer memory;
  MutableTensorView view;
};

}  // namespace

std::size_t sequence_of(std::span<const std::int64_t> cu_q, std::int64_t token) {
  return static_cast<std::size_t>(std::upper_bound(cu_q.begin(), cu_q.end() - 1, token) - cu_q.begin() - 1);
}

std::vector<float> query_of(const JobInput& input, const RowSample& sample, int threads) {
  const AttentionSpec& spec = input.job().spec;
  const HostTensor rows(spec.dtype, 1, spec.heads, spec.head_dim);
  const PackedRun own{sample.token, sample.token + 1};
  input.read(SyntheticTensor::kQ, {&own, 1}, rows.view, threads);
  const std::byte* at = rows.view.at(0, sample.head);
  std::vector<float> q;
  for (int d = 0; d < spec.head_dim; ++d, at += size_of(spec.dtype)) q.push_back(load_element(at, spec.dtype));
  return q;
}

void feed_keys(const JobInput& input, std::size_t sequence, const KeyRange& keys, std::span<OracleRow> rows,
               int threads) {
  const auto [spec, latents, format] = decode_spec(input);
  const std::int64_t origin = input.job().batch.cu_k()[sequence];
  const std::int64_t most = std::min(kStagedTokens, std::max<std::int64_t>(0, keys.end - keys.begin));
  const HostTensor k_rows(spec.dtype, most, spec.kv_heads, spec.head_dim);
  const HostTensor v_rows(spec.dtype, most, spec.kv_heads, spec.head_dim_v);
  for (std::int64_t key = keys.begin; key < keys.end; key += kStagedTokens) {
    heartbeat();
    const std::int64_t tokens = std::min(kStagedTokens, keys.end - key);
    const PackedRun run{origin + key, origin + key + tokens};
    const MutableTensorView k = k_rows.first(tokens);
    const MutableTensorView v = v_rows.first(tokens);
    if (latents) {
      read_latent_keys(input, {&run, 1}, k, threads);
    } else {
      input.read(SyntheticTensor::kK, {&run, 1}, k, threads);
    }
    input.read(latents ? SyntheticTensor::kLatent : SyntheticTensor::kV, {&run, 1}, v, threads);
    feed_rows(rows, key, k, v);
  }
}

}  // namespace ringattn
