// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mla_gemms.hpp"

#include <cstring>

#include "ops/batched_gemm/batched_gemm.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {

namespace {

// Rows of the first `spec.dim_k` of `from` numbers each become the first `spec.dim_n` of `to`, in `out`.
void multiply(const BatchedGemmSpec& spec, const std::vector<std::byte>& rows, int from, GemmWeights weights,
              std::vector<std::byte>& out, int to, const std::string& backend) {
  BatchedGemmOptions options;
  options.kernel.backend = backend;
  options.threads = 1;
  BatchedGemm product({spec, weights.heads}, options);
  const std::int64_t heads = weights.heads;
  const auto count =
      static_cast<std::int64_t>(rows.size()) / (heads * from * static_cast<std::int64_t>(size_of(spec.dtype)));
  if (count == 0) return;
  const auto weight_bytes = static_cast<std::size_t>(heads * spec.dim_k * spec.dim_n) * size_of(spec.dtype);
  DeviceArray rows_there(product.backend(), rows.size()), weights_there(product.backend(), weight_bytes);
  DeviceArray out_there(product.backend(), out.size());
  rows_there.write(rows);
  const auto* const matrices = static_cast<const std::byte*>(weights.data);
  weights_there.write({matrices, matrices + weight_bytes});
  out_there.write(out);
  weights.data = weights_there.data();
  TensorView left = dense_view(static_cast<const void*>(rows_there.data()), spec.dtype, count, heads, from);
  MutableTensorView result = dense_view(static_cast<void*>(out_there.data()), spec.dtype, count, heads, to);
  left.dim = spec.dim_k;
  result.dim = spec.dim_n;
  product.run({left, weights, result}, product.backend().stream());
  out = out_there.read();
}

}  // namespace

std::vector<std::byte> queries_in_latent(const MlaSpec& spec, const std::vector<std::byte>& q,
                                         const std::vector<std::byte>& w_uk, const std::string& backend) {
  const std::size_t element = size_of(spec.dtype);
  const auto nope = static_cast<std::size_t>(spec.head_dim) * element;
  const auto rope = static_cast<std::size_t>(spec.rope_dim) * element;
  const auto latent = static_cast<std::size_t>(spec.latent_dim) * element;
  const std::size_t count = q.size() / (nope + rope);  // rows of heads
  std::vector<std::byte> wide(count * (latent + rope));
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(wide.data() + i * (latent + rope) + latent, q.data() + i * (nope + rope) + nope, rope);
  }
  multiply(query_absorption(spec), q, spec.head_dim + spec.rope_dim,
           matrices_of(w_uk, spec, spec.head_dim).transposed(), wide, spec.latent_dim + spec.rope_dim, backend);
  return wide;
}

std::vector<std::byte> outputs_from_latent(const MlaSpec& spec, const std::vector<std::byte>& in_latent,
                                           const std::vector<std::byte>& w_uv, const std::string& backend) {
  const auto latent = static_cast<std::size_t>(spec.latent_dim), value = static_cast<std::size_t>(spec.head_dim_v);
  std::vector<std::byte> out(in_latent.size() / latent * value);
  multiply(value_expansion(spec), in_latent, spec.latent_dim, matrices_of(w_uv, spec, spec.head_dim_v), out,
           spec.head_dim_v, backend);
  return out;
}

}  // namespace ringattn::testing
