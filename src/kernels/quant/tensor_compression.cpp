// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/tensor_compression.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "kernels/common/finish.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/quant/codebook.hpp"
#include "kernels/quant/low_rank.hpp"
#include "kernels/quant/low_rank_codec.hpp"
#include "kernels/quant/row_codec.hpp"
#include "kernels/quant/row_quantization.hpp"
#include "kernels/quant/staged_rows.hpp"

namespace ringattn {

namespace {

template <class Table>
std::vector<std::byte> bytes_of(const Table& table) {
  const auto bytes = std::as_bytes(std::span(table));
  return {bytes.begin(), bytes.end()};
}

// A backend with a GEMM kernel.
struct BackendGemm {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<BatchedGemmKernel> kernel;
};
BackendGemm make_products(const BatchedGemmSpec& spec, std::int64_t heads, const BackendOptions& options,
                          std::string_view backend) {
  const auto choice = choose_kernel(spec, KernelRequest{std::string(backend), "auto"});
  BackendGemm made;
  made.backend = choice.row->make_backend(options);
  made.kernel = choice.row->make_kernel(spec, *made.backend);
  made.kernel->reserve(heads);
  return made;
}
// The GEMM of a format; for formats without one, any GEMM that every backend has.
BatchedGemmSpec product_of(const RowFormat& format, const RowShape& shape) {
  return format.rank > 0 ? expansion_of(format, shape) : BatchedGemmSpec{shape.dtype, 64, 64};
}

// An InvalidElementCell in a backend's memory.
class FirstInvalidElement {
 public:
  FirstInvalidElement(Backend& backend, Stream stream)
      : backend_(backend), stream_(stream), memory_(backend.allocate(sizeof(InvalidElementCell))) {
    backend_.fill_bytes(memory_.data(), std::byte{0xff}, sizeof(InvalidElementCell), stream_);
  }
  InvalidElementCell* get() const { return reinterpret_cast<InvalidElementCell*>(memory_.data()); }
  // Waits for the stream.
  std::optional<InvalidElement> read(const RowFormat& format, const RowShape& shape) {
    InvalidElementCell cell;
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof cell);
    backend_.copy_rows(&cell, kBytes, memory_.data(), kBytes, kBytes, 1, stream_);
    finish(backend_, stream_, DeviceTimeouts::for_queue());
    return invalid_element_of(cell, format, shape);
  }

