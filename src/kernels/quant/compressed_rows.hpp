// SPDX-License-Identifier: Apache-2.0
// Compressed rows in memory and the tasks over them that backends run, such as Backend::compress() and
// Backend::decompress(). Views are bytes in the backend's memory kind. quant/row_format.hpp has the formats,
// quant/row_quantization.hpp the arithmetic.
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
#include "kernels/quant/row_format.hpp"

namespace ringattn {

struct CacheUpdate;  // kernels/decode/cache_update.hpp

// Rows of a stream: `width` elements of row r and head h at data + r · token_stride + h · head_stride. Strides in
// bytes.
struct StreamView {
  std::byte* data = nullptr;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  std::byte* at(std::int64_t token, std::int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

// Streams in the order of format_streams(), where row r of each belongs to the same token, and dense tables in the
// order of format_tables(). Those that a format does not have are null.
struct CompressedRows {
  std::array<StreamView, kMaxStreams> streams;
  std::array<std::byte*, kMaxTables> tables{};
};

// Views of dense streams at these addresses, as in the ring's buffers.
CompressedRows rows_at(std::span<std::byte* const> streams, std::span<std::byte* const> tables, const RowFormat& format,
                       const RowShape& shape);

// Tokens [position, position + rows) of a sequence of `keys` keys: rows [row, row + rows) of the streams, and rows [to,
// to + rows) of the plain tensor. If the format has groups of tokens, `position` is a multiple of the group, and so is
// the run's end, unless it is the sequence's end.
struct CompressedRun {
  std::int64_t sequence = 0;
  std::int64_t position = 0;
  std::int64_t keys = 0;
  std::int64_t row = 0;
  std::int64_t rows = 0;
  std::int64_t to = 0;

  bool operator==(const CompressedRun&) const = default;
};

// The first invalid element that tasks have found, in their backend's memory. The caller initializes it to 0xff bytes.
// Devices write it while they work, and the caller reads it after waiting. invalid_element_of() decodes it.
struct InvalidElementCell {
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  std::uint64_t location = kNone;  // location_of_element()
  float value = 0.0F;
  std::uint32_t lock = ~std::uint32_t{0};  // device threads: changes while one of them writes
};

// An invalid element's location as a number, in the search order of find_invalid_element(): tables before streams, then
// stream by stream, token by token, head by head.
RINGATTN_HOST_DEVICE inline std::uint64_t location_of_table_element(int table, std::int64_t index) {
  return static_cast<std::uint64_t>(table) << 61 | static_cast<std::uint64_t>(index);
}
RINGATTN_HOST_DEVICE inline std::uint64_t location_of_element(int stream, std::int64_t token, std::int64_t head,
                                                              std::int64_t index) {
  return std::uint64_t{1} << 63 | static_cast<std::uint64_t>(stream) << 61 | static_cast<std::uint64_t>(token) << 28 |
         static_cast<std::uint64_t>(head) << 16 | static_cast<std::uint64_t>(index);
}

// Dequantizes values to elements. For kLowRank and kHybrid a BatchedGemmKernel must first write factors · basis to
// `plain`, rounded to the dtype. Nothing is left to do for kLowRank. A kHybrid element is round(product + remainder) in
// fp32, or the outlier.
struct DecompressTask {
  RowFormat format;
  RowShape shape;
  CompressedRows from;
  std::span<const CompressedRun> runs;  // read before the call returns
  MutableTensorView plain;              // [rows, heads, dim] of shape.dtype
  // Non-null: receives the first element that cannot be decompressed, whose result is then unspecified.
  InvalidElementCell* invalid = nullptr;
};

// Quantizes elements, with given tables: scales of a tensor or head, codebooks, outlier channels. Tails are written.
// For kHybrid the factors are given, and `products` are those that decompression will add. kLowRank has no such task: a
// LowRankCodec (quant/low_rank_codec.hpp) compresses both low-rank formats completely.
struct CompressTask {
  RowFormat format;
  RowShape shape;
  TensorView plain;     // [rows, heads, dim]
  TensorView products;  // [rows, heads, dim], for kHybrid
  std::span<const CompressedRun> runs;
  CompressedRows to;
  InvalidElementCell* invalid = nullptr;  // non-null: receives the first non-finite element, by its row in `plain`
};

// Updates `greatest`, [heads] fp32, with the absolute max of each head over the rows of `plain`. The fp8 scale is
// scale_of(greatest, 448), for a tensor scale with the max over its heads.
struct AbsmaxTask {
  TensorView plain;
  float* greatest = nullptr;
};

// Checks that all elements of plain rows or factors are finite. The first non-finite element is stored in `invalid` as
// stream `part`, at a token index counted from `first`.
struct FiniteTask {
  TensorView rows;  // bf16 or fp16
  int part = 0;
  std::int64_t first = 0;
  InvalidElementCell* invalid = nullptr;
};

// A compressed tensor of a paged cache. Each stream of token t of page p and head h is at data + p · page_stride + t ·
// token_stride + h · head_stride. Strides in bytes. Pages have 16 to 256 tokens, like those of plain caches, and are
// the same for all streams. A dense cache has one page per sequence. A group of tokens may span several pages.
struct PagedStream {
  std::byte* data = nullptr;
  std::int64_t page_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  std::byte* at(std::int64_t page, std::int64_t token, std::int64_t head) const {
    return data + page * page_stride + token * token_stride + head * head_stride;
  }
};
// Decode does not validate quantized values; call find_invalid_element() first. Kernels may assume that a row with a
// finite scale has no NaN value, and read it as 480 times the scale. Rows appended by an AppendTask meet this
// condition, because the scale of a row with a NaN is NaN.
struct CompressedCache {
  RowFormat format;  // not plain
  RowShape shape;
  std::int64_t pages = 0;
  std::int64_t page_size = 0;                    // tokens
  std::array<PagedStream, kMaxStreams> streams;  // in the order of format_streams()
  std::array<std::byte*, kMaxTables> tables{};   // in the order of format_tables(), for all sequences of the cache
};

// Appends a step's new rows to a compressed cache, after an update that has increased and checked the lengths. Row i of
// sequence s becomes the token at position lengths[s] − rows + i, stored at page_slot_of() of the update. With
// kInt4Channel the token goes into the sequence's tail, and each group that becomes full is quantized, token by token
// in this order. So a length may be decreased as far as the last full group, but no further. kLowRank and kHybrid have
// no such task.
struct AppendTask {
  const CacheUpdate* update = nullptr;  // without `new_lengths`
  CompressedCache cache;
  TensorView rows;                        // [sequences · rows, heads, dim]
  InvalidElementCell* invalid = nullptr;  // as in CompressTask
};

// An element that no plain or compressed tensor may contain.
struct InvalidElement {
  enum class Kind : std::uint8_t {
    kNotFinite,  // an element, a factor, an outlier: NaN or ∞
    kScale,      // not finite, ≤ 0 (8 bits) or < 0 (4 bits), or so large that a quantized value overflows the dtype
    kCode,       // NaN of E4M3, −128 of I8
    kTable,      // a table entry: NaN, ∞, or an outlier channel that is out of range or duplicate
    kProduct,    // a product of finite factors and basis that overflows the element's dtype
  };

  Kind kind = Kind::kNotFinite;
  int part = 0;  // stream or, for kTable, table
  std::int64_t token = 0;
  std::int64_t head = 0;
  std::int64_t index = 0;  // index in the row of quantized values, in the table or, for kProduct, in the plain row
  float value = 0.0F;

  bool operator==(const InvalidElement&) const = default;
};

// Returns the first invalid element of plain rows in host memory, in the order token, head.
std::optional<InvalidElement> find_invalid_element(const TensorView& plain);
// Returns the first invalid element of compressed rows in host memory: first of the tables, then of the runs' rows,
// stream by stream, then of products of factors and basis. Stream rows that decompression does not read, after the last
// full group of tokens, are not checked. InvalidElement::token counts rows of the plain tensor.
std::optional<InvalidElement> find_invalid_element(const RowFormat& format, const RowShape& shape,
                                                   const CompressedRows& rows, std::span<const CompressedRun> runs);
// Returns the first invalid entry of a part of table `table`: its entries from index `first` on, which begins a row of
// the last axis. For a tail, `entries` are all tokens that a sequence has in it.
std::optional<InvalidElement> find_invalid_table_element(const RowFormat& format, const RowShape& shape, int table,
                                                         std::int64_t first, std::span<const std::byte> entries);
// Stores `invalid` in the cell if it comes first.
void note_invalid_element(InvalidElementCell& cell, const std::optional<InvalidElement>& invalid);
// Decodes a cell that tasks of this format have written. kPlain: tasks that compress.
std::optional<InvalidElement> invalid_element_of(const InvalidElementCell& cell, const RowFormat& format,
                                                 const RowShape& shape);
// Throws `code`: "k_scales[12, 3, 0] is nan (…). …". `name` is the tensor's, e.g. "k". A non-empty `row` replaces token
// and head in the message.
[[noreturn]] void refuse_invalid_element(std::string_view name, const RowFormat& format, const RowShape& shape,
                                         const InvalidElement& invalid, ErrorCode code, std::string_view row = {});

// Host implementations of Backend::decompress(), compress(), compute_absmax(), check_finite() and append().
void decompress_on_host(const DecompressTask& task, int threads);
void compress_on_host(const CompressTask& task, int threads);
void compute_absmax_on_host(const AbsmaxTask& task, int threads);
void check_finite_on_host(const FiniteTask& task);
void append_on_host(const AppendTask& task);

// Validation of tasks, shared by all backends. Throws kInternal if views do not match the format or each other, or a
// run cuts a group.
void check_task(const DecompressTask& task);
void check_task(const CompressTask& task);

}  // namespace ringattn
