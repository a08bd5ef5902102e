// SPDX-License-Identifier: Apache-2.0
#include "attention/job/compress_part.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/pulse.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

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

std::unique_ptr<Backend> coding_gpu() {
  for (const OpKernel& kernel : all_kernels()) {
    if (kernel.row->backend == "cuda" && kernel.row->unavailable().empty()) return kernel.row->make_backend({1, 0});
  }
  return nullptr;
}

CompressedPart compress_part(std::string_view name, const RowFormat& format, const RowShape& shape,
                             const std::vector<std::byte>& rows, std::span<const std::int64_t> lengths,
                             const CompressJob& job, Backend* gpu) {
  beat();
  const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const TensorView plain =
      dense_view(static_cast<const void*>(rows.data()), shape.dtype, tokens, shape.heads, shape.dim);
  CompressedPart compressed;
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
  figures.error = relative_error(rows, back, shape.dtype, job.threads);
  return compressed;
}

void write_file(const CompressJob& job, std::span<const WholeTensor> tensors, const FileMetadata& metadata) {
  std::vector<OutputTensor> planned;
  for (const WholeTensor& whole : tensors) planned.push_back(whole.tensor);
  const auto writer = SafetensorsWriter::create(plan_safetensors(planned, metadata), job.output, job.replace);
  for (const WholeTensor& whole : tensors) writer->write_bytes(whole.tensor.name, whole.bytes);
  writer->sync();
  writer->commit();
}

}  // namespace ringattn
