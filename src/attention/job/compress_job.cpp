// SPDX-License-Identifier: Apache-2.0
#include "attention/job/compress_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "attention/check/accuracy.hpp"
#include "attention/files/cache_tensors.hpp"
#include "attention/files/compressed_tensors.hpp"
#include "attention/files/safetensors_writer.hpp"
#include "attention/job/cache_rows.hpp"
#include "attention/job/compress_part.hpp"
#include "attention/job/evict_cache.hpp"
#include "base/error.hpp"
#include "base/pulse.hpp"
#include "kernels/compression_methods.hpp"
#include "kernels/oracle.hpp"

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
    if (!holds_latents(file, input->names) && holds_cache(file, input->names)) return compress_pages(file, *input, job);
  }
  CacheRows cache = read_cache(job.input, job.threads);
  CompressResult result;
  result.tokens = cache.tokens();
  const auto before_k = static_cast<std::int64_t>(cache.k_rows.size());
  const auto before_v = static_cast<std::int64_t>(cache.v_rows.size());
  if (job.method.eviction) {
    evict(*job.method.eviction, job.ratio.value_or(kUsualEviction), job.input, job.numerics, job.threads, cache);
    result.position_bytes = position_bytes(cache);
  }
  result.kept = cache.tokens();
  std::vector<WholeTensor> tensors = std::move(cache.others);
  FileMetadata metadata;
  if (job.method.format != nullptr) {
    const auto ratio = job.method.eviction ? std::nullopt : job.ratio;
    result.format = choose_format(*job.method.format, ratio, cache.k, cache.v);
    const std::unique_ptr<Backend> gpu = coding_gpu();
    if (gpu != nullptr && result.format.k.rank + result.format.v.rank == 0) result.coded_on = gpu->identity();
    const CompressedPart k = compress_part("k", result.format.k, cache.k, cache.k_rows, cache.lengths, job, gpu.get());
    const CompressedPart v = compress_part("v", result.format.v, cache.v, cache.v_rows, cache.lengths, job, gpu.get());
    result.k = k.figures;
    result.v = v.figures;
    add("k", k.tensor, tensors);
    add("v", v.tensor, tensors);
    metadata = {{"k_format", describe(result.format.k)}, {"v_format", describe(result.format.v)}};
  } else {
    result.k.bytes_after = static_cast<std::int64_t>(cache.k_rows.size());
    result.v.bytes_after = static_cast<std::int64_t>(cache.v_rows.size());
  }
  result.k.bytes_before = before_k;
  result.v.bytes_before = before_v;
  if (job.method.eviction) metadata.emplace_back("evicted_by", describe(*job.method.eviction));

  std::vector<OutputTensor> planned;
  for (const WholeTensor& whole : tensors) planned.push_back(whole.tensor);
  RowGrid v_grid = cache.grid;
  v_grid.dim = cache.v.dim;
  if (job.method.format == nullptr) {
    planned.push_back({"k", file_dtype(cache.k.dtype), cache.grid.shape()});
    planned.push_back({"v", file_dtype(cache.v.dtype), v_grid.shape()});
  }
  const SafetensorsPlan plan = plan_safetensors(planned, metadata);
  const auto writer = SafetensorsWriter::create(plan, job.output, job.replace);
  for (const WholeTensor& whole : tensors) writer->write_bytes(whole.tensor.name, whole.bytes);
  if (job.method.format == nullptr) {
    const PackedRun all{0, cache.tokens()};
    writer->write_rows("k", cache.grid, {&all, 1}, view_of(cache.k_rows, cache.k, cache.tokens()));
    writer->write_rows("v", v_grid, {&all, 1}, view_of(cache.v_rows, cache.v, cache.tokens()));
  }
  writer->sync();
  writer->commit();
  return result;
}

