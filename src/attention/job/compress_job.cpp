// SPDX-License-Identifier: Apache-2.0
#include "attention/job/compress_job.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <utility>

#include "attention/check/accuracy.hpp"
#include "attention/files/compressed_tensors.hpp"
#include "attention/files/safetensors_writer.hpp"
#include "attention/files/tensor_checks.hpp"
#include "base/error.hpp"
#include "base/pulse.hpp"
#include "kernels/compression_methods.hpp"
#include "kernels/oracle.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

namespace {

// A tensor that is written as it is.
struct Copied {
  OutputTensor tensor;
  std::vector<std::byte> bytes;
};

// Keys and values in rows, sequence by sequence, and what stands beside them.
struct Cache {
  RowShape k, v;
  std::vector<std::int64_t> lengths;
  std::vector<std::byte> k_rows, v_rows;
  std::vector<Copied> others;

  std::int64_t tokens() const {
    std::int64_t tokens = 0;
    for (const std::int64_t length : lengths) tokens += length;
    return tokens;
  }
};

std::size_t bytes_of(const RowShape& shape, std::int64_t tokens) {
  return static_cast<std::size_t>(tokens * shape.heads * shape.dim) * size_of(shape.dtype);
}

MutableTensorView view_of(std::vector<std::byte>& rows, const RowShape& shape, std::int64_t tokens) {
  return dense_view(static_cast<void*>(rows.data()), shape.dtype, tokens, shape.heads, shape.dim);
}

std::vector<std::int64_t> differences(const std::vector<std::int64_t>& cu) {
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 1; i < cu.size(); ++i) lengths.push_back(cu[i] - cu[i - 1]);
  return lengths;
}

// Of a file that may have no queries.
std::vector<std::int64_t> key_lengths(const SafetensorsFile& file, const InputNames& names, const RowGrid& k) {
  auto cu = find_optional(file, names.cu_seqlens_k, "cu_seqlens_k");
  if (!cu) cu = find_optional(file, names.cu_seqlens_q, "cu_seqlens_q");
  if (!cu) return std::vector<std::int64_t>(static_cast<std::size_t>(k.batch), k.length);
  check_count(*cu, entries(*cu) - 1);
  return differences(read_cumulative(*cu, k, "k"));
}

void refuse_kind(const SafetensorsFile& file, std::string_view what) {
  fail(ErrorCode::kFile, fmt::format("{} holds {}", file.path(), what), "keys and values in rows are compressed",
       "Give a file with k and v.");
}

Cache read_cache(const FileInput& input, int) {
  const SafetensorsFile file(input.path);
  if (holds_compressed(file)) refuse_kind(file, "a compressed cache");
  if (!input.names.k && !file.contains("k")) {
    if (file.contains("k_pages")) refuse_kind(file, "pages");
    if (file.contains("latent") || file.contains("latent_fp8")) refuse_kind(file, "latents");
  }
  const std::string k_name = input.names.k.value_or("k");
  const std::string v_name = input.names.v.value_or("v");
  const TensorSource k = file.tensor(k_name);
  const TensorSource v = file.tensor(v_name);
  const RowGrid k_grid = row_grid(k, input.order);
  const RowGrid v_grid = row_grid(v, input.order);
  Cache cache;
  cache.k = {row_dtype(k), k_grid.heads, k_grid.dim};
  cache.v = {row_dtype(v), v_grid.heads, v_grid.dim};
  require(v_grid.heads == k_grid.heads && v_grid.tokens() == k_grid.tokens() && cache.v.dtype == cache.k.dtype, v,
          fmt::format("k is {} [{} tokens, {} heads]", file_dtype_name(k.info->dtype), k_grid.tokens(), k_grid.heads),
          "k and v are of the same tokens and K/V heads.");
  require(cache.k.heads > 0 && cache.k.dim > 0 && cache.v.dim > 0, k, "it needs at least one head and one dim",
          {setting("order"), " says which axis is which."});
  cache.lengths = key_lengths(file, input.names, k_grid);
  const PackedRun all{0, cache.tokens()};
  cache.k_rows.resize(bytes_of(cache.k, cache.tokens()));
  cache.v_rows.resize(bytes_of(cache.v, cache.tokens()));
  read_rows(k, k_grid, {&all, 1}, view_of(cache.k_rows, cache.k, cache.tokens()));
  read_rows(v, v_grid, {&all, 1}, view_of(cache.v_rows, cache.v, cache.tokens()));
  // What a job over the cache needs, under the names that it has here.
  const std::pair<const std::optional<std::string>*, std::string_view> others[] = {
      {&input.names.q, "q"},
      {&input.names.cu_seqlens_q, "cu_seqlens_q"},
      {&input.names.cu_seqlens_k, "cu_seqlens_k"},
      {&input.names.q_offset, "q_offset"},
      {&input.names.sinks, "sinks"}};
  for (const auto& [name, role] : others) {
    const auto found = find_optional(file, *name, role);
    if (!found) continue;
    Copied& copied = cache.others.emplace_back();
    copied.tensor = {std::string(role), found->info->dtype, found->info->shape};
    copied.bytes.resize(static_cast<std::size_t>(found->info->bytes()));
    found->shard->read(*found->info, 0, copied.bytes);
  }
  return cache;
}

