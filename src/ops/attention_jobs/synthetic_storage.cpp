// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/synthetic_storage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "base/message_template.hpp"
#include "kernels/common/synthetic.hpp"
#include "kernels/quant/compression_methods.hpp"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kTokensAtOnce = 1 << 12;

// True if rows are stored in their dtype. Throws kUsage if `name` is another dtype.
bool as_they_are(const std::string& name, Dtype dtype) {
  if (name.empty() || name == dtype_name(dtype)) return true;
  for (const Dtype other : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    if (name != dtype_name(other)) continue;
    fail(ErrorCode::kUsage, {setting("cache_format", name), " with ", setting("dtype", dtype_name(dtype))},
         "a cache that isn't compressed has the type of q", "Leave out one of them.");
  }
  return false;
}

// Generates latents and FP8 rows of some tokens at a time, and calls part(tokens, latents, fp8 rows, first) for them.
template <class Part>
void for_each_part(std::uint64_t seed, const MlaSpec& spec, std::span<const PackedRun> tokens, int threads,
                   const Part& part) {
  const std::int64_t row_bytes = latent_row_bytes(spec);
  std::int64_t first = 0;
  for (const PackedRun& run : tokens) {
    for (std::int64_t begin = run.begin; begin < run.end; begin += kTokensAtOnce) {
      const PackedRun piece{begin, std::min(run.end, begin + kTokensAtOnce)};
      const std::int64_t count = piece.tokens();
      const auto elements = static_cast<std::size_t>(count) * size_of(spec.dtype);
      std::vector<std::byte> latents(elements * static_cast<std::size_t>(spec.latent_dim));
      std::vector<std::byte> keys(elements * static_cast<std::size_t>(spec.rope_dim));
      std::vector<std::byte> codes(static_cast<std::size_t>(count * row_bytes));
      const auto latent = dense_view(static_cast<void*>(latents.data()), spec.dtype, count, 1, spec.latent_dim);
      const auto k_rope = dense_view(static_cast<void*>(keys.data()), spec.dtype, count, 1, spec.rope_dim);
      fill_synthetic(seed, SyntheticTensor::kLatent, {&piece, 1}, latent, threads);
      fill_synthetic(seed, SyntheticTensor::kKeyRope, {&piece, 1}, k_rope, threads);
      quantize_latent_rows(latent, k_rope, codes.data(), row_bytes);
      part(codes, k_rope, first);
      first += count;
    }
  }
}

}  // namespace

CacheFormat synthetic_format(const std::string& name, const AttentionSpec& spec) {
  if (as_they_are(name, spec.dtype)) return {};
  return choose_format(parse_format_choice(name), std::nullopt, {spec.dtype, spec.kv_heads, spec.head_dim},
                       {spec.dtype, spec.kv_heads, spec.head_dim_v});
}

bool is_fp8_latent_format(const std::string& name, const MlaSpec& spec) {
  if (as_they_are(name, spec.dtype)) return false;
  if (name != "fp8") {
    fail(ErrorCode::kUsage, {setting("cache_format", name), " with latents"},
         "they are stored as they are, or in FP8 rows (fp8)", {"Use ", setting("cache_format", "fp8"), "."});
  }
  if (spec.dtype != Dtype::kBf16) {
    fail(ErrorCode::kUsage, {setting("cache_format", name), " with ", setting("dtype", dtype_name(spec.dtype))},
         "FP8 latents become bf16", {"Use ", setting("dtype", "bf16"), ", or leave the format out."});
  }
  static_cast<void>(latent_row_bytes(spec));  // refuses dims that no row holds
  return true;
}

void make_fp8_latents(std::uint64_t seed, const MlaSpec& spec, std::span<const PackedRun> tokens,
                      std::span<std::byte> rows, int threads) {
  const std::int64_t row_bytes = latent_row_bytes(spec);
  for_each_part(seed, spec, tokens, threads,
                [&](const std::vector<std::byte>& codes, const MutableTensorView&, std::int64_t first) {
                  std::ranges::copy(codes, rows.begin() + first * row_bytes);
                });
}

void make_stored_latents(std::uint64_t seed, const MlaSpec& spec, std::span<const PackedRun> tokens,
                         const MutableTensorView& latent, int threads) {
  const std::int64_t row_bytes = latent_row_bytes(spec);
  for_each_part(seed, spec, tokens, threads,
                [&](const std::vector<std::byte>& codes, const MutableTensorView& k_rope, std::int64_t first) {
                  MutableTensorView rows = latent;
                  rows.data = latent.at(first, 0);
                  rows.tokens = k_rope.tokens;
                  dequantize_latent_rows(codes.data(), row_bytes, rows, k_rope);
                });
}

}  // namespace ringattn