 private:
  Backend& backend_;
  Stream stream_;
  Buffer memory_;
};

// Scales of a tensor or of its heads, from the absolute max `greatest` of each head.
std::vector<float> scales_of(ScaleGrain scales, std::vector<float> greatest) {
  if (scales == ScaleGrain::kTensor) greatest = {*std::ranges::max_element(greatest)};
  for (float& value : greatest) value = scale_of(value, kMaxE4m3);
  return greatest;
}

// Elements of the Gram matrices, with heads as in low_rank_shape().
std::size_t gram_numbers(const RowFormat& format, const RowShape& shape) {
  const RowShape ranked = low_rank_shape(format, shape);
  return static_cast<std::size_t>(ranked.heads * ranked.dim * ranked.dim);
}

// Throws an error for the invalid element that a LowRankCodec has found.
[[noreturn]] void refuse_ranked(std::string_view name, const RowFormat& format, const RowShape& shape,
                                InvalidElement invalid, ErrorCode code) {
  const std::string of = invalid.part == kInvalidFactor ? fmt::format("{}_factors", name)
                                                        : fmt::format("{} of rank {}", name, format.rank);
  invalid.part = 0;
  refuse_invalid_element(of, {}, shape, invalid, code);
}

// Computes tables and quantizes on a backend, some tokens at a time.
void compress_on_backend(std::string_view name, CompressedTensor& tensor, const TensorView& plain,
                         const CompressionOptions& options, ErrorCode code) {
  Backend& backend = *options.backend;
  const RowFormat& format = tensor.format;
  const RowShape& shape = tensor.shape;
  const bool ranked = format.rank > 0;
  bool checks_finite = true;  // check for non-finite elements
  if (format.encoding == RowEncoding::kFp8 && format.scales != ScaleGrain::kTokenHead) {
    std::vector<float> greatest(static_cast<std::size_t>(plain.heads));
    compute_absmax_staged(backend, {plain, greatest.data()});
    tensor.tables[0] = bytes_of(scales_of(format.scales, std::move(greatest)));
  }
  if (format.encoding == RowEncoding::kVector) {
    find_codebook_staged(backend, {plain, format.width, options.seed, tensor.tables[0].data()});
  }
  if (ranked) {
    std::vector<double> gram(gram_numbers(format, shape));
    add_gram_staged(backend, format, plain, gram.data());
    if (!has_finite_rows(low_rank_shape(format, shape), gram))
      refuse_invalid_element(name, {}, shape, find_invalid_element(plain).value(), code);
    LowRankTables tables = find_low_rank_tables(format, low_rank_shape(format, shape), gram, options.threads);
    tensor.tables[0] = std::move(tables.basis);
    if (format.encoding == RowEncoding::kHybrid) tensor.tables[1] = bytes_of(tables.outliers);
    tensor.energy_kept = tables.energy_kept;
    checks_finite = !tables.bounded;
  }
  const std::vector<CompressedRun> runs = tensor.runs();
  InvalidElementCell cell;
  compress_staged(backend, {format, shape, plain, {}, runs, tensor.rows(), checks_finite ? &cell : nullptr});
  if (const auto invalid = invalid_element_of(cell, {}, shape)) {
    if (ranked) refuse_ranked(name, format, shape, *invalid, code);
    refuse_invalid_element(name, {}, shape, *invalid, code);
  }
}

}  // namespace

std::int64_t CompressedTensor::tokens() const {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

std::size_t CompressedTensor::bytes() const {
  std::size_t bytes = 0;
  for (const auto& stream : streams) bytes += stream.size();
  for (const auto& table : tables) bytes += table.size();
  return bytes;
}

CompressedRows CompressedTensor::rows() {
  std::vector<std::byte*> of_streams, of_tables;
  for (auto& stream : streams) of_streams.push_back(stream.data());
  for (auto& table : tables) of_tables.push_back(table.data());
  return rows_at(of_streams, of_tables, format, shape);
}

std::vector<CompressedRun> CompressedTensor::runs() const {
  std::vector<CompressedRun> runs;
  std::int64_t row = 0;
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    if (lengths[s] > 0) runs.push_back({static_cast<std::int64_t>(s), 0, lengths[s], row, lengths[s], row});
    row += lengths[s];
  }
  return runs;
}

CompressedTensor make_compressed(const RowFormat& format, const RowShape& shape, std::vector<std::int64_t> lengths) {
  CompressedTensor tensor{format, shape, std::move(lengths), {}, {}};
  for (const FormatStream& stream : format_streams(format, shape)) {
    tensor.streams.emplace_back(static_cast<std::size_t>(tensor.tokens() * stream.token_bytes(shape.dtype)));
  }
  const auto sequences = static_cast<std::int64_t>(tensor.lengths.size());
  for (const FormatTable& table : format_tables(format, shape, sequences)) {
    tensor.tables.emplace_back(static_cast<std::size_t>(table.bytes(shape.dtype)));
  }
  return tensor;
}

CompressedTensor compress_tensor(std::string_view name, const RowFormat& format, const TensorView& plain,
                                 std::span<const std::int64_t> lengths, const CompressionOptions& options,
                                 ErrorCode code) {
  const RowShape shape{plain.dtype, plain.heads, plain.dim};
  check_format(name, format, shape);
  CompressedTensor tensor = make_compressed(format, shape, {lengths.begin(), lengths.end()});
  if (options.backend != nullptr) {
    compress_on_backend(name, tensor, plain, options, code);
    return tensor;
  }
  TensorCodec codec(format, shape, {options.threads, kNoDevice});
  tensor.energy_kept = codec.compress(name, plain, tensor.runs(), tensor.rows(), code, {}, options.seed);
  return tensor;
}

