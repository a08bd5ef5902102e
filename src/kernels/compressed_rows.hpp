// SPDX-License-Identifier: Apache-2.0
// Compressed rows in memory, and tasks over them, as backends do them: Backend::compress() and Backend::decompress().
// Views are bytes in the backend's kind of memory; what formats hold stands in row_format.hpp, the arithmetic in
// row_quantization.hpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/error.hpp"
#include "base/host_device.hpp"
#include "base/tensor.hpp"
#include "kernels/row_format.hpp"

namespace ringattn {

struct CacheUpdate;  // kernels/cache_update.hpp

// Rows of a stream: row r of head h at data + r · token_stride + h · head_stride, in bytes; `width` elements there.
struct StreamView {
  std::byte* data = nullptr;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  std::byte* at(std::int64_t token, std::int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

// Streams in the order of format_streams(), the same row of each being the same token, and tables, dense, in the order
// of format_tables(). Those that a format lacks are null.
struct CompressedRows {
  std::array<StreamView, kMaxStreams> streams;
  std::array<std::byte*, kMaxTables> tables{};
};

// Streams that lie dense at such places, as the ring has them.
CompressedRows rows_at(std::span<std::byte* const> streams, std::span<std::byte* const> tables, const RowFormat& format,
                       const RowShape& shape);

// Tokens [position, position + rows) of a sequence of `keys` keys: rows [row, row + rows) of the streams, and rows
// [to, to + rows) of the plain tensor. Where the format has groups of tokens, `position` is a multiple of a group, and
// so is the run's end unless it is the sequence's.
struct CompressedRun {
  std::int64_t sequence = 0;
  std::int64_t position = 0;
  std::int64_t keys = 0;
  std::int64_t row = 0;
  std::int64_t rows = 0;
  std::int64_t to = 0;

  bool operator==(const CompressedRun&) const = default;
};

// The first fault that tasks have met, in memory of their backend, as somebody has set it to bytes of 0xff: devices
// find faults while they work, and whoever waits for them reads it. invalid_element_of() says what it is.
struct InvalidElementCell {
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  std::uint64_t location = kNone;  // location_of_element()
  float value = 0.0F;
  std::uint32_t lock = ~std::uint32_t{0};  // of devices: another number while one of their threads writes
};

// A fault's place as a number, ordered as find_invalid_element() looks: tables come before streams, a stream before the
// next, and in each token by token, head by head.
RINGATTN_HOST_DEVICE inline std::uint64_t location_of_table_element(int table, std::int64_t place) {
  return static_cast<std::uint64_t>(table) << 61 | static_cast<std::uint64_t>(place);
}
RINGATTN_HOST_DEVICE inline std::uint64_t location_of_element(int stream, std::int64_t token, std::int64_t head,
                                                              std::int64_t place) {
  return std::uint64_t{1} << 63 | static_cast<std::uint64_t>(stream) << 61 | static_cast<std::uint64_t>(token) << 28 |
         static_cast<std::uint64_t>(head) << 16 | static_cast<std::uint64_t>(place);
}

// Codes become elements. Of kLowRank and kHybrid the products of factors and basis are a BatchedGemmKernel's work:
// before this, it has left them in `plain`, rounded to the dtype. There is nothing left to do for kLowRank; a kHybrid
// element is round(product + remainder) in fp32, or the outlier.
struct DecompressTask {
  RowFormat format;
  RowShape shape;
  CompressedRows from;
  std::span<const CompressedRun> runs;  // read before the call returns
  MutableTensorView plain;              // [rows, heads, dim] of shape.dtype
  // Not null: what can't be decompressed is told there. Its elements are something.
  InvalidElementCell* fault = nullptr;
};

// Elements become codes, with tables that are there: scales of a tensor or head, codebooks, outlier channels. Tails are
// written. Of kHybrid the factors are there, and `products` are those that decompression will add; kLowRank has no such
// task. A LowRankCodec (low_rank_codec.hpp) does all of both.
struct CompressTask {
  RowFormat format;
  RowShape shape;
  TensorView plain;     // [rows, heads, dim]
  TensorView products;  // likewise, of kHybrid
  std::span<const CompressedRun> runs;
  CompressedRows to;
  InvalidElementCell* fault = nullptr;  // not null: elements that are not finite are told there, as rows of `plain`
};

// Greatest magnitude of each head of `plain`, [heads] fp32, over its rows and what `greatest` holds already. What
// fp8 tensors and heads are scaled by: scale_of(greatest, 448), of a tensor the greatest of its heads.
struct AbsmaxTask {
  TensorView plain;
  float* greatest = nullptr;
};

// Whether all numbers of some rows are finite, of either kind of rows: the first that isn't is told in the cell, as one
// of stream `part` of a fault's place, and of a token that counts from `first` on.
struct FiniteTask {
  TensorView rows;  // of bf16 or fp16
  int part = 0;
  std::int64_t first = 0;
  InvalidElementCell* fault = nullptr;
};

// A compressed tensor of a cache. Token t of page p of head h has of each stream what lies at data + p · page_stride +
// t · token_stride + h · head_stride, in bytes. Pages have 16 to 256 tokens, as those of plain caches, and all streams
// the same ones; a dense cache has a page for each sequence. A group of tokens may lie in several pages.
struct PagedStream {
  std::byte* data = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  std::byte* at(std::int64_t page, std::int64_t token, std::int64_t head) const {
    return data + page * page_stride + token * token_stride + head * head_stride;
  }
};
// Nobody looks for codes that are none (find_invalid_element()) while a step is decoded. A row whose scale is finite
// holds no code that is NaN: kernels may take it for 480 times the scale. Rows that join by an AppendTask keep to it,
// as the scale of a row that has NaN is NaN.
struct CompressedCache {
  RowFormat format;  // not plain
  RowShape shape;
  std::int64_t pages = 0;
  std::int64_t page_size = 0;                    // tokens
  std::array<PagedStream, kMaxStreams> streams;  // in the order of format_streams()
  std::array<std::byte*, kMaxTables> tables{};   // of format_tables(), for all sequences of the cache
};

// New rows of a step join a compressed cache, behind an update that has new_lengths and checked the lengths: row i of
// sequence s becomes the token at position lengths[s] − rows + i, where page_slot_of() of `places` says. Of
// kInt4Channel it goes into the sequence's tail, and a group that has become full becomes codes, token by token in this
// order. So lengths may go back as far as the last full group, and no farther. Neither kLowRank nor kHybrid has such a
// task.
struct AppendTask {
  const CacheUpdate* update = nullptr;  // without `new_lengths`
  CompressedCache cache;
  TensorView rows;                      // [sequences · rows, heads, dim]
  InvalidElementCell* fault = nullptr;  // as CompressTask's
};

// A number that no tensor, or no compressed one, may hold.
struct InvalidElement {
  enum class Kind : std::uint8_t {
    kNotFinite,  // an element, a factor, an outlier: NaN or ∞
    kScale,      // not finite, not above 0 (8 bits) or below 0 (4 bits), or so large that a code gives ∞ in the dtype
    kCode,       // NaN of E4M3, −128 of I8
    kTable,      // an entry of a table: NaN, ∞, or an outlier channel that is none or there twice
    kProduct,    // of factors and basis, which are finite: more than an element holds
  };

  Kind kind = Kind::kNotFinite;
  int part = 0;  // stream or, of kTable, table
  std::int64_t token = 0;
  std::int64_t head = 0;
  std::int64_t index = 0;  // element of the row of codes, of the table, or of kProduct of the plain row
  float value = 0.0F;

  bool operator==(const InvalidElement&) const = default;
};

// The first of the plain rows, token by token, head by head; host memory.
std::optional<InvalidElement> find_invalid_element(const TensorView& plain);
// The first of the tables, then of the runs' rows, stream by stream, then of products of factors and basis; host
// memory. Rows of streams that decompression
// doesn't read, behind the last group of tokens, hold anything. InvalidElement::token counts rows of the plain tensor.
std::optional<InvalidElement> find_invalid_element(const RowFormat& format, const RowShape& shape,
                                                   const CompressedRows& rows, std::span<const CompressedRun> runs);
// The first of a part of table `table`: its entries from `first` on, which begins a row of its last axis. Of a tail,
// they are all of tokens that a sequence has in it.
std::optional<InvalidElement> find_invalid_table_element(const RowFormat& format, const RowShape& shape, int table,
                                                         std::int64_t first, std::span<const std::byte> entries);
// Keeps the fault in the cell where it is the first.
void note_invalid_element(InvalidElementCell& cell, const std::optional<InvalidElement>& fault);
// What a cell of tasks of a format tells; kPlain: of tasks that compress.
std::optional<InvalidElement> invalid_element_of(const InvalidElementCell& cell, const RowFormat& format,
                                                 const RowShape& shape);
// Throws `code`: "k_scales[12, 3, 0] is nan (…). …". `name`: of the tensor, "k". `row`: what stands there instead of
// token and head, of a fault in a row; empty: these.
[[noreturn]] void refuse_invalid_element(std::string_view name, const RowFormat& format, const RowShape& shape,
                                         const InvalidElement& fault, ErrorCode code, std::string_view row = {});

// Backend::decompress(), compress(), compute_absmax(), check_finite() and append() of host memory, by `threads`
// threads.
void decompress_on_host(const DecompressTask& task, int threads);
void compress_on_host(const CompressTask& task, int threads);
void compute_absmax_on_host(const AbsmaxTask& task, int threads);
void check_finite_on_host(const FiniteTask& task);
void append_on_host(const AppendTask& task);

// What every backend checks of a task. Throws kInternal where views don't fit the format or each other, or a run cuts a
// group.
void check_task(const DecompressTask& task);
void check_task(const CompressTask& task);

}  // namespace ringattn
