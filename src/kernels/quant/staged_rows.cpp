// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/staged_rows.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "base/rank_liveness.hpp"
#include "kernels/common/finish.hpp"
#include "kernels/quant/low_rank_codec.hpp"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn {

namespace {

// Plain rows, streams and tables of a format, staged in a backend's memory.
class StagedRows {
 public:
  StagedRows(Backend& backend, const RowFormat& format, const RowShape& shape, std::int64_t max_tokens)
      : backend_(backend),
        format_(format),
        shape_(shape),
        tokens_(std::min(max_tokens, kStagedTokens)),
        row_bytes_(shape.heads * shape.dim * static_cast<std::int64_t>(size_of(shape.dtype))),
        plain_(allocate(tokens_ * row_bytes_)),
        invalid_(allocate(sizeof(InvalidElementCell))) {
    if (format.is_plain()) return;
    std::vector<std::byte*> streams;
    for (const FormatStream& stream : format_streams(format, shape)) {
      streams_.push_back(allocate(tokens_ * stream.token_bytes(shape.dtype)));
      streams.push_back(streams_.back().data());
    }
    rows_ = rows_at(streams, {}, format, shape);
  }

  // Copy tables to the backend's memory, and written tables back.
  void load_tables(const CompressedRows& from, std::int64_t sequences) {
    std::size_t at = 0;
    for (const FormatTable& table : format_tables(format_, shape_, sequences)) {
      table_bytes_.push_back(table.bytes(shape_.dtype));
      tables_.push_back(allocate(table_bytes_.back()));
      rows_.tables[at] = tables_.back().data();
      copy(rows_.tables[at], from.tables[at], table_bytes_.back());
      ++at;
    }
  }
  void store_tables(const CompressedRows& to) {
    for (std::size_t at = 0; at < tables_.size(); ++at) copy(to.tables[at], rows_.tables[at], table_bytes_[at]);
    synchronize();
  }

  // Copy `view` to and from the rows of plain().
  void load_plain(const TensorView& view, std::int64_t first, std::int64_t count) {
    for_heads(view, first, [&](const void* at, std::int64_t stride, std::int64_t offset, std::int64_t bytes) {
      backend_.copy_rows(plain_.data() + offset, row_bytes_, at, stride, bytes, count, backend_.stream());
    });
  }
  void store_plain(const MutableTensorView& view, std::int64_t first, std::int64_t count) {
    for_heads(view, first, [&](const void* at, std::int64_t stride, std::int64_t offset, std::int64_t bytes) {
      backend_.copy_rows(const_cast<void*>(at), stride, plain_.data() + offset, row_bytes_, bytes, count,
                         backend_.stream());
    });
    synchronize();
  }
  MutableTensorView plain(std::int64_t count) const {
    return dense_view(static_cast<void*>(plain_.data()), shape_.dtype, count, shape_.heads, shape_.dim);
  }

  void load_rows(const CompressedRows& from, std::int64_t first, std::int64_t count) {
    for_streams([&](std::size_t at, std::int64_t bytes) {
      copy(rows_.streams[at].data, from.streams[at].at(first, 0), count * bytes);
    });
  }
  void store_rows(const CompressedRows& to, std::int64_t first, std::int64_t count) {
    for_streams([&](std::size_t at, std::int64_t bytes) {
      copy(to.streams[at].at(first, 0), rows_.streams[at].data, count * bytes);
    });
    synchronize();
  }
  const CompressedRows& rows() const { return rows_; }

  // The cell for a task, if `wanted` is not null; and its result, which is also stored in `to`. `first` is the index in
  // the host's plain rows of the task's row 0.
  InvalidElementCell* cell(const InvalidElementCell* wanted) {
    if (wanted == nullptr) return nullptr;
    backend_.fill_bytes(invalid_.data(), std::byte{0xff}, sizeof(InvalidElementCell), backend_.stream());
    return reinterpret_cast<InvalidElementCell*>(invalid_.data());
  }
  std::optional<InvalidElement> take_invalid_element(InvalidElementCell* to, const RowFormat& format,
                                                     std::int64_t first) {
    if (to == nullptr) return std::nullopt;
    InvalidElementCell found;
    copy(&found, invalid_.data(), sizeof found);
    synchronize();
    auto invalid = invalid_element_of(found, format, shape_);
    if (!invalid) return std::nullopt;
    if (invalid->kind != InvalidElement::Kind::kTable) invalid->token += first;
    note_invalid_element(*to, invalid);
    return invalid;
  }

