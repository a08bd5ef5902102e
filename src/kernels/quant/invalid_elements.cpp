// SPDX-License-Identifier: Apache-2.0
// Finds elements that no compressed tensor may contain, and reports them with tensor and index.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/e4m3.hpp"
#include "kernels/quant/compressed_rows.hpp"
#include "kernels/quant/row_quantization.hpp"

namespace ringattn {

namespace {

float number_at(const std::byte* data, StoredType type, Dtype dtype, std::int64_t index) {
  const std::byte* const at = data + index * size_of(type, dtype);
  switch (type) {
    case StoredType::kDtype:
      return load_element(at, dtype);
    case StoredType::kF32:
      return load_element(at, Dtype::kF32);
    case StoredType::kE4m3:
      return e4m3_to_float(std::to_integer<std::uint8_t>(*at));
    case StoredType::kI8:
      return static_cast<float>(static_cast<std::int8_t>(std::to_integer<std::uint8_t>(*at)));
    case StoredType::kU8:
      return static_cast<float>(std::to_integer<std::uint8_t>(*at));
    case StoredType::kI32: {
      std::int32_t value = 0;
      std::memcpy(&value, at, sizeof value);
      return static_cast<float>(value);
    }
  }
  return 0.0F;
}

bool is_finite_as(float value, Dtype dtype) {
  const std::uint16_t bits = dtype == Dtype::kBf16 ? float_to_bf16(value) : float_to_f16(value);
  return std::isfinite(dtype == Dtype::kBf16 ? bf16_to_float(bits) : f16_to_float(bits));
}

// The largest quantized value of a format with 8-bit scales; 0 for other formats.
float greatest_code(const RowFormat& format) {
  if (format.encoding == RowEncoding::kFp8 || format.encoding == RowEncoding::kLatent) return kMaxE4m3;
  return format.encoding == RowEncoding::kInt8 ? kMaxInt8 : 0.0F;
}

// The first invalid element of a stream's row: its index and kind.
std::optional<InvalidElement> invalid_element_of_row(const RowFormat& format, const FormatStream& stream, Dtype dtype,
                                                     const std::byte* row) {
  const bool scales = stream.name == "scales";
  for (std::int64_t i = 0; i < stream.width; ++i) {
    const float value = number_at(row, stream.type, dtype, i);
    InvalidElement invalid{InvalidElement::Kind::kNotFinite, 0, 0, 0, i, value};
    if (scales && stream.type == StoredType::kF32) {
      invalid.kind = InvalidElement::Kind::kScale;
      if (!(value > 0.0F) || !is_finite_as(greatest_code(format) * value, dtype)) return invalid;
    } else if (scales && i % 2 == 0) {
      invalid.kind = InvalidElement::Kind::kScale;
      const float zero = number_at(row, stream.type, dtype, i + 1);
      if (!(value >= 0.0F) || !std::isfinite(value)) return invalid;
      if (std::isfinite(zero) && !is_finite_as(dequantize_int4(15, value, zero), dtype)) return invalid;
    } else if (stream.type == StoredType::kE4m3) {
      invalid.kind = InvalidElement::Kind::kCode;
      if (std::isnan(value)) return invalid;
    } else if (stream.type == StoredType::kI8) {
      invalid.kind = InvalidElement::Kind::kCode;
      if (value < -kMaxInt8) return invalid;
    } else if (!std::isfinite(value)) {
      return invalid;
    }
  }
  return std::nullopt;
}

// Outlier channels must ascend, so none is duplicate.
bool is_bad_channel(const std::byte* data, const FormatTable& table, std::int64_t index, std::int64_t dim) {
  const float channel = number_at(data, table.type, Dtype::kBf16, index);
  if (channel < 0.0F || channel >= static_cast<float>(dim)) return true;
  return index % table.shape.back() > 0 && channel <= number_at(data, table.type, Dtype::kBf16, index - 1);
}

// Whether all 16-bit elements are finite. Most tables have only these, so this runs at memory speed.
bool all_finite(std::span<const std::byte> numbers, Dtype dtype) {
  const unsigned exponent = exponent_bits(dtype);
  unsigned bad = 0;
  for (std::size_t at = 0; at + 1 < numbers.size(); at += 2) {
    std::uint16_t word = 0;
    std::memcpy(&word, numbers.data() + at, sizeof word);
    bad |= (word & exponent) == exponent ? 1U : 0U;
  }
  return bad == 0;
}

// The first invalid entry among entries that begin a row of the table's last axis. Its index counts from the first of
// them.
std::optional<InvalidElement> invalid_element_of_entries(const FormatTable& table, const RowShape& shape,
                                                         std::span<const std::byte> entries) {
  const std::byte* const data = entries.data();
  const std::int64_t count = static_cast<std::int64_t>(entries.size()) / size_of(table.type, shape.dtype);
  const bool scales = table.name == "scales";
  if (table.type == StoredType::kDtype && shape.dtype != Dtype::kF32 && all_finite(entries, shape.dtype)) {
    return std::nullopt;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = number_at(data, table.type, shape.dtype, i);
    const bool bad = scales                           ? !(value > 0.0F) || !is_finite_as(kMaxE4m3 * value, shape.dtype)
                     : table.type == StoredType::kI32 ? is_bad_channel(data, table, i, shape.dim)
                                                      : !std::isfinite(value);
    if (bad) return InvalidElement{InvalidElement::Kind::kTable, 0, 0, 0, i, value};
  }
  return std::nullopt;
}

std::optional<InvalidElement> invalid_element_of_tail(const RowFormat& format, const RowShape& shape,
                                                      const std::byte* tail, const CompressedRun& run) {
  for (std::int64_t t = full_group_tokens(run.keys, format.group); t < run.keys; ++t) {
    const std::int64_t row = (run.sequence * format.group + t % format.group) * shape.heads * shape.dim;
    for (std::int64_t i = 0; i < shape.heads * shape.dim; ++i) {
      const float value = number_at(tail, StoredType::kDtype, shape.dtype, row + i);
      if (!std::isfinite(value)) return InvalidElement{InvalidElement::Kind::kTable, 0, 0, 0, row + i, value};
    }
  }
  return std::nullopt;
}

std::optional<InvalidElement> invalid_element_of_tables(const RowFormat& format, const RowShape& shape,
                                                        const CompressedRows& rows,
                                                        std::span<const CompressedRun> runs) {
  if (!quantized_per_token(format)) {  // the part of the tail that sequences use
    for (const CompressedRun& run : runs) {
      if (run.position + run.rows < run.keys) continue;
      if (const auto invalid = invalid_element_of_tail(format, shape, rows.tables[0], run)) return invalid;
    }
    return std::nullopt;
  }
  int part = 0;
  for (const FormatTable& table : format_tables(format, shape, 0)) {
    const std::byte* const data = rows.tables[static_cast<std::size_t>(part)];
    const std::span<const std::byte> entries{data, static_cast<std::size_t>(table.bytes(shape.dtype))};
    if (auto invalid = invalid_element_of_entries(table, shape, entries)) {
      invalid->part = part;
      return invalid;
    }
    ++part;
  }
  return std::nullopt;
}

// The largest product of factors and basis that gives a finite element. A hybrid row adds a remainder in fp32, and
// limits the sum to the dtype's range.
double greatest_product(const RowFormat& format, Dtype dtype) {
  if (format.encoding == RowEncoding::kHybrid) return std::numeric_limits<float>::max();
  return dtype == Dtype::kBf16 ? 0x1.fep127 : 65504.0;
}

// Finds rows whose product with their basis exceeds it although both are finite. A row is multiplied only if its
// factors and the basis's largest magnitudes do not rule that out.
class ProductCheck {
 public:
  ProductCheck(const RowFormat& format, const RowShape& shape, const CompressedRows& rows)
      : limit_(greatest_product(format, shape.dtype)),
        rank_(format.rank),
        shape_(low_rank_shape(format, shape)),
        head_dim_(shape.dim),
        factors_(rows.streams[0]),
        basis_(rows.tables[0]) {
    for (std::int64_t i = 0; i < shape_.heads * rank_; ++i) {
      double greatest = 0.0;
      for (std::int64_t d = 0; d < shape_.dim; ++d) greatest = std::max(greatest, std::fabs(basis(i, d)));
      greatest_.push_back(greatest);
    }
  }

