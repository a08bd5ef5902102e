// SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/decode/compressed.hpp"

#include <fmt/format.h>

#include <bit>

#include "base/error.hpp"
#include "kernels/cuda/cuda_fold.hpp"
#include "kernels/sm90/decode/config.hpp"
#include "kernels/sm90/decode/step_params.hpp"
#include "kernels/sm90/fold/tensor_maps.hpp"

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
  return format.coding == RowCoding::kFp8 || format.coding == RowCoding::kInt8 ||
         format.coding == RowCoding::kInt4Channel || format.coding == RowCoding::kInt4Token;
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
  fail(ErrorCode::kUnsupported, "sm90_fold can't read this compressed cache",
       fmt::format("the start and the strides of its {} must be multiples of {} bytes", stream, bytes),
       "Lay it out so.");
}

// `slices`: of V's columns, of which the sliced kernel fetches one.
void set_tensor(const CompressedCache& cache, int slices, int box_rows, PackedTensor& t) {
  const RowFormat& format = cache.format;
  const PagedStream& codes = cache.streams[0];
  const auto dim = static_cast<int>(cache.shape.dim);
  t.coding = format.coding;
  t.scales = format.scales;
  t.group = format.group;
  t.codes = paged(codes);
  t.table = cache.tables[0];
  const int all_bytes = t.four_bits() ? dim / 2 : dim;
  t.row_bytes = all_bytes / slices;
  // The copy engine counts 16 bits here.
  const MappedPages pages{
      {codes.data, cache.page_size, cache.shape.heads, all_bytes / 2, codes.token_stride / 2, codes.head_stride / 2},
      cache.pages,
      codes.page_stride / 2};
  if (!divides(16, codes) || !can_map(pages)) refuse_alignment("codes", 16);
  // Longer rows are read by threads (compressed_whole.cuh).
  if (t.row_bytes <= kPanelRowBytes && t.row_bytes % 16 == 0) t.map = map_plain_pages(pages, box_rows, t.row_bytes / 2);
  const bool table_alone = format.coding == RowCoding::kFp8 && format.scales != ScaleGrain::kTokenHead;
  if (table_alone) return;
  t.numbers = paged(cache.streams[1]);
  t.number_bytes = t.four_bits() ? 4 * (dim / format.group) : 4;
  t.pairs_log = std::countr_zero(static_cast<unsigned>(t.number_bytes / 4));
  t.number_piece = 16;
  while (t.number_piece > 1 && (t.number_bytes % t.number_piece != 0 || !divides(t.number_piece, cache.streams[1]))) {
    t.number_piece /= 2;
  }
  if (t.number_piece < 4) refuse_alignment("scales", 4);
  if (t.has_tail() && reinterpret_cast<std::uintptr_t>(t.table) % 16 != 0) refuse_alignment("tail", 16);
}

}  // namespace

const CompressedLauncher& compressed_launcher_of(const DecodeSpec& spec, bool configured) {
  return cuda::launcher_of("sm90_fold", kCompiled, spec.fold, configured);
}

std::vector<std::string> formats_missing(const DecodeSpec& spec) {
  std::vector<std::string> missing;
  if (spec.format.is_plain()) return missing;
  for (const RowFormat& format : {spec.format.k, spec.format.v}) {
    if (!is_decoded(format)) missing.push_back(describe(format) + " (supported: fp8, int8 and int4, of both tensors)");
  }
  if (spec.values_in_keys) missing.emplace_back("values in compressed keys (supported: tensors of their own)");
  return missing;
}

void set_compressed(const DecodeStep& step, CompressedParams& p) {
  p.box_log = std::countr_zero(static_cast<unsigned>(p.step.box_rows));
  set_tensor(step.packed_k, 1, p.step.box_rows, p.k);
  set_tensor(step.packed_v, p.step.slices, p.step.box_rows, p.v);
}

}  // namespace ringattn::sm90
