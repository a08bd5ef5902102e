// SPDX-License-Identifier: Apache-2.0
#include "ops/compression/compress_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <new>
#include <span>
#include <utility>

#include "base/error.hpp"
#include "io/safetensors_writer.hpp"
#include "kernels/quant/compression_methods.hpp"
#include "kernels/quant/eviction.hpp"
#include "ops/attention_jobs/compressed_tensors.hpp"
#include "ops/compression/cache_rows.hpp"
#include "ops/compression/compress_common.hpp"
#include "ops/compression/evict_cache.hpp"
#include "ops/decode/cache_tensors.hpp"
#include "ops/mla/mla_tensors.hpp"
#include "ops/ssm/ssm_tensors.hpp"

namespace ringattn {

namespace {

// The tensors that a tensor in such a format consists of.
void plan_parts(const std::string& name, const RowFormat& format, const RowShape& shape, std::int64_t tokens,
                std::int64_t sequences, std::vector<OutputTensor>& planned) {
  const auto plan = [&](std::string_view part, StoredType type, std::vector<std::int64_t> extents) {
    planned.push_back({fmt::format("{}_{}", name, part), file_dtype(type, shape.dtype), std::move(extents)});
  };
  for (const FormatStream& stream : format_streams(format, shape)) {
    plan(stream.name, stream.type, {tokens, stream.heads, stream.width});
  }
  for (const FormatTable& table : format_tables(format, shape, sequences)) plan(table.name, table.type, table.shape);
}

void write_parts(const std::string& name, const CompressedTensor& tensor, SafetensorsWriter& writer) {
  const auto sequences = static_cast<std::int64_t>(tensor.lengths.size());
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(tensor.format, tensor.shape)) {
    writer.write_bytes(fmt::format("{}_{}", name, stream.name), tensor.streams[at++]);
  }
  at = 0;
  for (const FormatTable& table : format_tables(tensor.format, tensor.shape, sequences)) {
    writer.write_bytes(fmt::format("{}_{}", name, table.name), tensor.tables[at++]);
  }
}

// Writes the kept lengths: for packed sequences, to cu_seqlens_k.
void set_row_lengths(CacheRows& cache) {
  if (!cache.has("cu_seqlens_q") && !cache.has("cu_seqlens_k")) {
    if (!cache.lengths.empty()) cache.grid.length = cache.lengths.front();
    return;
  }
  std::vector<std::int64_t> cu{0};
  for (const std::int64_t length : cache.lengths) cu.push_back(cu.back() + length);
  const auto entries = static_cast<std::int64_t>(cu.size());
  replace_tensor(cache.others, whole_tensor("cu_seqlens_k", FileDtype::kI64, {entries}, cu));
  cache.grid.length = cache.tokens();
}

// The largest number of bytes of host memory in use: an eviction holds both tensors, while compression alone holds one
// at a time.
double needed_bytes(const CompressJob& job, const CacheRows& cache, const CacheFormat& format, double ratio) {
  const auto sequences = static_cast<std::int64_t>(cache.lengths.size());
  const auto compression = [&](std::int64_t tokens) {
    return std::max(compression_bytes(format.k, cache.k, tokens, sequences, job.threads),
                    compression_bytes(format.v, cache.v, tokens, sequences, job.threads));
  };
  if (!job.method.eviction) return compression(cache.tokens());
  double needed = eviction_bytes(*job.method.eviction, ratio, cache);
  if (job.method.format) {
    std::int64_t kept = 0;
    for (const std::int64_t length : cache.lengths) kept += kept_tokens(length, ratio);
    needed =
        std::max(needed, compression(kept) + static_cast<double>(kept) * static_cast<double>(token_bytes({}, cache.v)));
  }
  return needed;
}

CompressResult compress_rows(const CompressJob& job) {
  CacheRows cache = find_cache_rows(job.input, job.threads);
  const double share = job.ratio.value_or(kDefaultEviction);
  if (job.method.eviction && cache.tokens() > 0) check_queries(*job.method.eviction, cache.has("q"));
  CacheFormat format;
  if (job.method.format) {
    const auto ratio = job.method.eviction ? std::nullopt : job.ratio;
    format = choose_format(*job.method.format, ratio, cache.k, cache.v);
  }
  check_host_memory(cache.what, needed_bytes(job, cache, format, share));
  check_compared_job(job, cache.has("q"));
  cache.check_finite(job.compared);
  if (job.method.eviction) check_eviction(*job.method.eviction, job.input, job.numerics, cache);

  CompressResult result;
  result.unread = cache.unread;
  result.tokens = cache.tokens();
  const auto before_k = static_cast<std::int64_t>(bytes_of(cache.k, cache.tokens()));
  const auto before_v = static_cast<std::int64_t>(bytes_of(cache.v, cache.tokens()));
  FileMetadata metadata;
  if (job.method.format) metadata = {{"k_format", describe(format.k)}, {"v_format", describe(format.v)}};
  if (job.method.eviction) {
    cache.k_rows = cache.read(SyntheticTensor::kK);
    cache.v_rows = cache.read(SyntheticTensor::kV);
    result.evict_seconds =
        seconds_of([&] { evict(*job.method.eviction, share, job.input, job.numerics, job.threads, cache); });
    set_row_lengths(cache);
    result.position_bytes = position_bytes(cache);
    metadata.emplace_back("evicted_by", describe(*job.method.eviction));
  }
  result.kept = cache.tokens();
  std::vector<OutputTensor> planned;
  if (job.method.format) {
    const std::unique_ptr<Backend> gpu = quantizing_gpu();
    if (gpu != nullptr) result.quantized_on = gpu->identity();
    const auto sequences = static_cast<std::int64_t>(cache.lengths.size());
    plan_parts("k", format.k, cache.k, cache.tokens(), sequences, planned);
    plan_parts("v", format.v, cache.v, cache.tokens(), sequences, planned);
    const auto writer = create_file(job, cache.others, std::move(planned), metadata);
    const auto compress = [&](const std::string& name, SyntheticTensor tensor, const RowFormat& of,
                              const RowShape& shape, std::vector<std::byte> rows) {
      if (!job.method.eviction) rows = cache.read(tensor);
      const CompressedTensorResult part = compress_part(name, of, shape, rows, cache.lengths, job, gpu.get());
      write_parts(name, part.tensor, *writer);
      return part.figures;
    };
    result.k = compress("k", SyntheticTensor::kK, format.k, cache.k, std::move(cache.k_rows));
    result.v = compress("v", SyntheticTensor::kV, format.v, cache.v, std::move(cache.v_rows));
    finish_file(*writer);
  } else {
    result.k.bytes_after = static_cast<std::int64_t>(cache.k_rows.size());
    result.v.bytes_after = static_cast<std::int64_t>(cache.v_rows.size());
    RowGrid v_grid = cache.grid;
    v_grid.dim = cache.v.dim;
    planned.push_back({"k", file_dtype(cache.k.dtype), cache.grid.shape()});
    planned.push_back({"v", file_dtype(cache.v.dtype), v_grid.shape()});
    const auto writer = create_file(job, cache.others, std::move(planned), metadata);
    const PackedRun all{0, cache.tokens()};
    writer->write_rows("k", cache.grid, {&all, 1}, view_of(cache.k_rows, cache.k, cache.tokens()));
    writer->write_rows("v", v_grid, {&all, 1}, view_of(cache.v_rows, cache.v, cache.tokens()));
    finish_file(*writer);
  }
  result.k.bytes_before = before_k;
  result.v.bytes_before = before_v;
  return result;
}

// Refuses files of SSM layers and convolutions, which have no keys.
void refuse_ssm(const SafetensorsFile& file, const InputNames& names) {
  if (names.k || file.contains("k") || holds_compressed(file) || !holds_ssm(file, names)) return;
  fail(ErrorCode::kFile, fmt::format("{} holds an SSM or a convolution", file.path()),
       "it has no keys and values to compress", "Give a file with k and v, with pages of them, or with latents.");
}

}  // namespace

CompressResult compress_file(const CompressJob& job) {
  check_output_path(job.output, job.replace);
  try {
    if (const FileInput* const input = std::get_if<FileInput>(&job.input)) {
      const SafetensorsFile file(input->path);
      if (holds_latents(file, input->names)) return compress_latents(file, *input, job);
      if (holds_cache(file, input->names)) return compress_pages(file, *input, job);
      refuse_ssm(file, input->names);
    }
    return compress_rows(job);
  } catch (const std::bad_alloc&) {  // a limit that usable_bytes() does not see
    fail(ErrorCode::kMemory, "can't allocate memory for compression", "the host has no more to give",
         how_to_compress_less());
  }
}

}  // namespace ringattn
