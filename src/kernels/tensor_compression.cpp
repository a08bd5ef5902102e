// SPDX-License-Identifier: Apache-2.0
#include "kernels/tensor_compression.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "kernels/codebook.hpp"
#include "kernels/finish.hpp"
#include "kernels/low_rank.hpp"
#include "kernels/piecewise_rows.hpp"
#include "kernels/registry.hpp"
#include "kernels/row_coder.hpp"
#include "kernels/row_codes.hpp"

namespace ringattn {

namespace {

template <class Table>
std::vector<std::byte> bytes_of(const Table& table) {
  const auto bytes = std::as_bytes(std::span(table));
  return {bytes.begin(), bytes.end()};
}

// A backend, and on it a kernel for products.
struct Products {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<HeadProductKernel> kernel;
};
Products make_products(const HeadProductSpec& spec, std::int64_t heads, const BackendOptions& options,
                       std::string_view backend) {
  const auto choice = choose_kernel(spec, KernelRequest{std::string(backend), "auto"});
  Products made;
  made.backend = choice.row->make_backend(options);
  made.kernel = choice.row->make_kernel(spec, *made.backend);
  made.kernel->reserve(heads);
  return made;
}
Products host_products(const HeadProductSpec& spec, std::int64_t heads, int threads) {
  return make_products(spec, heads, {threads, kNoDevice}, "cpu");
}

// Any product that every backend has: of formats that need none.
HeadProductSpec product_of(const RowFormat& format, const RowShape& shape) {
  return format.rank > 0 ? expansion_of(format, shape) : HeadProductSpec{shape.dtype, 64, 64};
}

// A cell for faults in a backend's memory.
class FaultCell {
 public:
  FaultCell(Backend& backend, Stream stream)
      : backend_(backend), stream_(stream), memory_(backend.allocate(sizeof(RowFaultCell))) {
    backend_.fill_bytes(memory_.data(), std::byte{0xff}, sizeof(RowFaultCell), stream_);
  }
  RowFaultCell* get() const { return reinterpret_cast<RowFaultCell*>(memory_.data()); }
  // Waits for the stream.
  std::optional<RowFault> read(const RowFormat& format, const RowShape& shape) {
    RowFaultCell cell;
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof cell);
    backend_.copy_rows(&cell, kBytes, memory_.data(), kBytes, kBytes, 1, stream_);
    finish(backend_, stream_, DevicePatience::for_queue());
    return fault_of(cell, format, shape);
  }

 private:
  Backend& backend_;
  Stream stream_;
  Buffer memory_;
};

MutableTensorView factors_view(const CompressedRows& rows, const RowFormat& format, const RowShape& shape,
                               std::int64_t row, std::int64_t count) {
  const StreamView& stream = rows.streams[0];
  const auto element = static_cast<std::int64_t>(size_of(shape.dtype));
  return {stream.at(row, 0),           shape.dtype, count, shape.heads, format.rank, stream.token_stride / element,
          stream.head_stride / element};
}

template <class View>
View rows_of(View view, std::int64_t first, std::int64_t count) {
  view.data = view.at(first, 0);
  view.tokens = count;
  return view;
}

double sum_of_squares(const TensorView& rows) {
  std::vector<float> row(static_cast<std::size_t>(rows.dim));
  double sum = 0.0;
  for (std::int64_t token = 0; token < rows.tokens; ++token) {
    for (std::int64_t head = 0; head < rows.heads; ++head) {
      widen_row(rows.at(token, head), rows.dtype, rows.dim, row.data());
      for (const float value : row) sum += static_cast<double>(value) * static_cast<double>(value);
    }
  }
  return sum;
}

// A copy of the rows in which outlier channels are 0.
std::vector<std::byte> without_outliers(const TensorView& plain, const std::vector<std::int32_t>& channels) {
  const auto element = static_cast<std::int64_t>(size_of(plain.dtype));
  std::vector<std::byte> rows(static_cast<std::size_t>(plain.tokens * plain.heads * plain.dim * element));
  const auto count = static_cast<std::int64_t>(channels.size()) / std::max<std::int64_t>(1, plain.heads);
  std::byte* row = rows.data();
  for (std::int64_t token = 0; token < plain.tokens; ++token) {
    for (std::int64_t head = 0; head < plain.heads; ++head, row += plain.dim * element) {
      std::memcpy(row, plain.at(token, head), static_cast<std::size_t>(plain.dim * element));
      for (std::int64_t i = 0; i < count; ++i) {
        std::memset(row + channels[static_cast<std::size_t>(head * count + i)] * element, 0,
                    static_cast<std::size_t>(element));
      }
    }
  }
  return rows;
}

// What `greatest` of each head gives for a tensor's or its heads' scales.
std::vector<float> scales_of(ScaleGrain scales, std::vector<float> greatest) {
  if (scales == ScaleGrain::kTensor) greatest = {*std::ranges::max_element(greatest)};
  for (float& value : greatest) value = scale_of(value, kGreatestE4m3);
  return greatest;
}

// Codes, and the scales of fp8, by a backend that has some tokens at a time.
void compress_elsewhere(std::string_view name, CompressedTensor& tensor, const TensorView& plain, Backend& backend,
                        ErrorCode code) {
  const RowFormat& format = tensor.format;
  if (format.coding == RowCoding::kFp8 && format.scales != ScaleGrain::kTokenHead) {
    std::vector<float> greatest(static_cast<std::size_t>(plain.heads));
    greatest_magnitudes_piecewise(backend, {plain, greatest.data()});
    tensor.tables[0] = bytes_of(scales_of(format.scales, std::move(greatest)));
  }
  const std::vector<CompressedRun> runs = tensor.runs();
  RowFaultCell told;
  compress_piecewise(backend, {format, tensor.shape, plain, {}, runs, tensor.rows(), &told});
  if (const auto fault = fault_of(told, {}, tensor.shape)) refuse_fault(name, {}, tensor.shape, *fault, code);
}

}  // namespace

