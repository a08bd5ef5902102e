// SPDX-License-Identifier: Apache-2.0
#include "ops/compression/compress_common.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/host.hpp"
#include "base/rank_liveness.hpp"
#include "kernels/common/registry.hpp"
#include "ops/compression/finite_tensor.hpp"

namespace ringattn {

namespace {

double table_bytes_of(const RowFormat& format, const RowShape& shape, std::int64_t sequences) {
  double bytes = 0.0;
  for (const FormatTable& table : format_tables(format, shape, sequences)) {
    auto of_table = static_cast<double>(size_of(table.type, shape.dtype));
    for (const std::int64_t extent : table.shape) of_table *= static_cast<double>(extent);
    bytes += of_table;
  }
  return bytes;
}

}  // namespace

double compression_bytes(const RowFormat& format, const RowShape& shape, std::int64_t tokens, std::int64_t sequences,
                         int threads) {
  const double rows = static_cast<double>(tokens) * static_cast<double>(token_bytes({}, shape));
  const double codes = static_cast<double>(tokens) * static_cast<double>(token_bytes(format, shape));
  // Each head, or group of heads, has two fp64 Gram matrices of its channels: one being summed and one being read. Each
  // thread has four more while it factorizes the matrix of a head.
  double basis = 0.0;
  if (format.rank > 0) {
    const RowShape ranked = low_rank_shape(format, shape);
    const auto solved = static_cast<double>(std::min<std::int64_t>(ranked.heads, threads));
    const double matrices = 2.0 * static_cast<double>(ranked.heads) + 4.0 * solved;
    basis = matrices * sizeof(double) * static_cast<double>(ranked.dim) * static_cast<double>(ranked.dim);
  }
  const double runs = 2.0 * sizeof(CompressedRun) * static_cast<double>(sequences);
  return 2.0 * rows + codes + table_bytes_of(format, shape, sequences) + basis + runs;
}

std::string_view how_to_compress_less() { return "Compress fewer tokens, or on a machine with more memory."; }

void check_host_memory(std::string_view what, double bytes) {
  const std::size_t usable = usable_bytes();
  if (bytes <= static_cast<double>(usable)) return;
  fail(ErrorCode::kMemory, fmt::format("compressing {} needs {:.0f} bytes of host memory", what, bytes),
       fmt::format("this process may use {}", usable), std::string(how_to_compress_less()));
}

// Sums pieces of a fixed size, and then these sums, so that the result does not depend on the number of threads.
void RelativeError::add(std::span<const std::byte> before, std::span<const std::byte> after, Dtype dtype, int threads) {
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
  errors_ = std::accumulate(errors.begin(), errors.end(), errors_);
  squares_ = std::accumulate(squares.begin(), squares.end(), squares_);
}

double RelativeError::value() const { return squares_ > 0.0 ? std::sqrt(errors_ / squares_) : 0.0; }

void check_compared_job(const CompressJob& job, bool queries) {
  if (job.compared && queries) static_cast<void>(JobInput(job.input, job.numerics));
}

std::unique_ptr<Backend> quantizing_gpu() {
  for (const OpKernel& kernel : all_kernels()) {
    if (kernel.row->backend == "cuda" && kernel.row->unavailable().empty()) return kernel.row->make_backend({1, 0});
  }
  return nullptr;
}

CompressedTensorResult compress_part(std::string_view name, const RowFormat& format, const RowShape& shape,
                                     const std::vector<std::byte>& rows, std::span<const std::int64_t> lengths,
                                     const CompressJob& job, Backend* gpu) {
  heartbeat();
  const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const TensorView plain =
      dense_view(static_cast<const void*>(rows.data()), shape.dtype, tokens, shape.heads, shape.dim);
  CompressedTensorResult compressed;
  CompressedFigures& figures = compressed.figures;
  figures.compress_seconds = seconds_of([&] {
    compressed.tensor = compress_tensor(name, format, plain, lengths, {job.seed, job.threads, gpu}, ErrorCode::kFile);
  });
  figures.format = format;
  figures.bytes_after = static_cast<std::int64_t>(compressed.tensor.bytes());
  figures.table_bytes = table_bytes(format, shape, static_cast<std::int64_t>(lengths.size()));
  figures.energy_kept = compressed.tensor.energy_kept;
  std::vector<std::byte> back;
  figures.decompress_seconds = seconds_of([&] { back = decompress_tensor(compressed.tensor, job.threads, gpu); });
  RelativeError error;
  error.add(rows, back, shape.dtype, job.threads);
  figures.error = error.value();
  return compressed;
}

std::unique_ptr<SafetensorsWriter> create_file(const CompressJob& job, std::span<const WholeTensor> tensors,
                                               std::vector<OutputTensor> others, const FileMetadata& metadata) {
  for (const WholeTensor& whole : tensors) others.push_back(whole.tensor);
  auto writer = SafetensorsWriter::create(plan_safetensors(std::move(others), metadata), job.output, job.replace);
  std::vector<std::byte> part;
  for (const auto& [tensor, bytes, read] : tensors) {
    if (!read) {
      writer->write_bytes(tensor.name, bytes);
      continue;
    }
    std::int64_t all = bits_of(tensor.dtype), row = all;
    for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis) {
      all *= tensor.shape[axis];
      if (axis + 2 >= tensor.shape.size()) row *= tensor.shape[axis];
    }
    all /= 8;
    row = std::max<std::int64_t>(1, row / 8);
    const std::int64_t most = std::max<std::int64_t>(1, kPartBytes / row) * row;
    for (std::int64_t at = 0; at < all; at += most) {
      heartbeat();
      part.resize(static_cast<std::size_t>(std::min(most, all - at)));
      read(at, part);
      writer->write_part(tensor.name, at, part);
    }
  }
  return writer;
}

void finish_file(SafetensorsWriter& writer) {
  writer.sync();
  writer.commit();
}

}  // namespace ringattn
