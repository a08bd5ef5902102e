// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/sm90/compressed.hpp"

#include <fmt/format.h>

#include <bit>

#include "base/error.hpp"
#include "kernels/attention/cuda/cuda_attention.hpp"
#include "kernels/attention/sm90/tensor_maps.hpp"
#include "kernels/decode/sm90/config.hpp"
#include "kernels/decode/sm90/sm90_decode.hpp"

namespace ringattn::sm90 {

namespace {

constexpr cuda::Compiled<CompressedLauncher> kCompiled[] = {
    {Dtype::kBf16, 64, &compressed_bf16_64},   {Dtype::kBf16, 96, &compressed_bf16_96},
    {Dtype::kBf16, 128, &compressed_bf16_128}, {Dtype::kBf16, 192, &compressed_bf16_192},
    {Dtype::kBf16, 256, &compressed_bf16_256}, {Dtype::kF16, 64, &compressed_fp16_64},
    {Dtype::kF16, 96, &compressed_fp16_96},    {Dtype::kF16, 128, &compressed_fp16_128},
    {Dtype::kF16, 192, &compressed_fp16_192},  {Dtype::kF16, 256, &compressed_fp16_256},
};

bool is_decoded(const RowFormat& format) {
  return format.encoding == RowEncoding::kFp8 || format.encoding == RowEncoding::kInt8 ||
         format.encoding == RowEncoding::kInt4Channel || format.encoding == RowEncoding::kInt4Token;
}

PagedBytes paged(const PagedStream& stream) {
  return {stream.data, stream.page_stride, stream.token_stride, stream.head_stride};
}

bool divides(std::int64_t bytes, const PagedStream& stream) {
  return (static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(stream.data)) | stream.page_stride |
          stream.token_stride | stream.head_stride) %
             bytes ==
         0;
}

[[noreturn]] void refuse_alignment(std::string_view stream, int bytes) {
  fail(ErrorCode::kUnsupported, "sm90_attention can't read this compressed cache",
       fmt::format("the start and the strides of its {} must be multiples of {} bytes", stream, bytes),
       "Use a cache with such a layout.");
}

MappedPages mapped(const CompressedCache& cache, const PagedStream& stream, int heads, int row_bytes) {
  // The map counts 16-bit units.
  return {{stream.data, cache.page_size, heads, row_bytes / 2, stream.token_stride / 2, stream.head_stride / 2},
          cache.pages,
          stream.page_stride / 2};
}

// Maps the scales and zero points of rows, if TMA can load them 16 bytes at a time.
void map_qparams(const CompressedCache& cache, int box_rows, QuantizedTensor& t) {
  constexpr int kBytes = 16;
  const PagedStream& stream = cache.streams[1];
  const auto heads = static_cast<int>(cache.shape.heads);
  if (t.qparam_bytes > kBytes || !divides(2, stream)) return;
  MappedPages pages{};
  if (t.qparam_bytes == kBytes) {
    pages = mapped(cache, stream, heads, t.qparam_bytes);
  } else {  // the qparams of several heads are adjacent
    if (stream.head_stride != t.qparam_bytes || heads * t.qparam_bytes % kBytes != 0) return;
    PagedStream joined = stream;
    joined.head_stride = stream.token_stride;  // a single head
    pages = mapped(cache, joined, 1, heads * t.qparam_bytes);
    t.qparams_step = t.qparam_bytes;
  }
  t.qparams_mapped = can_map(pages);
  if (t.qparams_mapped) t.qparam_map = map_plain_pages(pages, box_rows, kBytes / 2);
}

// `slices` divides V's columns; the sliced kernel loads one slice.
void set_tensor(const CompressedCache& cache, int slices, int box_rows, QuantizedTensor& t) {
  const RowFormat& format = cache.format;
  const PagedStream& quantized = cache.streams[0];
  const auto dim = static_cast<int>(cache.shape.dim);
  t.encoding = format.encoding;
  t.scales = format.scales;
  t.group = format.group;
  t.quantized = paged(quantized);
  t.table = cache.tables[0];
  const int all_bytes = t.four_bits() ? dim / 2 : dim;
  t.row_bytes = all_bytes / slices;
  const MappedPages pages = mapped(cache, quantized, static_cast<int>(cache.shape.heads), all_bytes);
  if (!divides(16, quantized) || !can_map(pages)) refuse_alignment("quantized values", 16);
  // Longer rows, and those of other lengths, are read by threads (compressed.cuh).
  if (t.row_bytes == 16) t.map = map_plain_pages(pages, box_rows, t.row_bytes / 2);
  if (t.row_bytes == 32 || t.row_bytes == 64 || t.row_bytes == kPanelRowBytes) {
    t.map = map_pages(pages, Dtype::kBf16, box_rows, t.row_bytes / 2);
  }
  const bool table_alone = format.encoding == RowEncoding::kFp8 && format.scales != ScaleGrain::kTokenHead;
  if (table_alone) return;
  t.qparams = paged(cache.streams[1]);
  t.qparam_bytes = t.four_bits() ? 4 * (dim / format.group) : 4;
  t.pairs_log = std::countr_zero(static_cast<unsigned>(t.qparam_bytes / 4));
  if (!divides(4, cache.streams[1])) refuse_alignment("scales", 4);
  if (t.has_tail() && reinterpret_cast<std::uintptr_t>(t.table) % 16 != 0) refuse_alignment("tail", 16);
  map_qparams(cache, box_rows, t);
}

}  // namespace

const CompressedLauncher& compressed_launcher_of(const DecodeSpec& spec, bool configured) {
  return cuda::launcher_of("sm90_attention", kCompiled, spec.attention, configured);
}

std::vector<std::string> formats_missing(const DecodeSpec& spec) {
  std::vector<std::string> missing;
  if (spec.format.is_plain()) return missing;
  for (const RowFormat& format : {spec.format.k, spec.format.v}) {
    if (!is_decoded(format)) missing.push_back(describe(format) + " (supported: fp8, int8 and int4, of both tensors)");
  }
  if (spec.values_in_keys) missing.emplace_back("values in compressed keys (supported: separate K and V tensors)");
  return missing;
}

bool slices_formats(const CacheFormat& format) {
  const auto eight = [](const RowFormat& f) {
    return f.encoding == RowEncoding::kFp8 || f.encoding == RowEncoding::kInt8;
  };
  return (eight(format.k) || format.k.encoding == RowEncoding::kInt4Channel) &&
         (eight(format.v) || format.v.encoding == RowEncoding::kInt4Token);
}

void set_compressed(const DecodeStep& step, CompressedParams& p) {
  p.box_log = std::countr_zero(static_cast<unsigned>(p.boxes.rows));
  set_tensor(step.quantized_k, 1, p.boxes.rows, p.k);
  set_tensor(step.quantized_v, p.slices, p.boxes.rows, p.v);
}

}  // namespace ringattn::sm90