bool has_searched_tables(const RowFormat& format) { return format.rank > 0 || format.coding == RowCoding::kVector; }

HeadProductSpec expansion_of(const RowFormat& format, const RowShape& shape) {
  return {shape.dtype, format.rank, static_cast<int>(shape.dim)};
}
HeadProductSpec projection_of(const RowFormat& format, const RowShape& shape) {
  return {shape.dtype, static_cast<int>(shape.dim), format.rank};
}
HeadMatrices projection_matrices(const RowFormat& format, const RowShape& shape, const void* basis) {
  return {basis, shape.dtype, shape.heads, format.rank, shape.dim, format.rank * shape.dim, shape.dim, 1};
}
HeadMatrices expansion_matrices(const RowFormat& format, const RowShape& shape, const void* basis) {
  return projection_matrices(format, shape, basis).transposed();
}

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
  const int threads = options.threads;
  if (!has_searched_tables(format)) {
    if (options.backend != nullptr) {
      compress_elsewhere(name, tensor, plain, *options.backend, code);
      return tensor;
    }
    TensorCoder(format, shape, {threads, kNoDevice}).compress(name, plain, tensor.runs(), tensor.rows(), code);
    return tensor;
  }
  if (const auto fault = find_fault(plain)) refuse_fault(name, {}, shape, *fault, code);
  const bool ranked = format.rank > 0;
  const Products host =
      host_products(ranked ? projection_of(format, shape) : product_of(format, shape), shape.heads, threads);
  std::vector<std::int32_t> outliers;
  if (format.coding == RowCoding::kHybrid) {
    outliers = find_outlier_channels(plain, format.outliers, threads);
    tensor.tables[1] = bytes_of(outliers);
  }
  if (ranked) tensor.tables[0] = find_basis(plain, format.rank, outliers, threads);
  if (format.coding == RowCoding::kVector) tensor.tables[0] = find_codebook(plain, format.width, options.seed, threads);
  const CompressedRows rows = tensor.rows();
  std::vector<std::byte> products;
  MutableTensorView products_view;
  if (ranked && plain.tokens > 0) {
    const std::vector<std::byte> kept = without_outliers(plain, outliers);
    const TensorView inner =
        dense_view(static_cast<const void*>(kept.data()), shape.dtype, plain.tokens, shape.heads, shape.dim);
    const MutableTensorView factors = factors_view(rows, format, shape, 0, plain.tokens);
    host.kernel->multiply({inner, projection_matrices(format, shape, tensor.tables[0].data()), factors}, {}, {});
    if (const auto fault = find_fault(factors)) {
      refuse_fault(fmt::format("{}_factors", name), {}, shape, *fault, code);
    }
    const double all = sum_of_squares(plain);
    const double lost_outliers = sum_of_squares(inner);
    tensor.energy_kept = all > 0.0 ? (all - lost_outliers + sum_of_squares(factors)) / all : 1.0;
    const Products expansion = host_products(expansion_of(format, shape), shape.heads, threads);
    products.resize(kept.size());
    products_view = dense_view(static_cast<void*>(products.data()), shape.dtype, plain.tokens, shape.heads, shape.dim);
    expansion.kernel->multiply({factors, expansion_matrices(format, shape, tensor.tables[0].data()), products_view}, {},
                               {});
    if (const auto fault = find_fault(products_view)) {
      refuse_fault(fmt::format("{} of rank {}", name, format.rank), {}, shape, *fault, code);
    }
  }
  if (!ranked && options.backend != nullptr) {
    compress_elsewhere(name, tensor, plain, *options.backend, code);
  } else if (format.coding != RowCoding::kLowRank) {
    const std::vector<CompressedRun> runs = tensor.runs();
    host.backend->compress({format, shape, plain, products_view, runs, rows}, {});
  }
  return tensor;
}

