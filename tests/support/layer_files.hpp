// SPDX-License-Identifier: Apache-2.0
// Small quantized layers in files, packed value by value as the documentation of the formats says.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.hpp"
#include "io/safetensors_writer.hpp"

namespace ringattn::testing {

// Tensors of a file, which a test may change before they are written.
struct LayerFile {
  struct Tensor {
    FileDtype dtype;
    std::vector<std::int64_t> shape;
    std::vector<std::byte> bytes;
  };
  std::map<std::string, Tensor> tensors;

  template <class Value>
  void set(const std::string& name, FileDtype dtype, std::vector<std::int64_t> shape,
           const std::vector<Value>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    tensors[name] = {dtype, std::move(shape), {bytes.begin(), bytes.end()}};
  }
  // Tensors of zeros, such as tensors by which a format is recognized.
  void set_zeros(const std::string& name, FileDtype dtype, std::vector<std::int64_t> shape) {
    std::int64_t bits = bits_of(dtype);
    for (const std::int64_t extent : shape) bits *= extent;
    tensors[name] = {dtype, std::move(shape), std::vector<std::byte>(static_cast<std::size_t>(bits / 8))};
  }
  void write(const std::string& path) const {
    std::vector<OutputTensor> planned;
    for (const auto& [name, tensor] : tensors) planned.push_back({name, tensor.dtype, tensor.shape});
    const auto writer = SafetensorsWriter::create(plan_safetensors(planned, {}), path, true);
    for (const auto& [name, tensor] : tensors) writer->write_bytes(name, tensor.bytes);
    writer->commit();
  }
};

// An int4 layer: q(n, k) and zero(n, group) from 0 to 15, and scale(n, group), exact in fp16.
struct Int4Layer {
  std::int64_t rows = 24, features = 256;

  std::int64_t groups() const { return features / 128; }
  static int q(std::int64_t n, std::int64_t k) { return static_cast<int>((5 * n + 3 * k + n * k / 7) % 16); }
  static int zero(std::int64_t n, std::int64_t group) { return static_cast<int>((3 * n + 7 * group) % 14 + 1); }
  static float scale(std::int64_t n, std::int64_t group) { return static_cast<float>(1 + n + 32 * group) / 256.0F; }

  // Words of 8 four-bit values. From the low end, the n-th four bits of a word are cell(word, order[n]).
  template <class At>
  static std::vector<std::int32_t> words(std::int64_t lines, std::int64_t width, const At& at) {
    std::vector<std::int32_t> made;
    for (std::int64_t line = 0; line < lines; ++line) {
      for (std::int64_t column = 0; column < width; ++column) {
        std::uint32_t word = 0;
        for (int i = 0; i < 8; ++i) word |= static_cast<std::uint32_t>(at(line, column, i)) << (4 * i);
        made.push_back(static_cast<std::int32_t>(word));
      }
    }
    return made;
  }
  std::vector<std::uint16_t> scales(bool transposed) const {
    std::vector<std::uint16_t> made;
    for (std::int64_t i = 0; i < (transposed ? groups() : rows); ++i) {
      for (std::int64_t j = 0; j < (transposed ? rows : groups()); ++j) {
        made.push_back(float_to_f16(transposed ? scale(j, i) : scale(i, j)));
      }
    }
    return made;
  }

  void pack_quantized(LayerFile& file, const std::string& prefix, bool zeros) const {
    using I = std::int64_t;
    file.set(prefix + "weight_packed", FileDtype::kI32, {rows, features / 8},
             words(rows, features / 8, [](I n, I word, int i) { return q(n, 8 * word + i); }));
    file.set(prefix + "weight_scale", FileDtype::kF16, {rows, groups()}, scales(false));
    file.set(prefix + "weight_shape", FileDtype::kI64, {2}, std::vector<std::int64_t>{rows, features});
    if (!zeros) return;
    file.set(prefix + "weight_zero_point", FileDtype::kI32, {rows / 8, groups()},
             words(rows / 8, groups(), [](I word, I group, int i) { return zero(8 * word + i, group); }));
  }
  // `less`: subtracted from a zero point before it is stored.
  void gptq(LayerFile& file, const std::string& prefix, int less) const {
    using I = std::int64_t;
    file.set(prefix + "qweight", FileDtype::kI32, {features / 8, rows},
             words(features / 8, rows, [](I word, I n, int i) { return q(n, 8 * word + i); }));
    file.set(prefix + "qzeros", FileDtype::kI32, {groups(), rows / 8},
             words(groups(), rows / 8, [&](I group, I word, int i) { return zero(8 * word + i, group) - less; }));
    file.set(prefix + "scales", FileDtype::kF16, {groups(), rows}, scales(true));
    std::vector<std::int32_t> index;
    for (std::int64_t k = 0; k < features; ++k) index.push_back(static_cast<std::int32_t>(k / 128));
    file.set(prefix + "g_idx", FileDtype::kI32, {features}, index);
  }
  void awq(LayerFile& file, const std::string& prefix) const {
    using I = std::int64_t;
    constexpr int kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
    file.set(prefix + "qweight", FileDtype::kI32, {features, rows / 8},
             words(features, rows / 8, [&](I k, I word, int i) { return q(8 * word + kOrder[i], k); }));
    file.set(prefix + "qzeros", FileDtype::kI32, {groups(), rows / 8},
             words(groups(), rows / 8, [&](I group, I word, int i) { return zero(8 * word + kOrder[i], group); }));
    file.set(prefix + "scales", FileDtype::kF16, {groups(), rows}, scales(true));
  }
};

// An int8 layer [rows, features], whose scales are powers of two.
inline void int8_layer(LayerFile& file, const std::string& prefix, std::int64_t rows, std::int64_t features) {
  std::vector<std::int8_t> values;
  for (std::int64_t i = 0; i < rows * features; ++i)
    values.push_back(static_cast<std::int8_t>((37 * i + i / 11) % 256 - 128));
  std::vector<float> scales;
  for (std::int64_t n = 0; n < rows; ++n) scales.push_back(n % 2 == 0 ? 0x1p-7F : 0x1p-9F);
  file.set(prefix + "weight", FileDtype::kI8, {rows, features}, values);
  file.set(prefix + "weight_scale", FileDtype::kF32, {rows, 1}, scales);
}

}  // namespace ringattn::testing
