// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/compressed_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/error.hpp"
#include "base/heartbeat_lock.hpp"
#include "base/host.hpp"
#include "io/input_names.hpp"
#include "io/tensor_checks.hpp"
#include "kernels/common/synthetic.hpp"
#include "kernels/quant/tensor_compression.hpp"

namespace ringattn {

namespace {

MessageTemplate write_anew() { return {command("compress"), " writes such files."}; }

// Ignores the value of the rank: an invalid one is refused once the tensors have been found.
bool has_basis(const RowFormat& format) {
  return format.encoding == RowEncoding::kLowRank || format.encoding == RowEncoding::kHybrid;
}

// Channels of a head, from the shapes of the stored tensors.
std::int64_t dim_of(const RowFormat& format, const TensorSource& first, const std::optional<TensorSource>& basis) {
  if (basis) {
    require(basis->info->shape.size() == 3, *basis, "it must have 3 axes", write_anew());
    return basis->info->shape.back() / std::max(1, format.heads);
  }
  const std::int64_t last = first.info->shape.back();
  if (format.group > 0) return 2 * last;
  return format.width > 0 ? format.width * last : last;
}

RowGrid grid_of(const RowGrid& q, const TensorSource& tensor, const RowShape& shape) {
  const std::int64_t tokens = tensor.info->shape[0];
  require(q.batch > 0 ? tokens % q.batch == 0 : tokens == 0, tensor,
          fmt::format("q has a batch of {}, of which each has as many tokens", q.batch), write_anew());
  return {q.order, q.batch, q.batch > 0 ? tokens / q.batch : 0, shape.heads, shape.dim};
}

}  // namespace

FileDtype file_dtype(StoredType type, Dtype dtype) {
  switch (type) {
    case StoredType::kDtype:
      return file_dtype(dtype);
    case StoredType::kF32:
      return FileDtype::kF32;
    case StoredType::kE4m3:
      return FileDtype::kF8E4m3;
    case StoredType::kI8:
      return FileDtype::kI8;
    case StoredType::kU8:
      return FileDtype::kU8;
    case StoredType::kI32:
      break;
  }
  return FileDtype::kI32;
}

std::array<std::byte*, kMaxTables> CompressedSource::table_pointers() const {
  std::array<std::byte*, kMaxTables> pointers{};
  const std::vector<std::vector<std::byte>>& all = tables();
  for (std::size_t i = 0; i < all.size(); ++i) pointers[i] = const_cast<std::byte*>(all[i].data());
  return pointers;
}

const std::vector<std::vector<std::byte>>& CompressedSource::tables() const {
  const auto lock = lock_with_heartbeat(held_->mutex);
  if (held_->read) return held_->tables;
  std::vector<std::vector<std::byte>> read;
  for (const TensorSource& tensor : stored_tables) {
    tensor.shard->read(*tensor.info, 0, read.emplace_back(static_cast<std::size_t>(tensor.info->bytes())));
    tensor.shard->check_unchanged();
  }
  held_->tables = std::move(read);
  held_->read = true;
  return held_->tables;
}

void CompressedSource::set_tables(std::vector<std::vector<std::byte>> tables) {
  held_->tables = std::move(tables);
  held_->read = true;
}

std::string page_coordinates(const PageTable& pages, AxisOrder order, std::int64_t slot, std::int64_t head) {
  const std::int64_t page = slot / pages.page_size, token = slot % pages.page_size;
  return order == AxisOrder::kBhtd ? fmt::format("{}, {}, {}", page, head, token)
                                   : fmt::format("{}, {}, {}", page, token, head);
}

std::vector<CompressedRun> CompressedSource::rows_of(std::span<const PackedRun> runs) const {
  std::vector<CompressedRun> rows;
  std::int64_t row = 0;
  for (const PackedRun& run : runs) {
    auto s = static_cast<std::size_t>(std::upper_bound(cu.begin(), cu.end(), run.begin) - cu.begin() - 1);
    for (std::int64_t begin = run.begin; begin < run.end; ++s) {
      const std::int64_t end = std::min(run.end, cu[s + 1]);
      if (end <= begin) continue;
      rows.push_back({static_cast<std::int64_t>(s), begin - cu[s], cu[s + 1] - cu[s], row, end - begin, begin});
      row += end - begin;
      begin = end;
    }
  }
  return rows;
}

void CompressedSource::read_stream(std::size_t stream, std::span<const PackedRun> runs,
                                   std::span<std::byte> target) const {
  const FormatStream of = format_streams(format, shape)[stream];
  if (!streams.empty()) {
    const auto element = static_cast<std::size_t>(size_of(of.type, shape.dtype));
    const std::vector<PackedRun> places =
        pages ? pool_runs(*pages, cu, runs) : std::vector<PackedRun>(runs.begin(), runs.end());
    return read_row_bytes(streams[stream], row_grid(streams[stream], order), places, element, target);
  }
  const std::int64_t bytes = of.token_bytes(shape.dtype);
  std::size_t at = 0;
  for (const PackedRun& run : runs) {
    const auto count = static_cast<std::size_t>(run.tokens() * bytes);
    std::copy_n(made[stream].begin() + run.begin * bytes, count, target.begin() + static_cast<std::ptrdiff_t>(at));
    at += count;
  }
}

void CompressedSource::check(const CompressedRows& rows, std::span<const PackedRun> runs) const {
  const std::vector<CompressedRun> all = rows_of(runs);
  const auto invalid = find_invalid_element(format, shape, rows, all);
  if (!invalid) return;
  const std::string path = streams.empty() ? "" : streams[0].shard->path() + ": ";
  if (pages == nullptr || invalid->kind == InvalidElement::Kind::kTable) {
    refuse_invalid_element(path + name, format, shape, *invalid, ErrorCode::kFile);
  }
  const PackedRun token{invalid->token, invalid->token + 1};
  const std::int64_t slot = pool_runs(*pages, cu, {&token, 1}).front().begin;
  refuse_invalid_element(path + name, format, shape, *invalid, ErrorCode::kFile,
                         page_coordinates(*pages, order, slot, invalid->head));
}

void CompressedSource::read(std::span<const PackedRun> runs, const MutableTensorView& plain, int threads) const {
  // Some runs at a time, which are read with the rest of their quantization groups.
  TensorCodec decompressor(format, shape, {std::max(threads, 1), kNoDevice});
  const std::int64_t group = quantized_per_token(format) ? 1 : format.group;
  const auto row_bytes = static_cast<std::size_t>(shape.heads * shape.dim) * size_of(shape.dtype);
  for (const CompressedRun& run : rows_of(runs)) {
    const std::int64_t first = run.position / group * group;
    const std::int64_t end = std::min(run.keys, (run.position + run.rows + group - 1) / group * group);
    const PackedRun tokens{run.to - (run.position - first), run.to - run.position + end};
    std::vector<std::vector<std::byte>> read;
    CompressedRows rows;
    rows.tables = table_pointers();
    std::size_t at = 0;
    for (const FormatStream& stream : format_streams(format, shape)) {
      const std::int64_t bytes = stream.token_bytes(shape.dtype);
      read.emplace_back(static_cast<std::size_t>(tokens.tokens() * bytes));
      read_stream(at, {&tokens, 1}, read.back());
      rows.streams[at] = {read.back().data(), bytes, bytes / stream.heads};
      ++at;
    }
    check(rows, {&tokens, 1});
    std::vector<std::byte> elements(static_cast<std::size_t>(tokens.tokens()) * row_bytes);
    const CompressedRun whole{run.sequence, first, run.keys, 0, tokens.tokens(), 0};
    decompressor.decompress(
        rows, {&whole, 1},
        dense_view(static_cast<void*>(elements.data()), shape.dtype, tokens.tokens(), shape.heads, shape.dim));
    MutableTensorView target = plain;
    target.data = plain.at(run.row, 0);
    target.tokens = run.rows;
    scatter_rows(std::span(elements).subspan(static_cast<std::size_t>(run.position - first) * row_bytes,
                                             static_cast<std::size_t>(run.rows) * row_bytes),
                 0, shape.heads, target, 0);
  }
}

struct SyntheticTensors {
  AttentionSpec spec;
  Batch batch;
  CacheFormat format;
  std::uint64_t seed;
  CompressedTensors tensors;
};

SyntheticCompressed::SyntheticCompressed(const Job& job, std::uint64_t seed, std::shared_ptr<JobShare> share)
    : spec_(job.spec), batch_(job.batch), format_(job.format), seed_(seed), share_(std::move(share)) {
  if (!format_.k.is_plain()) check_format("k", format_.k, k_shape(spec_));
  if (!format_.v.is_plain()) check_format("v", format_.v, v_shape(spec_));
}

const CompressedTensors& SyntheticCompressed::tensors() const {
  std::call_once(once_, [this] {
    made_ = share_->synthetic.get(
        [this](const SyntheticTensors& last) {
          return last.spec == spec_ && last.batch == batch_ && last.format == format_ && last.seed == seed_;
        },
        [this] { return std::make_shared<const SyntheticTensors>(spec_, batch_, format_, seed_, make()); });
  });
  return made_->tensors;
}

CompressedTensors SyntheticCompressed::make() const {
  return {make("k", SyntheticTensor::kK, format_.k, k_shape(spec_)),
          make("v", SyntheticTensor::kV, format_.v, v_shape(spec_))};
}

std::optional<CompressedSource> SyntheticCompressed::make(std::string_view name, SyntheticTensor tensor,
                                                          const RowFormat& format, const RowShape& shape) const {
  if (format.is_plain()) return std::nullopt;
  const PackedRun all{0, batch_.k_tokens()};
  std::vector<std::byte> rows(static_cast<std::size_t>(all.tokens() * shape.heads * shape.dim) * size_of(shape.dtype));
  const MutableTensorView view =
      dense_view(static_cast<void*>(rows.data()), shape.dtype, all.tokens(), shape.heads, shape.dim);
  fill_synthetic(seed_, tensor, {&all, 1}, view);
  CompressedTensor compressed =
      compress_tensor(name, format, view, batch_.k_lengths(), {0, usable_processors().count}, ErrorCode::kUsage);
  CompressedSource source;
  source.name = name;
  source.format = format;
  source.shape = shape;
  source.cu = batch_.cu_k();
  source.made = std::move(compressed.streams);
  source.set_tables(std::move(compressed.tables));
  return source;
}

RowFormat stored_format(const SafetensorsFile& file, std::string_view tensor) {
  const std::string* const text = file.metadata(fmt::format("{}_format", tensor));
  if (text == nullptr) return {};
  try {
    return parse_row_format(*text);
  } catch (const Error& error) {
    fail(ErrorCode::kFile, {fmt::format("{}_format in the metadata of {}: ", tensor, file.path()), error.problem()},
         error.why(), error.suggestion());
  }
}

bool holds_compressed(const SafetensorsFile& file) {
  return !stored_format(file, "k").is_plain() || !stored_format(file, "v").is_plain();
}

std::string first_tensor(const RowFormat& format, std::string_view stored) {
  if (format.is_plain()) return std::string(stored);
  return fmt::format("{}_{}", stored, has_basis(format) ? "factors" : "codes");
}

CompressedSource find_source(const SafetensorsFile& file, std::string_view name, std::string_view stored,
                             const RowFormat& format, Dtype dtype, AxisOrder order) {
  CompressedSource source;
  source.name = name;
  source.format = format;
  source.order = order;
  const auto tensor = [&](std::string_view part) { return file.tensor(fmt::format("{}_{}", stored, part)); };
  const TensorSource first = file.tensor(first_tensor(format, stored));
  const auto basis = has_basis(format) ? std::optional(tensor("basis")) : std::nullopt;
  RowGrid grid = row_grid(first, order);
  const std::int64_t dim = dim_of(format, first, basis);
  require(grid.heads > 0 && dim > 0, first, "it needs at least one head, and at least one number", write_anew());
  source.shape = {dtype, grid.heads * std::max(1, format.heads), dim};  // the first tensor has groups of heads
  try {
    check_format(name, format, source.shape);
  } catch (const Error& error) {
    fail(ErrorCode::kFile, {file.path(), ": ", error.problem()}, error.why(), write_anew());
  }
  for (const FormatStream& stream : format_streams(format, source.shape)) {
    const TensorSource rows = tensor(stream.name);
    grid.heads = stream.heads;
    grid.dim = stream.width;
    const std::vector<std::int64_t> shape = grid.shape();
    const FileDtype wanted = file_dtype(stream.type, dtype);
    require(rows.info->dtype == wanted && rows.info->shape == shape, rows,
            fmt::format("{} stores it as {} {}", describe(format), file_dtype_name(wanted), shape_text(shape)),
            write_anew());
    source.streams.push_back(rows);
  }
  return source;
}

namespace {

// Checks a table part by part, so that an invalid one is refused before it takes memory. Of tails, checks the entries
// that the sequences use.
void check_table(const SafetensorsFile& file, const CompressedSource& source, int number, const FormatTable& table,
                 const TensorSource& tensor) {
  const std::int64_t bytes = size_of(table.type, source.shape.dtype);
  const std::int64_t row = table.shape.back();
  if (table.bytes(source.shape.dtype) == 0) return;
  const std::int64_t most = std::max<std::int64_t>(1, kStagingBytes / (row * bytes)) * row;  // entries
  std::vector<std::byte> part;
  const auto check = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; at += most) {
      part.resize(static_cast<std::size_t>(std::min(most, end - at) * bytes));
      tensor.shard->read(*tensor.info, at * bytes, part);
      const auto invalid = find_invalid_table_element(source.format, source.shape, number, at, part);
      if (!invalid) continue;
      refuse_invalid_element(fmt::format("{}: {}", file.path(), source.name), source.format, source.shape, *invalid,
                             ErrorCode::kFile);
    }
  };
  if (quantized_per_token(source.format)) return check(0, table.bytes(source.shape.dtype) / bytes);
  const std::int64_t token = source.shape.heads * source.shape.dim;
  const std::int64_t group = source.format.group;
  for (std::size_t s = 0; s + 1 < source.cu.size(); ++s) {
    const std::int64_t first = static_cast<std::int64_t>(s) * group * token;
    check(first, first + (source.cu[s + 1] - source.cu[s]) % group * token);
  }
}

}  // namespace

