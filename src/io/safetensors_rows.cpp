// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/error.hpp"

namespace ringattn {

static_assert(std::endian::native == std::endian::little, "safetensors data are little endian");

namespace {

constexpr std::int64_t kSmallTensorBytes = std::int64_t{1} << 24;

struct OrderRow {
  AxisOrder order;
  std::string_view name;
};
constexpr OrderRow kOrders[] = {
    {AxisOrder::kThd, "thd"}, {AxisOrder::kHtd, "htd"}, {AxisOrder::kBthd, "bthd"}, {AxisOrder::kBhtd, "bhtd"}};

std::vector<std::byte> read_vector(const TensorSource& tensor) {
  const TensorInfo& info = *tensor.info;
  if (info.shape.size() != 1) {
    fail(ErrorCode::kFile, fmt::format("{} has shape {}", tensor.text(), shape_text(info.shape)),
         "it must be a list, of one dimension", "Write it with one axis, such as shape [n].");
  }
  if (info.bytes() > kSmallTensorBytes) {
    fail(ErrorCode::kFile, fmt::format("{} has {} bytes", tensor.text(), info.bytes()),
         fmt::format("at most {} are read at once", kSmallTensorBytes),
         {"Check that ", setting("tensors"), " names the right one."});
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(info.bytes()));
  tensor.shard->read(info, 0, bytes);
  tensor.shard->check_unchanged();
  return bytes;
}

}  // namespace

std::string_view axis_order_name(AxisOrder order) { return kOrders[static_cast<std::size_t>(order)].name; }

std::optional<AxisOrder> parse_axis_order(std::string_view name) {
  for (const OrderRow& row : kOrders) {
    if (row.name == name) return row.order;
  }
  return std::nullopt;
}

std::vector<std::int64_t> RowGrid::shape() const {
  std::vector<std::int64_t> dims;
  if (has_batch()) dims.push_back(batch);
  dims.push_back(head_major() ? heads : length);
  dims.push_back(head_major() ? length : heads);
  dims.push_back(dim);
  return dims;
}

RowGrid row_grid(const TensorSource& tensor, std::optional<AxisOrder> order) {
  const std::vector<std::int64_t>& shape = tensor.info->shape;
  if (!order && shape.size() != 3 && shape.size() != 4) {
    fail(ErrorCode::kFile, fmt::format("{} has shape {}", tensor.text(), shape_text(shape)),
         "it must have 3 axes (tokens, heads, dim) or 4 (batch, tokens, heads, dim)",
         {setting("order"), " names other orders."});
  }
  RowGrid grid;
  grid.order = order.value_or(shape.size() == 3 ? AxisOrder::kThd : AxisOrder::kBthd);
  if (shape.size() != (grid.has_batch() ? 4U : 3U)) {
    fail(ErrorCode::kFile, fmt::format("{} has shape {}", tensor.text(), shape_text(shape)),
         fmt::format("order {} has {} axes", axis_order_name(grid.order), grid.has_batch() ? 4 : 3),
         {"Name the file's order with ", setting("order"), "."});
  }
  const std::size_t first = grid.has_batch() ? 1 : 0;
  if (grid.has_batch()) grid.batch = shape[0];
  grid.length = shape[grid.head_major() ? first + 1 : first];
  grid.heads = shape[grid.head_major() ? first : first + 1];
  grid.dim = shape[first + 2];
  return grid;
}

RowGrid lse_grid(const RowGrid& grid) {
  RowGrid lse = grid;
  lse.order = grid.has_batch() ? AxisOrder::kBhtd : AxisOrder::kHtd;
  lse.dim = 1;
  return lse;
}

std::vector<std::int64_t> lse_shape(const RowGrid& grid) {
  std::vector<std::int64_t> shape = lse_grid(grid).shape();
  shape.pop_back();
  return shape;
}

Dtype row_dtype(const TensorSource& tensor) {
  const auto dtype = attention_dtype(tensor.info->dtype);
  if (!dtype) {
    fail(ErrorCode::kFile, fmt::format("{} has dtype {}", tensor.text(), file_dtype_name(tensor.info->dtype)),
         "q, k and v are BF16, F16 or F32", "Convert it to one of them.");
  }
  return *dtype;
}

void for_each_segment(const RowGrid& grid, std::span<const PackedRun> runs, std::size_t element_bytes,
                      std::int64_t max_bytes, const std::function<void(const RowSegment&)>& visit) {
  const auto head_bytes = grid.dim * static_cast<std::int64_t>(element_bytes);
  // Contiguous unit: whole tokens, or the tokens of one head of one batch entry.
  const std::int64_t heads_together = grid.head_major() ? 1 : grid.heads;
  const std::int64_t length = grid.head_major() ? grid.length : grid.tokens();
  const std::int64_t row_bytes = heads_together * head_bytes;
  const std::int64_t max_rows = std::max<std::int64_t>(1, max_bytes / std::max<std::int64_t>(1, row_bytes));

  struct PartOfRun {
    std::int64_t entry;  // of the batch
    std::int64_t token;  // of the entry
    std::int64_t row;
    std::int64_t tokens;
  };
  std::vector<PartOfRun> parts;
  std::int64_t row = 0;
  for (const PackedRun& run : runs) {
    if (run.begin < 0 || run.begin > run.end || run.end > grid.tokens()) {
      fail(ErrorCode::kInternal, fmt::format("tokens {} to {} of {}", run.begin, run.end, grid.tokens()));
    }
    for (std::int64_t begin = run.begin; begin < run.end;) {
      const std::int64_t entry = begin / length;
      const std::int64_t tokens = std::min(run.end, (entry + 1) * length) - begin;
      parts.push_back({entry, begin - entry * length, row, tokens});
      row += tokens;
      begin += tokens;
    }
  }
  for (std::size_t first = 0, last = 0; first < parts.size(); first = last) {
    while (last < parts.size() && parts[last].entry == parts[first].entry) ++last;
    for (std::int64_t head = 0; head < grid.heads; head += heads_together) {
      for (std::size_t i = first; i < last; ++i) {
        const PartOfRun& part = parts[i];
        const std::int64_t file_row = (part.entry * (grid.heads / heads_together) + head) * length + part.token;
        for (std::int64_t done = 0; done < part.tokens; done += max_rows) {
          visit({(file_row + done) * row_bytes, part.row + done, std::min(max_rows, part.tokens - done), head,
                 heads_together});
        }
      }
    }
  }
}

void gather_rows(const TensorView& view, std::int64_t first_row, std::int64_t head, std::int64_t heads,
                 std::span<std::byte> dense) {
  const auto bytes = static_cast<std::size_t>(view.dim) * size_of(view.dtype);
  std::byte* to = dense.data();
  for (std::int64_t row = first_row; to != dense.data() + dense.size(); ++row) {
    for (std::int64_t h = head; h < head + heads; ++h, to += bytes) std::memcpy(to, view.at(row, h), bytes);
  }
}

void scatter_rows(std::span<const std::byte> dense, std::int64_t head, std::int64_t heads,
                  const MutableTensorView& view, std::int64_t first_row) {
  const auto bytes = static_cast<std::size_t>(view.dim) * size_of(view.dtype);
  const std::byte* from = dense.data();
  for (std::int64_t row = first_row; from != dense.data() + dense.size(); ++row) {
    for (std::int64_t h = head; h < head + heads; ++h, from += bytes) std::memcpy(view.at(row, h), from, bytes);
  }
}

void read_rows(const TensorSource& tensor, const RowGrid& grid, std::span<const PackedRun> runs,
               const MutableTensorView& rows) {
  const std::size_t element = size_of(rows.dtype);
  if (rows.tokens != total_tokens(runs) || rows.heads != grid.heads || rows.dim != grid.dim ||
      row_dtype(tensor) != rows.dtype) {
    fail(ErrorCode::kInternal, fmt::format("the rows read from {} don't fit the array", tensor.text()));
  }
  const auto row_bytes = static_cast<std::size_t>(grid.dim) * element;
  if (!grid.head_major() && TensorView(rows).is_dense()) {
    for_each_segment(grid, runs, element, std::numeric_limits<std::int64_t>::max(), [&](const RowSegment& segment) {
      tensor.shard->read(
          *tensor.info, segment.offset,
          {rows.at(segment.row, 0), static_cast<std::size_t>(segment.tokens * segment.heads) * row_bytes});
    });
  } else {
    std::vector<std::byte> staging;
    for_each_segment(grid, runs, element, kStagingBytes, [&](const RowSegment& segment) {
      staging.resize(static_cast<std::size_t>(segment.tokens * segment.heads) * row_bytes);
      tensor.shard->read(*tensor.info, segment.offset, staging);
      scatter_rows(staging, segment.head, segment.heads, rows, segment.row);
    });
  }
  tensor.shard->check_unchanged();
}

void read_row_bytes(const TensorSource& tensor, const RowGrid& grid, std::span<const PackedRun> runs,
                    std::size_t element_bytes, std::span<std::byte> rows) {
  const std::size_t head_bytes = static_cast<std::size_t>(grid.dim) * element_bytes;
  const auto place = [&](std::int64_t row, std::int64_t head) {
    return static_cast<std::size_t>(row * grid.heads + head) * head_bytes;
  };
  std::vector<std::byte> staging;
  const std::int64_t most = grid.head_major() ? kStagingBytes : std::numeric_limits<std::int64_t>::max();
  for_each_segment(grid, runs, element_bytes, most, [&](const RowSegment& segment) {
    const std::size_t bytes = static_cast<std::size_t>(segment.tokens * segment.heads) * head_bytes;
    if (!grid.head_major()) {
      tensor.shard->read(*tensor.info, segment.offset, rows.subspan(place(segment.row, 0), bytes));
      return;
    }
    staging.resize(bytes);
    tensor.shard->read(*tensor.info, segment.offset, staging);
    for (std::int64_t i = 0; i < segment.tokens; ++i) {
      std::memcpy(rows.data() + place(segment.row + i, segment.head),
                  staging.data() + static_cast<std::size_t>(i) * head_bytes, head_bytes);
    }
  });
  tensor.shard->check_unchanged();
}

std::vector<std::int64_t> read_integers(const TensorSource& tensor) {
  const FileDtype dtype = tensor.info->dtype;
  if (dtype != FileDtype::kI32 && dtype != FileDtype::kI64) {
    fail(ErrorCode::kFile, fmt::format("{} has dtype {}", tensor.text(), file_dtype_name(dtype)),
         "it must be I32 or I64", "Convert it to one of them.");
  }
  const std::vector<std::byte> bytes = read_vector(tensor);
  if (dtype == FileDtype::kI64) {
    std::vector<std::int64_t> values(bytes.size() / sizeof(std::int64_t));
    std::copy(bytes.begin(), bytes.end(), std::as_writable_bytes(std::span(values)).begin());
    return values;
  }
  std::vector<std::int32_t> narrow(bytes.size() / sizeof(std::int32_t));
  std::copy(bytes.begin(), bytes.end(), std::as_writable_bytes(std::span(narrow)).begin());
  return {narrow.begin(), narrow.end()};
}

std::vector<float> read_floats(const TensorSource& tensor) {
  const auto dtype = attention_dtype(tensor.info->dtype);
  if (!dtype) {
    fail(ErrorCode::kFile, fmt::format("{} has dtype {}", tensor.text(), file_dtype_name(tensor.info->dtype)),
         "it must be F32, BF16 or F16", "Convert it to one of them.");
  }
  const std::vector<std::byte> bytes = read_vector(tensor);
  std::vector<float> values(bytes.size() / size_of(*dtype));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = load_element(bytes.data() + i * size_of(*dtype), *dtype);
  return values;
}

}  // namespace ringattn
