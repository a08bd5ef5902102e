// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/head_results.hpp"

#include "attention/tokens/cost.hpp"

namespace ringattn {

namespace {

// Copies rows of contiguous heads to rows of any strides.
void copy_heads(Backend& backend, const MutableTensorView& target, const TensorView& source, Stream stream) {
  const auto element = static_cast<std::int64_t>(size_of(source.dtype));
  const std::int64_t together = target.head_stride == source.dim ? source.heads : 1;
  for (std::int64_t head = 0; head < source.heads; head += together) {
    backend.copy_rows(target.at(0, head), target.token_stride * element, source.at(0, head),
                      source.token_stride * element, together * source.dim * element, source.tokens, stream);
  }
}

// Values [tokens, heads] of a range of heads as a tensor view.
MutableTensorView as_rows(const RowView& values, std::int64_t tokens, const HeadRange& heads) {
  return {&values.at(0, heads.first), Dtype::kF32, tokens, heads.count, 1, values.token_stride, values.head_stride};
}

}  // namespace

HeadResults::HeadResults(const AttentionSpec& part) {
  constexpr std::int64_t kAligned = 16;  // the widest store of a kernel, in bytes
  const auto aligned = [](std::int64_t size) { return (size + kAligned - 1) / kAligned * kAligned; };
  lse_at = aligned(out_token_bytes(part));
  bytes = lse_at + aligned(lse_token_bytes(part));
}

AttentionOutput results_in(std::byte* records, const AttentionSpec& part, std::int64_t rows) {
  const HeadResults record(part);
  AttentionOutput results;
  results.out = dense_view(static_cast<void*>(records), part.dtype, rows, part.heads, part.head_dim_v);
  results.out.token_stride = record.bytes / static_cast<std::int64_t>(size_of(part.dtype));
  results.lse = {reinterpret_cast<float*>(records + record.lse_at),
                 record.bytes / static_cast<std::int64_t>(sizeof(float)), 1};
  return results;
}

void join_heads(Backend& backend, const AttentionSpec& spec, const DecodeDeal& deal,
                std::span<std::byte* const> records, const AttentionOutput& output, Stream stream) {
  const std::int64_t rows = output.out.tokens;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const HeadRange kv_heads = kept_heads(deal, spec, static_cast<int>(i));
    const HeadRange heads = query_heads(spec, kv_heads);
    const AttentionOutput results = results_in(records[i], spec_of_heads(spec, kv_heads), rows);
    MutableTensorView out = output.out;
    out.data = out.at(0, heads.first);
    copy_heads(backend, out, results.out, stream);
    if (output.lse.data == nullptr) continue;
    copy_heads(backend, as_rows(output.lse, rows, heads), as_rows(results.lse, rows, {0, heads.count}), stream);
  }
}

}  // namespace ringattn