Cache read_cache(const SyntheticInput& input, int threads) {
  const JobInput job(input, {});
  if (job.op() != Op::kAttention) {
    fail(ErrorCode::kUsage, {setting("op", op_name(job.op()))}, "keys and values in rows are compressed",
         {"Leave it out: ", setting("op", "attention"), "."});
  }
  const FoldSpec& spec = job.job().spec;
  Cache cache;
  cache.k = {spec.dtype, spec.kv_heads, spec.head_dim};
  cache.v = {spec.dtype, spec.kv_heads, spec.head_dim_v};
  cache.lengths = job.job().batch.k_lengths();
  const auto read = [&](SyntheticTensor tensor, const RowShape& shape, std::int64_t tokens,
                        std::vector<std::byte>& rows) {
    const PackedRun all{0, tokens};
    rows.resize(bytes_of(shape, tokens));
    job.read(tensor, {&all, 1}, view_of(rows, shape, tokens), threads);
  };
  read(SyntheticTensor::kK, cache.k, cache.tokens(), cache.k_rows);
  read(SyntheticTensor::kV, cache.v, cache.tokens(), cache.v_rows);
  Copied& q = cache.others.emplace_back();
  const std::int64_t q_tokens = job.job().batch.q_tokens();
  read(SyntheticTensor::kQ, {spec.dtype, spec.heads, spec.head_dim}, q_tokens, q.bytes);
  q.tensor = {"q", file_dtype(spec.dtype), {q_tokens, spec.heads, spec.head_dim}};
  if (input.batch != 1) {
    q.tensor.shape = {input.batch, input.batch > 0 ? q_tokens / input.batch : 0, spec.heads, spec.head_dim};
  }
  return cache;
}

// Sums of pieces of a fixed size, and then theirs: the same for any number of threads.
double relative_error(const std::vector<std::byte>& before, const std::vector<std::byte>& after, Dtype dtype,
                      int threads) {
  constexpr std::int64_t kPiece = 1 << 16;  // elements
  const std::size_t element = size_of(dtype);
  const auto count = static_cast<std::int64_t>(before.size() / element);
  const std::int64_t pieces = (count + kPiece - 1) / kPiece;
  std::vector<double> errors(static_cast<std::size_t>(pieces)), squares(static_cast<std::size_t>(pieces));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    double error = 0.0, all = 0.0;
    for (std::int64_t i = piece * kPiece; i < std::min(count, (piece + 1) * kPiece); ++i) {
      const std::size_t at = static_cast<std::size_t>(i) * element;
      const double x = static_cast<double>(load_element(before.data() + at, dtype));
      const double y = static_cast<double>(load_element(after.data() + at, dtype));
      error += (y - x) * (y - x);
      all += x * x;
    }
    errors[static_cast<std::size_t>(piece)] = error;
    squares[static_cast<std::size_t>(piece)] = all;
  }
  static_cast<void>(threads);
  const double all = std::accumulate(squares.begin(), squares.end(), 0.0);
  return all > 0.0 ? std::sqrt(std::accumulate(errors.begin(), errors.end(), 0.0) / all) : 0.0;
}

// A GPU's, where there is one.
std::unique_ptr<Backend> gpu_backend() {
  for (const OpKernel& kernel : all_kernels()) {
    if (kernel.row->backend == "cuda" && kernel.row->unavailable().empty()) return kernel.row->make_backend({1, 0});
  }
  return nullptr;
}