// Called once the sequences are known.
void find_tables(const SafetensorsFile& file, std::string_view stored, const SequenceList& sequences,
                 CompressedSource& source, std::vector<TensorSource>& used) {
  const std::int64_t count = static_cast<std::int64_t>(sequences.size());
  source.cu = Batch{sequences}.cu_k();
  const std::vector<FormatTable> tables = format_tables(source.format, source.shape, count);
  for (const FormatTable& table : tables) {
    const TensorSource tensor = file.tensor(fmt::format("{}_{}", stored, table.name));
    const FileDtype wanted = file_dtype(table.type, source.shape.dtype);
    require(
        tensor.info->dtype == wanted && tensor.info->shape == table.shape, tensor,
        fmt::format("{} stores it as {} {}", describe(source.format), file_dtype_name(wanted), shape_text(table.shape)),
        write_anew());
    used.push_back(tensor);
    source.stored_tables.push_back(tensor);
  }
  used.insert(used.end(), source.streams.begin(), source.streams.end());
  for (std::size_t i = 0; i < tables.size(); ++i) {
    check_table(file, source, static_cast<int>(i), tables[i], source.stored_tables[i]);
  }
}

InputTensors find_compressed(const SafetensorsFile& file, const InputNames& given, std::optional<AxisOrder> order,
                             std::optional<CompressedTensors>& found) {
  const InputNames names = resolve_names(file, given, JobKind::kAttention);
  InputTensors input;
  input.q = file.tensor(names.q.value_or("q"));
  input.q_grid = row_grid(input.q, order);
  input.dtype = row_dtype(input.q);
  input.used = {input.q};
  CompressedTensors tensors;
  const auto take = [&](const std::string& name, const std::string& stored, TensorSource& tensor, RowGrid& grid,
                        std::optional<CompressedSource>& compressed) {
    const RowFormat format = stored_format(file, name);
    if (format.is_plain()) {
      tensor = file.tensor(stored);
      grid = row_grid(tensor, order);
      require(row_dtype(tensor) == input.dtype, tensor, fmt::format("q is {}", file_dtype_name(input.q.info->dtype)),
              "q, k and v have one dtype.");
      input.used.push_back(tensor);
      return;
    }
    compressed = find_source(file, name, stored, format, input.dtype, AxisOrder::kThd);
    tensor = compressed->streams[0];
    grid = grid_of(input.q_grid, tensor, compressed->shape);
  };
  const std::string stored_k = names.k.value_or("k");
  const std::string stored_v = names.v.value_or("v");
  take("k", stored_k, input.k, input.k_grid, tensors.k);
  take("v", stored_v, input.v, input.v_grid, tensors.v);
  require(input.k_grid.dim == input.q_grid.dim, input.k,
          fmt::format("keys have {} channels, and q's head_dim is {}", input.k_grid.dim, input.q_grid.dim),
          write_anew());
  require(input.q_grid.heads % input.k_grid.heads == 0, input.k,
          fmt::format("Q has {} heads, which is not a multiple of {}", input.q_grid.heads, input.k_grid.heads),
          write_anew());
  require(input.v_grid.heads == input.k_grid.heads && input.v_grid.tokens() == input.k_grid.tokens(), input.v,
          fmt::format("keys have {} heads and {} tokens", input.k_grid.heads, input.k_grid.tokens()), write_anew());
  input.sequences = read_sequences(file, names, input);
  if (tensors.k) find_tables(file, stored_k, input.sequences, *tensors.k, input.used);
  if (tensors.v) find_tables(file, stored_v, input.sequences, *tensors.v, input.used);
  read_sinks(file, names, input);
  found = std::move(tensors);
  return input;
}

}  // namespace ringattn
