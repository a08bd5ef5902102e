// SPDX-License-Identifier: Apache-2.0
// Converts between a file's axis order and rows on the packed token axis. Each rank transfers only its own rows, with
// positioned transfers as long as the order allows, through at most 1 MiB of staging.
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

// The layout of a [tokens, heads, dim] tensor in a file. Packed token p is token p mod length of batch entry ⌊p /
// length⌋.
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

// Reads a tensor's shape. Without an order, rank 3 is thd and rank 4 is bthd. Throws kFile if the rank doesn't match.
RowGrid row_grid(const TensorSource& tensor, std::optional<AxisOrder> order);

// The layout of the LSE of queries in `grid`: fp32, [heads, tokens] or [batch, heads, tokens], as a grid with dim 1.
RowGrid lse_grid(const RowGrid& grid);
std::vector<std::int64_t> lse_shape(const RowGrid& grid);

// The tensor's element type. Throws kFile for types that q, k and v can't have.
Dtype row_dtype(const TensorSource& tensor);

// One contiguous piece of the file: rows [row, row + tokens) of the caller's array, heads [head, head + heads).
struct RowSegment {
  std::int64_t offset = 0;  // bytes into the tensor
  std::int64_t row = 0;
  std::int64_t tokens = 0;
  std::int64_t head = 0;
  std::int64_t heads = 0;
};

// Calls `visit` for pieces of at most `max_bytes` (but at least one row) that together hold the rows of the runs. For
// ascending runs the pieces ascend in the file.
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

// The same for elements of any size: fills `rows`, dense, with [total_tokens(runs), heads, dim] elements. Throws kFile.
void read_row_bytes(const TensorSource& tensor, const RowGrid& grid, std::span<const PackedRun> runs,
                    std::size_t element_bytes, std::span<std::byte> rows);

// Read small tensors of rank 1 whole. Throw kFile for other ranks and dtypes, and beyond 16 MiB.
std::vector<std::int64_t> read_integers(const TensorSource& tensor);  // I32 or I64: cu_seqlens, q_offset
std::vector<float> read_floats(const TensorSource& tensor);           // F32, BF16 or F16: sinks

}  // namespace ringattn