struct Compressed {
  CompressedTensor tensor;
  CompressedFigures figures;
};

Compressed compress(std::string_view name, const RowFormat& format, const RowShape& shape,
                    const std::vector<std::byte>& rows, const Cache& cache, const CompressJob& job, Backend* gpu) {
  beat();
  const TensorView plain =
      dense_view(static_cast<const void*>(rows.data()), shape.dtype, cache.tokens(), shape.heads, shape.dim);
  Compressed compressed;
  compressed.tensor =
      compress_tensor(name, format, plain, cache.lengths, {job.seed, job.threads, gpu}, ErrorCode::kFile);
  CompressedFigures& figures = compressed.figures;
  figures.format = format;
  figures.bytes_before = static_cast<std::int64_t>(rows.size());
  figures.bytes_after = static_cast<std::int64_t>(compressed.tensor.bytes());
  figures.table_bytes = table_bytes(format, shape, static_cast<std::int64_t>(cache.lengths.size()));
  figures.energy_kept = compressed.tensor.energy_kept;
  figures.error =
      relative_error(rows, decompress_tensor(compressed.tensor, job.threads, gpu), shape.dtype, job.threads);
  return compressed;
}

void add(const std::string& name, const CompressedTensor& tensor, std::vector<Copied>& tensors) {
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

}  // namespace

CompressResult compress_file(const CompressJob& job) {
  const CompressionMethod& method = compression_method(job.method);
  check_output_path(job.output, job.replace);
  const Cache cache = std::visit([&](const auto& input) { return read_cache(input, job.threads); }, job.input);
  CompressResult result;
  result.format = choose_format(method, job.ratio, cache.k, cache.v);
  result.tokens = cache.tokens();
  const std::unique_ptr<Backend> gpu = gpu_backend();
  if (gpu != nullptr && result.format.k.rank + result.format.v.rank == 0) result.coded_on = gpu->identity();
  const Compressed k = compress("k", result.format.k, cache.k, cache.k_rows, cache, job, gpu.get());
  const Compressed v = compress("v", result.format.v, cache.v, cache.v_rows, cache, job, gpu.get());
  result.k = k.figures;
  result.v = v.figures;

  std::vector<Copied> tensors = cache.others;
  add("k", k.tensor, tensors);
  add("v", v.tensor, tensors);
  std::vector<OutputTensor> planned;
  for (const Copied& copied : tensors) planned.push_back(copied.tensor);
  const FileMetadata metadata{{"k_format", describe(result.format.k)}, {"v_format", describe(result.format.v)}};
  const SafetensorsPlan plan = plan_safetensors(planned, metadata);
  const auto writer = SafetensorsWriter::create(plan, job.output, job.replace);
  for (const Copied& copied : tensors) writer->write_bytes(copied.tensor.name, copied.bytes);
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
  const std::vector<std::int64_t> cu_k = job.batch.cu_k();
  ChangeOfO change;
  for (const RowSample& sample : sample_rows(job, count, kSeed)) {
    const auto s =
        static_cast<std::size_t>(std::upper_bound(cu_q.begin(), cu_q.end(), sample.token) - cu_q.begin() - 1);
    of_sequence[s].push_back(sample);
    ++change.rows;
  }
  double error = 0.0, all = 0.0;
  for (const auto& [s, samples] : of_sequence) {
    const Sequence shape = job.batch.sequences[s];
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
      const std::int64_t position = shape.q_offset + sample.token - cu_q[s];
      const ListedKeys listed = listed_keys(job.lists.get(), spec.heads, s, sample.head, position);
      for (auto& of_cache : rows) of_cache.emplace_back(spec, sample.head, position, shape.k_len, exact, listed);
    }
    const JobInput* const inputs[] = {&before, &after};
    for (int i = 0; i < 2; ++i) {
      for (std::int64_t first = 0; first < shape.k_len; first += kPiece) {
        beat();
        const std::int64_t tokens = std::min(kPiece, shape.k_len - first);
        const PackedRun run{cu_k[s] + first, cu_k[s] + first + tokens};
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
      if (std::isfinite(lse)) change.greatest_lse = std::max(change.greatest_lse, std::abs(changed_lse - lse));
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