TensorCoder::TensorCoder(const RowFormat& format, const RowShape& shape, const BackendOptions& options,
                         std::string_view backend)
    : format_(format), shape_(shape) {
  check_format("a tensor", format, shape);
  Products made = make_products(product_of(format, shape), shape.heads, options, backend);
  backend_ = std::move(made.backend);
  if (format.rank > 0) products_ = std::move(made.kernel);
}

TensorCoder::~TensorCoder() = default;
TensorCoder::TensorCoder(TensorCoder&&) noexcept = default;

void TensorCoder::find_scales(const TensorView& plain, std::byte* scales, Stream stream) {
  std::vector<float> greatest(static_cast<std::size_t>(plain.heads));
  const auto bytes = plain.heads * std::int64_t{sizeof(float)};
  const Buffer memory = backend_->allocate(static_cast<std::size_t>(bytes));
  backend_->fill_bytes(memory.data(), std::byte{0}, static_cast<std::size_t>(bytes), stream);
  backend_->greatest_magnitudes({plain, reinterpret_cast<float*>(memory.data())}, stream);
  backend_->copy_rows(greatest.data(), bytes, memory.data(), bytes, bytes, 1, stream);
  finish(*backend_, stream, DevicePatience::for_queue());
  greatest = scales_of(format_.scales, std::move(greatest));
  const auto scale_bytes = static_cast<std::int64_t>(greatest.size() * sizeof(float));
  backend_->copy_rows(scales, scale_bytes, greatest.data(), scale_bytes, scale_bytes, 1, stream);
  finish(*backend_, stream, DevicePatience::for_queue());
}

void TensorCoder::compress(std::string_view name, const TensorView& plain, std::span<const CompressedRun> runs,
                           const CompressedRows& to, ErrorCode code, Stream stream) {
  if (has_searched_tables(format_)) {
    fail(ErrorCode::kUnsupported, fmt::format("{} can't be compressed as {} where it lies", name, describe(format_)),
         "bases and codebooks are found in host memory", "Compress it there, and copy what it becomes.");
  }
  FaultCell fault(*backend_, stream);
  if (format_.coding == RowCoding::kFp8 && format_.scales != ScaleGrain::kTokenHead) {
    find_scales(plain, to.tables[0], stream);
  }
  backend_->compress({format_, shape_, plain, {}, runs, to, fault.get()}, stream);
  if (const auto found = fault.read({}, shape_)) refuse_fault(name, {}, shape_, *found, code);
}

void TensorCoder::decompress(const CompressedRows& from, std::span<const CompressedRun> runs,
                             const MutableTensorView& plain, Stream stream, RowFaultCell* fault) {
  if (format_.rank > 0) {
    const HeadMatrices matrices = expansion_matrices(format_, shape_, from.tables[0]);
    for (const CompressedRun& run : runs) {
      if (run.rows == 0) continue;
      products_->multiply(
          {factors_view(from, format_, shape_, run.row, run.rows), matrices, rows_of(plain, run.to, run.rows)}, stream,
          {});
    }
  }
  if (format_.coding != RowCoding::kLowRank || fault != nullptr) {
    backend_->decompress({format_, shape_, from, runs, plain, fault}, stream);
  }
}

void TensorCoder::decompress_checked(std::string_view name, const CompressedRows& from,
                                     std::span<const CompressedRun> runs, const MutableTensorView& plain,
                                     ErrorCode code, Stream stream) {
  std::optional<RowFault> found;
  if (backend_->memory() == MemoryKind::kHost) {  // where an outlier's channel is an address
    found = find_fault(format_, shape_, from, runs);
    if (!found) decompress(from, runs, plain, stream);
  } else {
    FaultCell fault(*backend_, stream);
    decompress(from, runs, plain, stream, fault.get());
    found = fault.read(format_, shape_);
  }
  if (found) refuse_fault(name, format_, shape_, *found, code);
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
  if (backend != nullptr && tensor.format.rank == 0) {
    decompress_piecewise(*backend, {tensor.format, shape, tensor.rows(), runs, view});
  } else {
    TensorCoder(tensor.format, shape, {threads, kNoDevice}).decompress(tensor.rows(), runs, view);
  }
  return plain;
}

}  // namespace ringattn