TensorCodec::TensorCodec(const RowFormat& format, const RowShape& shape, const BackendOptions& options,
                         std::string_view backend)
    : format_(format), shape_(shape), threads_(std::max(1, options.threads)) {
  check_format("a tensor", format, shape);
  BackendGemm made = make_products(product_of(format, shape), shape.heads, options, backend);
  backend_ = std::move(made.backend);
  if (format.rank > 0) products_ = std::move(made.kernel);
}

TensorCodec::~TensorCodec() = default;
TensorCodec::TensorCodec(TensorCodec&&) noexcept = default;

void TensorCodec::find_scales(const TensorView& plain, std::byte* scales, Stream stream) {
  std::vector<float> greatest(static_cast<std::size_t>(plain.heads));
  const auto bytes = plain.heads * std::int64_t{sizeof(float)};
  const Buffer memory = backend_->allocate(static_cast<std::size_t>(bytes));
  backend_->fill_bytes(memory.data(), std::byte{0}, static_cast<std::size_t>(bytes), stream);
  backend_->compute_absmax({plain, reinterpret_cast<float*>(memory.data())}, stream);
  backend_->copy_rows(greatest.data(), bytes, memory.data(), bytes, bytes, 1, stream);
  finish(*backend_, stream, DeviceTimeouts::for_queue());
  greatest = scales_of(format_.scales, std::move(greatest));
  const auto scale_bytes = static_cast<std::int64_t>(greatest.size() * sizeof(float));
  backend_->copy_rows(scales, scale_bytes, greatest.data(), scale_bytes, scale_bytes, 1, stream);
  finish(*backend_, stream, DeviceTimeouts::for_queue());
}

void TensorCodec::check_finite(std::string_view name, const TensorView& plain, ErrorCode code, Stream stream) {
  FirstInvalidElement invalid(*backend_, stream);
  backend_->check_finite({plain, 0, 0, invalid.get()}, stream);
  if (const auto found = invalid.read({}, shape_)) refuse_invalid_element(name, {}, shape_, *found, code);
}

double TensorCodec::compress(std::string_view name, const TensorView& plain, std::span<const CompressedRun> runs,
                             const CompressedRows& to, ErrorCode code, Stream stream, std::uint64_t seed) {
  if (format_.rank > 0) return compress_ranked(name, plain, runs, to, code, stream);
  if (format_.encoding == RowEncoding::kVector) {
    check_finite(name, plain, code, stream);
    backend_->find_codebook({plain, format_.width, seed, to.tables[0]}, stream);
  }
  FirstInvalidElement invalid(*backend_, stream);
  if (format_.encoding == RowEncoding::kFp8 && format_.scales != ScaleGrain::kTokenHead) {
    find_scales(plain, to.tables[0], stream);
  }
  backend_->compress({format_, shape_, plain, {}, runs, to, invalid.get()}, stream);
  if (const auto found = invalid.read({}, shape_)) refuse_invalid_element(name, {}, shape_, *found, code);
  return 1.0;
}