  // Heads as in low_rank_shape().
  std::int64_t heads() const { return shape_.heads; }

  // Checks row `row` of the streams; the token is not set. `head` counts as in low_rank_shape().
  std::optional<InvalidElement> invalid_element_of(std::int64_t row, std::int64_t head) const {
    const std::byte* const factors = factors_.at(row, head);
    double bound = 0.0;
    for (std::int64_t r = 0; r < rank_; ++r) {
      bound += std::fabs(factor(factors, r)) * greatest_[static_cast<std::size_t>(head * rank_ + r)];
    }
    if (bound <= limit_) return std::nullopt;
    for (std::int64_t d = 0; d < shape_.dim; ++d) {
      double sum = 0.0;
      double magnitudes = 0.0;  // bounds the partial sums
      for (std::int64_t r = 0; r < rank_; ++r) {
        const double product = factor(factors, r) * basis(head * rank_ + r, d);
        sum += product;
        magnitudes += std::fabs(product);
      }
      if (std::fabs(sum) > limit_ || magnitudes > std::numeric_limits<float>::max()) {
        const std::int64_t of_heads = head * shape_.dim + d;
        return InvalidElement{InvalidElement::Kind::kProduct, 0, 0, of_heads / head_dim_, of_heads % head_dim_,
                              static_cast<float>(sum)};
      }
    }
    return std::nullopt;
  }