  // Calls with(run, row, to) for blocks of the runs, until it returns false. The block's rows are 0, 1, … in the
  // backend's memory. On the host they are those from `row` on of the streams, and from `to` on of the plain tensor.
  template <class With>
  void for_each_stage(std::span<const CompressedRun> runs, const With& with) {
    for (const CompressedRun& run : runs) {
      for (std::int64_t first = 0; first < run.rows; first += tokens_) {
        heartbeat();
        const CompressedRun block{
            run.sequence, run.position + first, run.keys, 0, std::min(tokens_, run.rows - first), 0};
        if (!with(block, run.row + first, run.to + first)) return;
      }
    }
  }

 private:
  Buffer allocate(std::int64_t bytes) {
    return backend_.allocate(static_cast<std::size_t>(std::max<std::int64_t>(1, bytes)));
  }
  void copy(void* to, const void* from, std::int64_t bytes) {
    if (bytes > 0) backend_.copy_rows(to, bytes, from, bytes, bytes, 1, backend_.stream());
  }
  void synchronize() { finish(backend_, backend_.stream(), DeviceTimeouts::for_short_work()); }
  template <class View, class Copy>
  void for_heads(const View& view, std::int64_t first, const Copy& copy) const {
    const auto element = static_cast<std::int64_t>(size_of(shape_.dtype));
    const std::int64_t stride = view.token_stride * element;
    if (view.head_stride == view.dim) return copy(view.at(first, 0), stride, 0, row_bytes_);
    const std::int64_t bytes = view.dim * element;
    for (std::int64_t head = 0; head < view.heads; ++head) copy(view.at(first, head), stride, head * bytes, bytes);
  }
  template <class Copy>
  void for_streams(const Copy& copy) const {
    std::size_t at = 0;
    for (const FormatStream& stream : format_streams(format_, shape_)) copy(at++, stream.token_bytes(shape_.dtype));
  }

  Backend& backend_;
  const RowFormat format_;
  const RowShape shape_;
  const std::int64_t tokens_;
  const std::int64_t row_bytes_;
  Buffer plain_, invalid_;
  std::vector<Buffer> streams_, tables_;
  std::vector<std::int64_t> table_bytes_;
  CompressedRows rows_;
};

std::int64_t longest(std::span<const CompressedRun> runs) {
  std::int64_t max_rows = 1;
  for (const CompressedRun& run : runs) max_rows = std::max(max_rows, run.rows);
  return max_rows;
}

std::int64_t sequences_of(std::span<const CompressedRun> runs) {
  std::int64_t sequences = 0;
  for (const CompressedRun& run : runs) sequences = std::max(sequences, run.sequence + 1);
  return sequences;
}

}  // namespace

void compress_staged(Backend& backend, const CompressTask& task) {
  if (task.format.encoding != RowEncoding::kLowRank) check_task(task);
  const std::int64_t max_rows = longest(task.runs);
  StagedRows staged(backend, task.format, task.shape, max_rows);
  staged.load_tables(task.to, sequences_of(task.runs));
  std::optional<LowRankCodec> ranked;
  if (task.format.rank > 0) ranked.emplace(task.format, task.shape, backend, std::min(max_rows, kStagedTokens));
  staged.for_each_stage(task.runs, [&](const CompressedRun& block, std::int64_t row, std::int64_t to) {
    staged.load_plain(task.plain, to, block.rows);
    const MutableTensorView plain = staged.plain(block.rows);
    InvalidElementCell* const cell = staged.cell(task.invalid);
    if (ranked) {
      ranked->compress(plain, {&block, 1}, staged.rows(), cell, backend.stream());
    } else {
      backend.compress({task.format, task.shape, plain, {}, {&block, 1}, staged.rows(), cell}, backend.stream());
    }
    staged.store_rows(task.to, row, block.rows);
    const auto invalid = staged.take_invalid_element(task.invalid, {}, to);
    return !invalid || invalid->part == kInvalidProduct;
  });
  staged.store_tables(task.to);
}

void decompress_staged(Backend& backend, const DecompressTask& task) {
  check_task(task);
  StagedRows staged(backend, task.format, task.shape, longest(task.runs));
  staged.load_tables(task.from, sequences_of(task.runs));
  std::optional<LowRankCodec> ranked;
  if (task.format.rank > 0) ranked.emplace(task.format, task.shape, backend, 1);
  staged.for_each_stage(task.runs, [&](const CompressedRun& block, std::int64_t row, std::int64_t to) {
    staged.load_rows(task.from, row, block.rows);
    const DecompressTask there{
        task.format, task.shape, staged.rows(), {&block, 1}, staged.plain(block.rows), staged.cell(task.invalid)};
    if (ranked) {
      ranked->decompress(there, backend.stream());
    } else {
      backend.decompress(there, backend.stream());
    }
    staged.store_plain(task.plain, to, block.rows);
    return !staged.take_invalid_element(task.invalid, task.format, to).has_value();
  });
}