ChangeOfO change_of_o(const JobInput& before, const JobInput& after, std::int64_t count, int threads) {
  const Job& job = before.job();
  const FoldSpec& spec = job.spec;
  constexpr std::int64_t kPiece = 4096;  // keys that are read at a time
  constexpr std::uint64_t kSeed = 1;
  std::map<std::size_t, std::vector<RowSample>> of_sequence;
  const std::vector<std::int64_t> cu_q = job.batch.cu_q();
  const JobInput* const inputs[] = {&before, &after};
  ChangeOfO change;
  for (const RowSample& sample : sample_rows(job, count, kSeed)) {
    const auto s =
        static_cast<std::size_t>(std::upper_bound(cu_q.begin(), cu_q.end(), sample.token) - cu_q.begin() - 1);
    of_sequence[s].push_back(sample);
    ++change.rows;
  }
  double error = 0.0, all = 0.0;
  for (const auto& [s, samples] : of_sequence) {
    std::vector<OracleRow> rows[2];
    for (const RowSample& sample : samples) {
      std::vector<std::byte> q(bytes_of({spec.dtype, spec.heads, spec.head_dim}, 1));
      const PackedRun run{sample.token, sample.token + 1};
      before.read(SyntheticTensor::kQ, {&run, 1}, view_of(q, {spec.dtype, spec.heads, spec.head_dim}, 1), threads);
      std::vector<double> exact(static_cast<std::size_t>(spec.head_dim));
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const std::size_t at = static_cast<std::size_t>(sample.head) * exact.size() + i;
        exact[i] = static_cast<double>(load_element(q.data() + at * size_of(spec.dtype), spec.dtype));
      }
      for (int i = 0; i < 2; ++i) {  // whose keys may be fewer, and stand elsewhere
        const Job& of = inputs[i]->job();
        const Sequence shape = of.batch.sequences[s];
        const std::int64_t position = shape.q_offset + sample.token - cu_q[s];
        rows[i].emplace_back(of.spec, sample.head, position, shape.k_len, exact, ListedKeys{},
                             positions_of(of.positions.get(), s, sample.head / (spec.heads / spec.kv_heads)));
      }
    }
    for (int i = 0; i < 2; ++i) {
      const std::int64_t keys = inputs[i]->job().batch.sequences[s].k_len;
      const std::int64_t origin = inputs[i]->job().batch.cu_k()[s];
      for (std::int64_t first = 0; first < keys; first += kPiece) {
        beat();
        const std::int64_t tokens = std::min(kPiece, keys - first);
        const PackedRun run{origin + first, origin + first + tokens};
        const RowShape of_k{spec.dtype, spec.kv_heads, spec.head_dim};
        const RowShape of_v{spec.dtype, spec.kv_heads, spec.head_dim_v};
        std::vector<std::byte> k(bytes_of(of_k, tokens)), v(bytes_of(of_v, tokens));
        inputs[i]->read(SyntheticTensor::kK, {&run, 1}, view_of(k, of_k, tokens), threads);
        inputs[i]->read(SyntheticTensor::kV, {&run, 1}, view_of(v, of_v, tokens), threads);
        feed_rows(rows[i], first, view_of(k, of_k, tokens), view_of(v, of_v, tokens));
      }
    }
    for (std::size_t r = 0; r < samples.size(); ++r) {
      const double sink =
          spec.sinks ? static_cast<double>(before.sinks()[static_cast<std::size_t>(samples[r].head)]) : 0.0;
      std::vector<double> exact, changed;
      const double lse = rows[0][r].finish(sink, exact);
      const double changed_lse = rows[1][r].finish(sink, changed);
      if (std::isfinite(lse) && std::isfinite(changed_lse)) {
        change.greatest_lse = std::max(change.greatest_lse, std::abs(changed_lse - lse));
      }
      change.emptied += std::isfinite(lse) && !std::isfinite(changed_lse) ? 1 : 0;
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const double difference = changed[i] - exact[i];
        error += difference * difference;
        all += exact[i] * exact[i];
        change.greatest = std::max(change.greatest, std::abs(difference));
      }
    }
  }
  change.relative_error = all > 0.0 ? std::sqrt(error / all) : 0.0;
  return change;
}

}  // namespace ringattn