 private:
  double factor(const std::byte* factors, std::int64_t r) const {
    return number_at(factors, StoredType::kDtype, shape_.dtype, r);
  }
  double basis(std::int64_t row, std::int64_t d) const {
    return number_at(basis_, StoredType::kDtype, shape_.dtype, row * shape_.dim + d);
  }

  double limit_;
  std::int64_t rank_;
  RowShape shape_;  // low_rank_shape()
  std::int64_t head_dim_;
  StreamView factors_;
  const std::byte* basis_;
  std::vector<double> greatest_;  // [heads, rank], largest magnitude per basis row
};

struct InvalidElementText {
  std::string_view why;
  std::string_view suggestion;
};

InvalidElementText text_of(const RowFormat& format, InvalidElement::Kind kind, std::string_view part) {
  const bool four_bits = greatest_code(format) == 0.0F;
  switch (kind) {
    case InvalidElement::Kind::kScale:
      return {four_bits ? "a scale is finite and not negative, and no quantized value gives infinity"
                        : "a scale is finite and above 0, and no quantized value gives infinity",
              "Compress it again."};
    case InvalidElement::Kind::kCode:
      return {format.encoding != RowEncoding::kInt8 ? "a quantized value is not NaN"
                                                    : "a quantized value is from -127 to 127",
              "Compress it again."};
    case InvalidElement::Kind::kTable:
      if (part == "outlier_channels")
        return {"the channels of a head ascend and are below its dim", "Compress it again."};
      if (part == "scales")
        return {"a scale is finite and above 0, and no quantized value gives infinity", "Compress it again."};
      return {"it must be finite", "Compress it again."};
    case InvalidElement::Kind::kProduct:
      return {"factors and basis are finite, but their product is more than its dtype holds", "Compress it again."};
    case InvalidElement::Kind::kNotFinite:
      if (!format.is_plain()) return {"it must be finite", "Compress it again."};
      break;
  }
  return {"rows that are compressed, or of which some are chosen, hold only finite numbers",
          "Find out where it comes from, or leave the rows as they are."};
}

}  // namespace

std::optional<InvalidElement> find_invalid_element(const TensorView& plain) {
  for (std::int64_t token = 0; token < plain.tokens; ++token) {
    for (std::int64_t head = 0; head < plain.heads; ++head) {
      const std::byte* const row = plain.at(token, head);
      for (std::int64_t i = 0; i < plain.dim; ++i) {
        const float value = load_element(row + i * static_cast<std::int64_t>(size_of(plain.dtype)), plain.dtype);
        if (!std::isfinite(value)) return InvalidElement{InvalidElement::Kind::kNotFinite, 0, token, head, i, value};
      }
    }
  }
  return std::nullopt;
}

std::optional<InvalidElement> find_invalid_element(const RowFormat& format, const RowShape& shape,
                                                   const CompressedRows& rows, std::span<const CompressedRun> runs) {
  if (const auto invalid = invalid_element_of_tables(format, shape, rows, runs)) return invalid;
  int part = 0;
  for (const FormatStream& stream : format_streams(format, shape)) {
    const StreamView& view = rows.streams[static_cast<std::size_t>(part)];
    for (const CompressedRun& run : runs) {
      const std::int64_t coded = quantized_per_token(format) ? run.keys : full_group_tokens(run.keys, format.group);
      for (std::int64_t i = 0; i < run.rows && run.position + i < coded; ++i) {
        for (std::int64_t head = 0; head < stream.heads; ++head) {
          auto invalid = invalid_element_of_row(format, stream, shape.dtype, view.at(run.row + i, head));
          if (!invalid) continue;
          invalid->part = part;
          invalid->token = run.to + i;
          invalid->head = head;
          return invalid;
        }
      }
    }
    ++part;
  }
  if (format.rank == 0) return std::nullopt;
  const ProductCheck products(format, shape, rows);
  for (const CompressedRun& run : runs) {
    for (std::int64_t i = 0; i < run.rows; ++i) {
      for (std::int64_t head = 0; head < products.heads(); ++head) {
        auto invalid = products.invalid_element_of(run.row + i, head);
        if (!invalid) continue;
        invalid->token = run.to + i;
        return invalid;
      }
    }
  }
  return std::nullopt;
}

std::optional<InvalidElement> find_invalid_table_element(const RowFormat& format, const RowShape& shape, int table,
                                                         std::int64_t first, std::span<const std::byte> entries) {
  auto invalid =
      invalid_element_of_entries(format_tables(format, shape, 1)[static_cast<std::size_t>(table)], shape, entries);
  if (invalid) {
    invalid->part = table;
    invalid->index += first;
  }
  return invalid;
}

void note_invalid_element(InvalidElementCell& cell, const std::optional<InvalidElement>& invalid) {
  if (!invalid) return;
  const std::uint64_t location =
      invalid->kind == InvalidElement::Kind::kTable
          ? location_of_table_element(invalid->part, invalid->index)
          : location_of_element(invalid->part, invalid->token, invalid->head, invalid->index);
  if (location >= cell.location) return;
  cell.location = location;
  cell.value = invalid->value;
}

std::optional<InvalidElement> invalid_element_of(const InvalidElementCell& cell, const RowFormat& format,
                                                 const RowShape& shape) {
  if (cell.location == InvalidElementCell::kNone) return std::nullopt;
  const auto bits = [&cell](int first, int count) {
    return static_cast<std::int64_t>(cell.location >> first & ((std::uint64_t{1} << count) - 1));
  };
  const auto part = static_cast<int>(bits(61, 2));
  if (bits(63, 1) == 0) return InvalidElement{InvalidElement::Kind::kTable, part, 0, 0, bits(0, 61), cell.value};
  InvalidElement invalid{InvalidElement::Kind::kNotFinite, part, bits(28, 33), bits(16, 12), bits(0, 16), cell.value};
  if (format.is_plain()) return invalid;
  const FormatStream stream = format_streams(format, shape)[static_cast<std::size_t>(part)];
  if (stream.name == "scales" && (stream.type == StoredType::kF32 || invalid.index % 2 == 0)) {
    invalid.kind = InvalidElement::Kind::kScale;
  } else if (stream.type == StoredType::kE4m3 || stream.type == StoredType::kI8) {
    invalid.kind = InvalidElement::Kind::kCode;
  }
  return invalid;
}

void refuse_invalid_element(std::string_view name, const RowFormat& format, const RowShape& shape,
                            const InvalidElement& invalid, ErrorCode code, std::string_view row) {
  std::string coordinates;
  std::string_view part;
  if (invalid.kind == InvalidElement::Kind::kTable) {
    const FormatTable table = format_tables(format, shape, 1)[static_cast<std::size_t>(invalid.part)];
    part = table.name;
    std::int64_t rest = invalid.index;
    std::vector<std::int64_t> at(table.shape.size());
    for (std::size_t axis = at.size(); axis-- > 1; rest /= table.shape[axis]) at[axis] = rest % table.shape[axis];
    at[0] = rest;
    for (const std::int64_t index : at) coordinates += fmt::format("{}{}", coordinates.empty() ? "" : ", ", index);
  } else {
    part = format_streams(format, shape)[static_cast<std::size_t>(invalid.part)].name;
    coordinates = row.empty() ? fmt::format("{}, {}, {}", invalid.token, invalid.head, invalid.index)
                              : fmt::format("{}, {}", row, invalid.index);
  }
  const InvalidElementText text = text_of(format, invalid.kind, part);
  const bool element = format.is_plain() || invalid.kind == InvalidElement::Kind::kProduct;
  const std::string tensor = element ? std::string(name) : fmt::format("{}_{}", name, part);
  fail(code, fmt::format("{}[{}] is {}", tensor, coordinates, invalid.value), text.why, text.suggestion);
}

}  // namespace ringattn
