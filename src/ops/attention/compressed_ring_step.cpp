// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/compressed_ring_step.hpp"

#include <string>
#include <utility>

#include "attention/ring/copy_tensor.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/quant/low_rank_codec.hpp"
#include "ops/attention/attention_ring_step.hpp"

namespace ringattn {

namespace {

// View of a plain tensor's stream.
MutableTensorView elements(const StreamView& stream, const RowShape& shape, std::int64_t row, std::int64_t rows) {
  const auto element = static_cast<std::int64_t>(size_of(shape.dtype));
  return {stream.at(row, 0),           shape.dtype, rows, shape.heads, shape.dim, stream.token_stride / element,
          stream.head_stride / element};
}

MutableTensorView rows_of(MutableTensorView view, std::int64_t first, std::int64_t count) {
  view.data = view.at(first, 0);
  view.tokens = count;
  return view;
}

// Merges runs that are contiguous on both sides, also across sequences.
std::vector<CompressedRun> joined(std::span<const CompressedRun> runs) {
  std::vector<CompressedRun> all;
  for (const CompressedRun& run : runs) {
    const bool goes_on =
        !all.empty() && all.back().row + all.back().rows == run.row && all.back().to + all.back().rows == run.to;
    if (goes_on) {
      all.back().rows += run.rows;
    } else {
      all.push_back(run);
    }
  }
  return all;
}

std::unique_ptr<BatchedGemmKernel> make_gemms(const RowFormat& format, const RowShape& shape,
                                              std::string_view backend_name, Backend& backend) {
  if (format.rank == 0) return nullptr;
  const BatchedGemmSpec spec = expansion_of(format, shape);
  return choose_kernel(spec, KernelRequest{std::string(backend_name), "auto"}).row->make_kernel(spec, backend);
}

// Calls visit(stream, stream view) for the streams of k and then of v.
template <class Visit>
void for_streams(const Job& job, const CompressedRows& k, const CompressedRows& v, const Visit& visit) {
  const auto of = [&](const RowFormat& format, const RowShape& shape, const CompressedRows& rows) {
    std::size_t at = 0;
    for (const FormatStream& stream : format_streams(format, shape)) visit(stream, rows.streams[at++]);
  };
  of(job.format.k, k_shape(job.spec), k);
  of(job.format.v, v_shape(job.spec), v);
}

bool is_dense(const FormatStream& stream, Dtype dtype, const StreamView& view) {
  const std::int64_t bytes = stream.token_bytes(dtype);
  return view.token_stride == bytes && view.head_stride == bytes / stream.heads;
}

}  // namespace

bool has_dense_streams(const RowFormat& format, const RowShape& shape, const CompressedRows& rows) {
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(format, shape)) {
    if (!is_dense(stream, shape.dtype, rows.streams[at++])) return false;
  }
  return true;
}

StreamRows dense_stream_rows(const Job& job, const CompressedRows& k, const CompressedRows& v, std::int64_t count,
                             StreamRows staged, Backend& backend, Stream stream) {
  std::size_t at = 0;
  for_streams(job, k, v, [&](const FormatStream& of, const StreamView& view) {
    std::byte*& rows = staged[at++];
    if (is_dense(of, job.spec.dtype, view)) {
      rows = view.data;
      return;
    }
    const std::int64_t bytes = of.token_bytes(job.spec.dtype);
    const std::int64_t head_bytes = bytes / of.heads;
    for (std::int64_t head = 0; head < of.heads; ++head) {
      backend.copy_rows(rows + head * head_bytes, bytes, view.at(0, head), view.token_stride, head_bytes, count,
                        stream);
    }
  });
  return staged;
}

LowRankGemms make_low_rank_gemms(const Job& job, std::string_view backend_name, Backend& backend) {
  return {make_gemms(job.format.k, k_shape(job.spec), backend_name, backend),
          make_gemms(job.format.v, v_shape(job.spec), backend_name, backend)};
}

std::size_t LowRankGemms::scratch_bytes(const Job& job) const {
  return (k ? k->scratch_bytes(job.spec.kv_heads) : 0) + (v ? v->scratch_bytes(job.spec.kv_heads) : 0);
}

void LowRankGemms::reserve(const Job& job) {
  if (k) k->reserve(job.spec.kv_heads);
  if (v) v->reserve(job.spec.kv_heads);
}

void CompressedRingStep::decompress(const ArrivedBlock& block, const RowFormat& format, const RowShape& shape,
                                    const Source& source, BatchedGemmKernel* gemms, const MutableTensorView& plain,
                                    InvalidElementCell* invalid, Stream stream, const Progress& progress) {
  const DecompressedBlock& decompressed = tools_.blocks[static_cast<std::size_t>(block.index)];
  for (const std::int32_t from : {kOwnShard, kBlockBuffer}) {
    const std::vector<CompressedRun>& runs = decompressed.runs[static_cast<std::size_t>(from)];
    if (runs.empty()) continue;
    const CompressedRows& rows =
        from == kOwnShard ? source.own : source.buffers[static_cast<std::size_t>(block.index % 2)];
    if (format.is_plain() || format.rank > 0) {
      for (const CompressedRun& run : joined(runs)) {
        const MutableTensorView to = rows_of(plain, run.to, run.rows);
        if (format.is_plain()) {
          copy_tensor(tools_.backend, to, elements(rows.streams[0], shape, run.row, run.rows), stream);
        } else {
          expand_factors(*gemms, format, shape, rows, run.row, to, stream, progress);
        }
      }
    }
    if (format.is_plain() || format.encoding == RowEncoding::kLowRank) continue;
    tools_.backend.decompress({format, shape, rows, runs, plain, invalid}, stream);
  }
}

void CompressedRingStep::compute(const ArrivedBlock& block, Stream stream, const Progress& progress) {
  const Job& job = tools_.job;
  const auto index = static_cast<std::size_t>(block.index);
  const DecompressedBlock& decompressed = tools_.blocks[index];
  const auto dense = [&](std::byte* data, const RowShape& shape) {
    return dense_view(static_cast<void*>(data), shape.dtype, decompressed.rows, shape.heads, shape.dim);
  };
  const RowShape of_k = k_shape(job.spec);
  const RowShape of_v = v_shape(job.spec);
  const MutableTensorView keys = dense(memory_.keys, of_k);
  const MutableTensorView values = dense(memory_.values, of_v);
  decompress(block, job.format.k, of_k, memory_.k, tools_.gemms.k.get(), keys, tools_.invalid_elements.at(2 * index),
             stream, progress);
  decompress(block, job.format.v, of_v, memory_.v, tools_.gemms.v.get(), values,
             tools_.invalid_elements.at(2 * index + 1), stream, progress);
  const KeySource source{keys, values};
  AttentionTask task =
      block_task(tools_.plan, block, decompressed.tiles, {&source, 1}, memory_.output, memory_.exports.has_value());
  task.q = memory_.q;
  task.state = memory_.state;
  task.prepared = tools_.prepared[index];
  tools_.attention.attend(task, stream, progress);
}

bool CompressedRingStep::finish(Stream stream, const Progress&) {
  if (!memory_.exports) return false;
  tools_.attention.export_state(memory_.state, memory_.q.tokens, *memory_.exports, stream);
  return true;
}

}  // namespace ringattn
