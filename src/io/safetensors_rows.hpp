// SPDX-License-Identifier: Apache-2.0
// From a file's axis order to rows on the packed token axis and back: each rank moves its own rows and nothing else,
// with positioned transfers as long as the order allows, through at most 1 MiB of staging.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/packed_tokens.hpp"
#include "base/tensor.hpp"
#include "io/safetensors_file.hpp"

namespace ringattn {

// Axis order of q, k, v and out in a file: t tokens, h heads, d dim, b batch.
enum class AxisOrder { kThd, kHtd, kBthd, kBhtd };
std::string_view axis_order_name(AxisOrder order);  // "thd"
std::optional<AxisOrder> parse_axis_order(std::string_view name);

// A [tokens, heads, dim] tensor as it lies in a file. Packed token p is token p mod length of batch entry ⌊p / length⌋.
struct RowGrid {
  AxisOrder order = AxisOrder::kThd;
  std::int64_t batch = 1;
  std::int64_t length = 0;  // tokens of one batch entry
  std::int64_t heads = 0;
  std::int64_t dim = 0;

  std::int64_t tokens() const { return batch * length; }
  bool has_batch() const { return order == AxisOrder::kBthd || order == AxisOrder::kBhtd; }
  bool head_major() const { return order == AxisOrder::kHtd || order == AxisOrder::kBhtd; }
  // The tensor's shape in the file.
  std::vector<std::int64_t> shape() const;
};

// Reads a tensor's shape; without an order rank 3 is thd and rank 4 bthd. Throws kFile when the rank doesn't fit.
RowGrid row_grid(const TensorSource& tensor, std::optional<AxisOrder> order);

// Where the LSE of queries in `grid` goes: fp32, [heads, tokens] or [batch, heads, tokens]. As a grid its dim is 1.
RowGrid lse_grid(const RowGrid& grid);
std::vector<std::int64_t> lse_shape(const RowGrid& grid);

// The tensor's element type as q, k, v may have it. Throws kFile for the others.
Dtype row_dtype(const TensorSource& tensor);

// One contiguous piece of the file: rows [row, row + tokens) of the caller's array, heads [head, head + heads).
struct RowSegment {
  std::int64_t offset = 0;  // bytes into the tensor
  std::int64_t row = 0;
  std::int64_t tokens = 0;
  std::int64_t head = 0;
  std::int64_t heads = 0;
};

// Calls `visit` for pieces of at most `max_bytes` (but at least one row) that together hold the runs' rows, ascending
// in the file for ascending runs.
void for_each_segment(const RowGrid& grid, std::span<const PackedRun> runs, std::size_t element_bytes,
                      std::int64_t max_bytes, const std::function<void(const RowSegment&)>& visit);

inline constexpr std::int64_t kStagingBytes = std::int64_t{1} << 20;

// Copies between rows [first_row, …) and heads [head, head + heads) of a view and dense bytes [rows, heads, dim].
void gather_rows(const TensorView& view, std::int64_t first_row, std::int64_t head, std::int64_t heads,
                 std::span<std::byte> dense);
void scatter_rows(std::span<const std::byte> dense, std::int64_t head, std::int64_t heads,
                  const MutableTensorView& view, std::int64_t first_row);

// Fills `rows`, [total_tokens(runs), heads, dim] of the file's dtype, with the tokens of `runs` in order. Throws kFile.
void read_rows(const TensorSource& tensor, const RowGrid& grid, std::span<const PackedRun> runs,
               const MutableTensorView& rows);

// The same of elements of any size: fills `rows`, dense, with [total_tokens(runs), heads, dim] elements. Throws kFile.
void read_row_bytes(const TensorSource& tensor, const RowGrid& grid, std::span<const PackedRun> runs,
                    std::size_t element_bytes, std::span<std::byte> rows);

// Whole small tensors of rank 1. Throw kFile for other ranks and dtypes, and beyond 16 MiB.
std::vector<std::int64_t> read_integers(const TensorSource& tensor);  // I32 or I64: cu_seqlens, q_offset
std::vector<float> read_floats(const TensorSource& tensor);           // F32, BF16 or F16: sinks

}  // namespace ringattn