void compute_absmax_staged(Backend& backend, const AbsmaxTask& task) {
  const TensorView& plain = task.plain;
  if (plain.tokens == 0) return;
  StagedRows staged(backend, {}, {plain.dtype, plain.heads, plain.dim}, plain.tokens);
  const auto bytes = plain.heads * static_cast<std::int64_t>(sizeof(float));
  const Buffer greatest = backend.allocate(static_cast<std::size_t>(bytes));
  auto* const there = reinterpret_cast<float*>(greatest.data());
  backend.copy_rows(there, bytes, task.greatest, bytes, bytes, 1, backend.stream());
  const CompressedRun all{0, 0, plain.tokens, 0, plain.tokens, 0};
  staged.for_each_stage({&all, 1}, [&](const CompressedRun& block, std::int64_t, std::int64_t to) {
    staged.load_plain(plain, to, block.rows);
    backend.compute_absmax({staged.plain(block.rows), there}, backend.stream());
    return true;
  });
  backend.copy_rows(task.greatest, bytes, there, bytes, bytes, 1, backend.stream());
  finish(backend, backend.stream(), DeviceTimeouts::for_short_work());
}

void add_gram_staged(Backend& backend, const RowFormat& format, const TensorView& rows, double* sums) {
  const RowShape shape{rows.dtype, rows.heads, rows.dim}, ranked = low_rank_shape(format, shape);
  const std::int64_t max_rows = std::max<std::int64_t>(1, rows.tokens);
  StagedRows staged(backend, {}, shape, max_rows);
  LowRankCodec codec(format, shape, backend, std::min(max_rows, kStagedTokens));
  const auto bytes = ranked.heads * ranked.dim * ranked.dim * static_cast<std::int64_t>(sizeof(double));
  const Buffer memory = backend.allocate(static_cast<std::size_t>(bytes));
  auto* const there = reinterpret_cast<double*>(memory.data());
  backend.copy_rows(there, bytes, sums, bytes, bytes, 1, backend.stream());
  const CompressedRun all{0, 0, rows.tokens, 0, rows.tokens, 0};
  staged.for_each_stage({&all, 1}, [&](const CompressedRun& block, std::int64_t, std::int64_t to) {
    staged.load_plain(rows, to, block.rows);
    codec.add_gram(staged.plain(block.rows), {&block, 1}, there, backend.stream());
    return true;
  });
  backend.copy_rows(sums, bytes, there, bytes, bytes, 1, backend.stream());
  finish(backend, backend.stream(), DeviceTimeouts::for_short_work());
}

void find_codebook_staged(Backend& backend, const CodebookTask& task) {
  check_task(task);
  const TensorView& rows = task.rows;
  const std::int64_t points = codebook_points(rows.tokens);
  const std::int64_t head_bytes = rows.dim * static_cast<std::int64_t>(size_of(rows.dtype));
  std::vector<std::byte> sample(static_cast<std::size_t>(points * rows.heads * head_bytes));
  std::byte* to = sample.data();
  for (std::int64_t i = 0; i < points; ++i) {
    for (std::int64_t head = 0; head < rows.heads; ++head, to += head_bytes) {
      std::memcpy(to, rows.at(codebook_token(i, points, rows.tokens), head), static_cast<std::size_t>(head_bytes));
    }
  }
  const auto sample_bytes = static_cast<std::int64_t>(sample.size());
  const std::int64_t book_bytes = rows.heads * kCodebookVectors * head_bytes;
  const Buffer there = backend.allocate(static_cast<std::size_t>(std::max<std::int64_t>(1, sample_bytes)));
  const Buffer book = backend.allocate(static_cast<std::size_t>(book_bytes));
  const Stream stream = backend.stream();
  if (points > 0) backend.copy_rows(there.data(), sample_bytes, sample.data(), sample_bytes, sample_bytes, 1, stream);
  const TensorView view = dense_view(static_cast<const void*>(there.data()), rows.dtype, points, rows.heads, rows.dim);
  backend.find_codebook({view, task.width, task.seed, book.data()}, stream);
  backend.copy_rows(task.codebook, book_bytes, book.data(), book_bytes, book_bytes, 1, stream);
  finish(backend, stream, DeviceTimeouts::for_short_work());
}

}  // namespace ringattn
