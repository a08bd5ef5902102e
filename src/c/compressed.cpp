// SPDX-License-Identifier: Apache-2.0
#include "c/compressed.hpp"

#include <fmt/format.h>

#include <array>
#include <string>

#include "base/error.hpp"
#include "c/status.hpp"

namespace ringattn::c {

namespace {

constexpr std::size_t kFirstCompressed = 56;
constexpr std::uint8_t kE4m3Code = 10;  // DLPack's code since version 1.1

std::string part_name(std::string_view tensor, std::string_view part) { return fmt::format("{}_{}", tensor, part); }

ringattn_compressed read_parts(std::string_view name, const ringattn_compressed* given) {
  need(given, fmt::format("compressed_{}", name).c_str());
  return read_struct("ringattn_compressed", given, kFirstCompressed);
}

std::array<std::byte*, kMaxTables> read_tables(const TensorReader& reader, std::string_view name,
                                               const ringattn_compressed& parts, const RowFormat& format,
                                               const RowShape& shape, std::int64_t sequences) {
  std::array<std::byte*, kMaxTables> tables{};
  std::size_t at = 0;
  for (const FormatTable& table : format_tables(format, shape, sequences)) {
    tables[at] = reader
                     .part(part_name(name, table.name).c_str(), parts.tables[at], part_types(table.type, shape.dtype),
                           table.shape, true)
                     .data;
    ++at;
  }
  return tables;
}

}  // namespace

std::vector<DLDataType> part_types(StoredType type, Dtype dtype) {
  switch (type) {
    case StoredType::kF32:
      return {{kDLFloat, 32, 1}};
    case StoredType::kE4m3:
      return {{kDLUInt, 8, 1}, {kE4m3Code, 8, 1}};
    case StoredType::kI8:
      return {{kDLInt, 8, 1}};
    case StoredType::kU8:
      return {{kDLUInt, 8, 1}};
    case StoredType::kI32:
      return {{kDLInt, 32, 1}};
    case StoredType::kDtype:
      break;
  }
  const auto bits = static_cast<std::uint8_t>(8 * size_of(dtype));
  return {{static_cast<std::uint8_t>(dtype == Dtype::kBf16 ? kDLBfloat : kDLFloat), bits, 1}};
}

bool is_plain(std::string_view name, const RowFormat& format, const DLTensor* plain,
              const ringattn_compressed* compressed) {
  if (format.is_plain()) {
    if (compressed != nullptr) {
      fail(ErrorCode::kUsage, fmt::format("compressed_{} is given", name),
           fmt::format("the spec's {}_format is NULL", name), "Name the format when the object is created.");
    }
    need(plain, std::string(name).c_str());
  } else if (plain != nullptr) {
    fail(ErrorCode::kUsage, fmt::format("{} is given", name),
         fmt::format("the spec's {}_format is {}", name, describe(format)),
         fmt::format("Pass compressed_{} instead.", name));
  }
  return format.is_plain();
}

CompressedRows read_rows(const TensorReader& reader, std::string_view name, const ringattn_compressed* given,
                         const RowFormat& format, const RowShape& shape, std::int64_t tokens, std::int64_t sequences) {
  const ringattn_compressed parts = read_parts(name, given);
  CompressedRows rows;
  std::size_t at = 0;
  for (const FormatStream& stream : format_streams(format, shape)) {
    const Part part =
        reader.part(part_name(name, stream.name).c_str(), parts.streams[at], part_types(stream.type, shape.dtype),
                    std::array{tokens, stream.heads, stream.width}, false);
    rows.streams[at++] = {part.data, part.strides[0], part.strides[1]};
  }
  rows.tables = read_tables(reader, name, parts, format, shape, sequences);
  return rows;
}

CompressedRows read_keys(const TensorReader& reader, std::string_view name, const ringattn_compressed* given,
                         const RowFormat& format, const RowShape& shape, std::int64_t tokens, std::int64_t sequences) {
  const CompressedRows rows = read_rows(reader, name, given, format, shape, tokens, sequences);
  if (format.encoding == RowEncoding::kHybrid && reader.memory() == MemoryKind::kHost) {
    if (const auto invalid = find_invalid_element(format, shape, rows, {})) {
      refuse_invalid_element(name, format, shape, *invalid, ErrorCode::kUsage);
    }
  }
  return rows;
}

CompressedCache read_cache(const TensorReader& reader, std::string_view name, const ringattn_compressed* given,
                           const RowFormat& format, const RowShape& shape, std::int64_t sequences) {
  const ringattn_compressed parts = read_parts(name, given);
  CompressedCache cache;
  cache.format = format;
  cache.shape = shape;
  std::size_t at = 0;
  std::array<std::int64_t, 2> pages{-1, -1};  // page count and page size of the first stream, required of the others
  for (const FormatStream& stream : format_streams(format, shape)) {
    const Part part =
        reader.part(part_name(name, stream.name).c_str(), parts.streams[at], part_types(stream.type, shape.dtype),
                    std::array{pages[0], pages[1], stream.heads, stream.width}, false);
    pages = {part.lengths[0], part.lengths[1]};
    cache.streams[at++] = {part.data, part.strides[0], part.strides[1], part.strides[2]};
  }
  cache.pages = pages[0];
  cache.page_size = pages[1];
  cache.tables = read_tables(reader, name, parts, format, shape, sequences);
  return cache;
}

}  // namespace ringattn::c
