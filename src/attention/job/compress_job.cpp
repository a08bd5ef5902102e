// SPDX-License-Identifier: Apache-2.0
#include "attention/job/compress_job.hpp"

#include <fmt/format.h>

#include <memory>
#include <span>
#include <utility>

#include "attention/files/cache_tensors.hpp"
#include "attention/files/compressed_tensors.hpp"
#include "attention/files/latent_tensors.hpp"
#include "attention/files/safetensors_writer.hpp"
#include "attention/job/cache_rows.hpp"
#include "attention/job/compress_part.hpp"
#include "attention/job/evict_cache.hpp"
#include "base/error.hpp"
#include "kernels/compression_methods.hpp"

namespace ringattn {

namespace {

constexpr double kUsualEviction = 0.5;  // of the tokens

void add(const std::string& name, const CompressedTensor& tensor, std::vector<WholeTensor>& tensors) {
  const auto add_one = [&](std::string_view part, CodeType type, std::vector<std::int64_t> shape,
                           const std::vector<std::byte>& bytes) {
    tensors.push_back(
        {{fmt::format("{}_{}", name, part), file_dtype(type, tensor.shape.dtype), std::move(shape)}, bytes});
  };
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(tensor.format, tensor.shape)) {
    add_one(stream.name, stream.type, {tensor.tokens(), stream.heads, stream.width}, tensor.streams[at++]);
  }
  at = 0;
  const auto sequences = static_cast<std::int64_t>(tensor.lengths.size());
  for (const FormatTable& table : format_tables(tensor.format, tensor.shape, sequences)) {
    add_one(table.name, table.type, table.shape, tensor.tables[at++]);
  }
}

std::int64_t position_bytes(const CacheRows& cache) {
  std::int64_t bytes = 0;
  for (const WholeTensor& whole : cache.others) {
    const bool counts = whole.tensor.name == "k_positions" || whole.tensor.name == "k_lengths";
    bytes += counts ? static_cast<std::int64_t>(whole.bytes.size()) : 0;
  }
  return bytes;
}

}  // namespace

CompressResult compress_file(const CompressJob& job) {
  check_output_path(job.output, job.replace);
  if (const FileInput* const input = std::get_if<FileInput>(&job.input)) {
    const SafetensorsFile file(input->path);
    if (holds_latents(file, input->names)) return compress_latents(file, *input, job);
    if (holds_cache(file, input->names)) return compress_pages(file, *input, job);
  }
  CacheFormat format;
  CacheRows cache = read_cache(job.input, job.threads, [&](const CacheRows& shapes, bool queries) {
    if (job.method.eviction && shapes.tokens() > 0) check_queries(*job.method.eviction, queries);
    if (job.method.format == nullptr) return;
    const auto ratio = job.method.eviction ? std::nullopt : job.ratio;
    format = choose_format(*job.method.format, ratio, shapes.k, shapes.v);
  });
  CompressResult result;
  result.tokens = cache.tokens();
  const auto before_k = static_cast<std::int64_t>(cache.k_rows.size());
  const auto before_v = static_cast<std::int64_t>(cache.v_rows.size());
  if (job.method.eviction) {
    result.evict_seconds = seconds_of([&] {
      evict(*job.method.eviction, job.ratio.value_or(kUsualEviction), job.input, job.numerics, job.threads, cache);
    });
    result.position_bytes = position_bytes(cache);
  }
  result.kept = cache.tokens();
  std::vector<WholeTensor> tensors = std::move(cache.others);
  FileMetadata metadata;
  if (job.method.format != nullptr) {
    const std::unique_ptr<Backend> gpu = coding_gpu();
    if (gpu != nullptr && format.k.rank + format.v.rank == 0) result.coded_on = gpu->identity();
    const CompressedPart k = compress_part("k", format.k, cache.k, cache.k_rows, cache.lengths, job, gpu.get());
    const CompressedPart v = compress_part("v", format.v, cache.v, cache.v_rows, cache.lengths, job, gpu.get());
    result.k = k.figures;
    result.v = v.figures;
    add("k", k.tensor, tensors);
    add("v", v.tensor, tensors);
    metadata = {{"k_format", describe(format.k)}, {"v_format", describe(format.v)}};
  } else {
    result.k.bytes_after = static_cast<std::int64_t>(cache.k_rows.size());
    result.v.bytes_after = static_cast<std::int64_t>(cache.v_rows.size());
  }
  result.k.bytes_before = before_k;
  result.v.bytes_before = before_v;
  if (job.method.eviction) metadata.emplace_back("evicted_by", describe(*job.method.eviction));

  if (job.method.format != nullptr) {
    write_file(job, tensors, metadata);
    return result;
  }
  std::vector<OutputTensor> planned;
  for (const WholeTensor& whole : tensors) planned.push_back(whole.tensor);
  RowGrid v_grid = cache.grid;
  v_grid.dim = cache.v.dim;
  planned.push_back({"k", file_dtype(cache.k.dtype), cache.grid.shape()});
  planned.push_back({"v", file_dtype(cache.v.dtype), v_grid.shape()});
  const auto writer = SafetensorsWriter::create(plan_safetensors(planned, metadata), job.output, job.replace);
  for (const WholeTensor& whole : tensors) writer->write_bytes(whole.tensor.name, whole.bytes);
  const PackedRun all{0, cache.tokens()};
  writer->write_rows("k", cache.grid, {&all, 1}, view_of(cache.k_rows, cache.k, cache.tokens()));
  writer->write_rows("v", v_grid, {&all, 1}, view_of(cache.v_rows, cache.v, cache.tokens()));
  writer->sync();
  writer->commit();
  return result;
}

}  // namespace ringattn