double TensorCodec::compress_ranked(std::string_view name, const TensorView& plain, std::span<const CompressedRun> runs,
                                    const CompressedRows& to, ErrorCode code, Stream stream) {
  std::vector<double> gram(gram_numbers(format_, shape_));
  const auto bytes = static_cast<std::int64_t>(gram.size() * sizeof(double));
  const Buffer sums = backend_->allocate(static_cast<std::size_t>(bytes));
  backend_->fill_bytes(sums.data(), std::byte{0}, static_cast<std::size_t>(bytes), stream);
  std::int64_t longest = 0;
  for (const CompressedRun& run : runs) longest = std::max(longest, run.rows);
  LowRankCodec codec(format_, shape_, *backend_, std::min(longest, kStagedTokens));
  codec.add_gram(plain, runs, reinterpret_cast<double*>(sums.data()), stream);
  backend_->copy_rows(gram.data(), bytes, sums.data(), bytes, bytes, 1, stream);
  finish(*backend_, stream, DeviceTimeouts::for_queue());
  if (!has_finite_rows(low_rank_shape(format_, shape_), gram)) check_finite(name, plain, code, stream);
  const LowRankTables tables = find_low_rank_tables(format_, low_rank_shape(format_, shape_), gram, threads_);
  const auto upload = [&](std::byte* table, std::span<const std::byte> found) {
    const auto size = static_cast<std::int64_t>(found.size());
    backend_->copy_rows(table, size, found.data(), size, size, 1, stream);
  };
  upload(to.tables[0], tables.basis);
  if (format_.encoding == RowEncoding::kHybrid) upload(to.tables[1], std::as_bytes(std::span(tables.outliers)));
  FirstInvalidElement invalid(*backend_, stream);
  codec.compress(plain, runs, to, tables.bounded ? nullptr : invalid.get(), stream);
  if (const auto found = invalid.read({}, shape_)) refuse_ranked(name, format_, shape_, *found, code);
  return tables.energy_kept;
}

void TensorCodec::decompress(const CompressedRows& from, std::span<const CompressedRun> runs,
                             const MutableTensorView& plain, Stream stream, InvalidElementCell* invalid) {
  if (format_.rank > 0) {
    for (const CompressedRun& run : runs) {
      expand_factors(*products_, format_, shape_, from, run.row, rows_of(plain, run.to, run.rows), stream);
    }
  }
  if (format_.encoding != RowEncoding::kLowRank || invalid != nullptr) {
    backend_->decompress({format_, shape_, from, runs, plain, invalid}, stream);
  }
}

void TensorCodec::decompress_checked(std::string_view name, const CompressedRows& from,
                                     std::span<const CompressedRun> runs, const MutableTensorView& plain,
                                     ErrorCode code, Stream stream) {
  std::optional<InvalidElement> found;
  if (backend_->memory() == MemoryKind::kHost) {  // on the host an outlier's channel is used as an address
    found = find_invalid_element(format_, shape_, from, runs);
    if (!found) decompress(from, runs, plain, stream);
  } else {
    FirstInvalidElement invalid(*backend_, stream);
    decompress(from, runs, plain, stream, invalid.get());
    found = invalid.read(format_, shape_);
  }
  if (found) refuse_invalid_element(name, format_, shape_, *found, code);
}

void load_decompression(const RowFormat& format, const RowShape& shape, Backend& backend) {
  if (format.is_plain()) return;
  const MutableTensorView none = dense_view(static_cast<void*>(nullptr), shape.dtype, 0, shape.heads, shape.dim);
  backend.decompress({format, shape, {}, {}, none, nullptr}, backend.stream());
}

std::vector<std::byte> decompress_tensor(CompressedTensor& tensor, int threads, Backend* backend) {
  const RowShape& shape = tensor.shape;
  std::vector<std::byte> plain(static_cast<std::size_t>(tensor.tokens() * shape.heads * shape.dim) *
                               size_of(shape.dtype));
  const std::vector<CompressedRun> runs = tensor.runs();
  const MutableTensorView view =
      dense_view(static_cast<void*>(plain.data()), shape.dtype, tensor.tokens(), shape.heads, shape.dim);
  if (backend != nullptr) {
    decompress_staged(*backend, {tensor.format, shape, tensor.rows(), runs, view});
  } else {
    TensorCodec(tensor.format, shape, {threads, kNoDevice}).decompress(tensor.rows(), runs, view);
  }
  return plain;
}

}  // namespace ringattn
