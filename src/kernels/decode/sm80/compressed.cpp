// SPDX-License-Identifier: Apache-2.0
// The formats of compressed caches that sm80_attention decodes, and their launch parameters.
#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <string_view>

#include "base/error.hpp"
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/decode/sm80/sm80_decode.hpp"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn::sm80 {

namespace {

constexpr cuda::Compiled<CompressedLauncher> kCompiled[] = {
    {Dtype::kBf16, 64, &compressed_bf16_64},   {Dtype::kBf16, 96, &compressed_bf16_96},
    {Dtype::kBf16, 128, &compressed_bf16_128}, {Dtype::kBf16, 192, &compressed_bf16_192},
    {Dtype::kBf16, 256, &compressed_bf16_256}, {Dtype::kBf16, 576, &compressed_bf16_576},
    {Dtype::kF16, 64, &compressed_fp16_64},    {Dtype::kF16, 96, &compressed_fp16_96},
    {Dtype::kF16, 128, &compressed_fp16_128},  {Dtype::kF16, 192, &compressed_fp16_192},
    {Dtype::kF16, 256, &compressed_fp16_256},
};

bool is_decoded(const RowFormat& format) {
  return format.is_plain() || format.encoding == RowEncoding::kFp8 || format.encoding == RowEncoding::kInt8 ||
         format.encoding == RowEncoding::kInt4Channel || format.encoding == RowEncoding::kInt4Token;
}

[[noreturn]] void refuse(const std::string& why) {
  fail(ErrorCode::kUnsupported, "sm80_attention can't read this compressed cache", why, "Change its layout.");
}

// Page numbers and token offsets are 32-bit.
void check_coords(std::int64_t pages, std::int64_t page_size) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (pages > kMax || page_size > kMax) refuse("it must have less than 2^31 pages and tokens");
}

PagedBytes aligned(const PagedBytes& rows, std::string_view name, int bytes) {
  const auto start = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(rows.data));
  if ((start | rows.page_stride | rows.token_stride | rows.head_stride) % bytes == 0) return rows;
  refuse(fmt::format("the start and the strides of its {} must be multiples of {} bytes", name, bytes));
}
PagedBytes aligned(const PagedStream& stream, std::string_view name, int bytes) {
  return aligned(PagedBytes{stream.data, stream.page_stride, stream.token_stride, stream.head_stride}, name, bytes);
}

QuantizedTensor quantized_tensor(const CacheView& view) {
  check_coords(view.pages, view.page_size);
  QuantizedTensor t{};
  t.quantized = aligned(PagedBytes{static_cast<const std::byte*>(view.data), 2 * view.page_stride,
                                   2 * view.token_stride, 2 * view.head_stride},
                        "elements", 16);
  t.encoding = RowEncoding::kPlain;
  return t;
}

QuantizedTensor quantized_tensor(const CompressedCache& cache) {
  check_coords(cache.pages, cache.page_size);
  const RowFormat& format = cache.format;
  QuantizedTensor t{};
  t.encoding = format.encoding;
  t.scales = format.scales;
  t.group = format.group;
  t.quantized = aligned(cache.streams[0], "quantized values", 8);
  t.table = cache.tables[0];
  const bool table_only = format.encoding == RowEncoding::kFp8 && format.scales != ScaleGrain::kTokenHead;
  if (!table_only) t.qparams = aligned(cache.streams[1], "scales", 4);
  if (format.encoding == RowEncoding::kLatent) t.rotary = aligned(cache.streams[2], "rotary keys", 16);
  if (format.encoding == RowEncoding::kInt4Channel && reinterpret_cast<std::uintptr_t>(t.table) % 16 != 0) {
    refuse("the start of its tail must be a multiple of 16 bytes");
  }
  return t;
}

}  // namespace

const CompressedLauncher& compressed_launcher_of(const DecodeSpec& spec, bool configured) {
  return cuda::launcher_of("sm80_attention", kCompiled, spec.attention, configured);
}

std::vector<std::string> formats_missing(const DecodeSpec& spec) {
  std::vector<std::string> missing;
  if (spec.format.is_plain()) return missing;
  const auto config = choose_config(spec.attention);
  if (config && config->slices > 1 && config->head_dim == config->head_dim_v) {
    missing.push_back(
        fmt::format("{} at head_dim {} (supported: plain caches)", describe(spec.format), config->head_dim));
    return missing;
  }
  if (config && config->slices > 1) {
    const RowFormat latents = latent_format(config->head_dim - config->head_dim_v);
    if (spec.values_in_keys && spec.format == CacheFormat{latents, {}} && spec.attention.dtype == Dtype::kBf16 &&
        spec.attention.kv_heads == 1) {
      return missing;
    }
    missing.push_back(fmt::format("{} of {} (supported: plain caches, and {} of bf16, one KV head, as keys and values)",
                                  describe(spec.format), dtype_name(spec.attention.dtype), describe(latents)));
    return missing;
  }
  for (const RowFormat& format : {spec.format.k, spec.format.v}) {
    if (!is_decoded(format)) missing.push_back(describe(format) + " (supported: plain, fp8, int8 and int4)");
  }
  if (spec.values_in_keys) missing.emplace_back("values in compressed keys (supported: separate tensors)");
  return missing;
}

void set_compressed(const DecodeSpec& spec, const DecodeStep& step, CompressedParams& p) {
  p.k = spec.format.k.is_plain() ? quantized_tensor(step.k) : quantized_tensor(step.quantized_k);
  if (spec.quantized_values_in_keys()) return;
  p.v = spec.format.v.is_plain() ? quantized_tensor(step.v) : quantized_tensor(step.quantized_v);
}

}  // namespace ringattn::sm80
