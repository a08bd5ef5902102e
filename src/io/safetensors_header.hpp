// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file: 8 bytes of length (little endian), a JSON text of that many bytes, then the data.
// It is checked here, once, for everything that readers rely on later: sizes don't overflow, and tensors tile the data
// exactly. Pure: no file is opened.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"
#include "io/json_reader.hpp"

namespace ringattn {

// Element types that the format knows.
enum class FileDtype : std::uint8_t {
  kBool,
  kF4,
  kF6E2m3,
  kF6E3m2,
  kU8,
  kI8,
  kF8E5m2,
  kF8E4m3,
  kF8E8m0,
  kF8E4m3fnuz,
  kF8E5m2fnuz,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

std::string_view file_dtype_name(FileDtype dtype);  // as in a header: "BF16"
std::optional<FileDtype> parse_file_dtype(std::string_view name);
int bits_of(FileDtype dtype);
FileDtype file_dtype(Dtype dtype);
// The corresponding type of q, k and v; absent if they can't have it.
std::optional<Dtype> attention_dtype(FileDtype dtype);

struct HeaderLimits {
  static constexpr std::uint64_t kBytes = 100'000'000;  // as in the reference library
  static constexpr std::size_t kTensors = std::size_t{1} << 16;
  static constexpr std::size_t kNameBytes = 4096;
  static constexpr std::size_t kRank = 64;
  static constexpr std::size_t kMetadata = std::size_t{1} << 14;
};

struct TensorInfo {
  std::string name;
  FileDtype dtype = FileDtype::kU8;
  std::vector<std::int64_t> shape;  // the product of its non-zero dimensions fits, in bits, into 63 bits
  std::int64_t begin = 0;           // bytes [begin, end) of the data; exactly what dtype and shape need
  std::int64_t end = 0;

  std::int64_t bytes() const { return end - begin; }
};

// "[4096, 8, 128]"
std::string shape_text(std::span<const std::int64_t> shape);

struct SafetensorsHeader {
  std::int64_t data_offset = 0;     // of the data in the file
  std::int64_t data_bytes = 0;      // each byte belongs to exactly one tensor
  std::vector<TensorInfo> tensors;  // ascending by name
  std::map<std::string, std::string, std::less<>> metadata;

  // nullptr if there is no such tensor.
  const TensorInfo* find(std::string_view name) const;
};

// Reads a header in pieces, so that a hostile one is refused early.
class SafetensorsHeaderReader {
 public:
  // `length` is the file's first 8 bytes. Throws kFile if a file of `file_bytes` bytes can't have a header of that
  // length.
  SafetensorsHeaderReader(std::string path, const std::array<std::byte, 8>& length, std::int64_t file_bytes);
  SafetensorsHeaderReader(const SafetensorsHeaderReader&) = delete;  // scan_ refers to source_
  SafetensorsHeaderReader& operator=(const SafetensorsHeaderReader&) = delete;
  // Throws kFile for a file that is too short to have a length.
  static void check_file_size(const std::string& path, std::int64_t file_bytes);

  // Bytes of JSON still to be fed.
  std::size_t missing() const { return bytes_ - text_.size(); }
  // Takes the next piece, of at most missing() bytes. Throws kFile at the first byte that breaks a limit.
  void feed(std::string_view piece);
  // The header, once nothing is missing. Throws kFile with the reason if it is invalid.
  SafetensorsHeader finish() const;

 private:
  TextSource source_;
  std::int64_t file_bytes_;
  std::size_t bytes_ = 0;
  JsonScan scan_;
  std::string text_;
};

// The header of a whole file in memory. Throws kFile.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& path);

}  // namespace ringattn
