// SPDX-License-Identifier: Apache-2.0
#include "io/block_scales.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <string_view>

#include "base/e4m3.hpp"
#include "base/error.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kSuffix = "_scale_inv";

std::int64_t blocks_of(std::int64_t extent) { return (extent + kScaleBlock - 1) / kScaleBlock; }

// True for the name of kv_b_proj's scales: kv_b_proj_scale_inv or ….kv_b_proj.weight_scale_inv.
bool is_scales(std::string_view name) {
  return name == "weight_scale_inv" || name.ends_with("kv_b_proj_scale_inv") ||
         name.ends_with("kv_b_proj.weight_scale_inv");
}

std::optional<TensorSource> find_scales(const SafetensorsFile& file, const InputNames& names,
                                        const TensorSource& matrix) {
  const std::string own = matrix.info->name + std::string(kSuffix);
  if (file.contains(own)) return file.tensor(own);
  if (names.kv_b_proj) return std::nullopt;
  std::optional<TensorSource> found;
  for (const std::string_view name : file.names()) {
    if (!is_scales(name)) continue;
    const TensorSource tensor = file.tensor(name);
    if (found) {
      require(false, tensor, fmt::format("{}, and either may belong to kv_b_proj", described(*found)),
              {"Leave one of them out, or name kv_b_proj with ", setting("tensors"),
               fmt::format(": its scales are called as it is, with {} after the name.", kSuffix)});
    }
    found = tensor;
  }
  return found;
}

// Rounds to odd: an inexact number becomes the adjacent float with an odd last bit. Rounding the result to fewer bits
// then equals rounding the number itself.
float round_to_odd(double number) {
  const auto nearest = static_cast<float>(number);
  if (static_cast<double>(nearest) == number) return nearest;
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::abs(static_cast<double>(nearest)) > std::abs(number)) --bits;
  return std::bit_cast<float>(bits | 1U);
}

}  // namespace

std::optional<BlockScales> find_block_scales(const SafetensorsFile& file, const InputNames& names,
                                             const TensorSource& matrix) {
  const std::optional<TensorSource> tensor = find_scales(file, names, matrix);
  if (matrix.info->dtype != FileDtype::kF8E4m3) {
    if (!tensor) return std::nullopt;
    require(false, matrix, fmt::format("the file has {}, the scales of an F8_E4M3 matrix", tensor->text()),
            "Leave them out if they have been applied; otherwise give the F8_E4M3 matrix of the checkpoint.");
  }
  require(matrix.info->shape.size() == 2, matrix, "it must have 2 axes", "Give kv_b_proj as it is in the checkpoint.");
  const std::vector<std::int64_t> shape{blocks_of(matrix.info->shape[0]), blocks_of(matrix.info->shape[1])};
  const std::string wanted = fmt::format("scales of its blocks of {0} x {0} are {1}", kScaleBlock, shape_text(shape));
  require(tensor.has_value(), matrix, wanted + ", and the file has none",
          fmt::format("Write them in F32 as {}{}, or give the dequantized matrix.", matrix.info->name, kSuffix));
  const auto dtype = attention_dtype(tensor->info->dtype);
  require(dtype.has_value(), *tensor, "scales are F32, BF16 or F16", "Convert it to F32.");
  require(tensor->info->shape == shape, *tensor, fmt::format("{}: {}", described(matrix), wanted),
          "Give the scales that the checkpoint has for the matrix.");
  BlockScales found{*tensor, shape[1], {}};
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor->info->bytes()));
  tensor->shard->read(*tensor->info, 0, bytes);
  tensor->shard->check_unchanged();
  for (std::size_t at = 0; at < bytes.size(); at += size_of(*dtype)) {
    const float scale = load_element(bytes.data() + at, *dtype);
    const auto block = static_cast<std::int64_t>(found.scales.size());
    require(std::isfinite(scale), *tensor, fmt::format("[{}, {}] is {}", block / shape[1], block % shape[1], scale),
            "Write a finite scale for each block.");
    found.scales.push_back(scale);
  }
  return found;
}

void read_scaled_rows(const TensorSource& matrix, const BlockScales& scales, std::int64_t first, Dtype dtype,
                      std::span<std::byte> target) {
  const std::int64_t columns = matrix.info->shape[1];
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t rows = static_cast<std::int64_t>(target.size()) / (columns * element);
  std::vector<std::byte> codes(static_cast<std::size_t>(rows * columns));
  matrix.shard->read(*matrix.info, first * columns, codes);
  std::byte* to = target.data();
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* const of_row = scales.scales.data() + (first + row) / kScaleBlock * scales.columns;
    for (std::int64_t column = 0; column < columns; ++column, to += element) {
      const float code =
          e4m3_to_float(std::to_integer<std::uint8_t>(codes[static_cast<std::size_t>(row * columns + column)]));
      const float scale = of_row[column / kScaleBlock];
      // The product is exact: 4 significant bits times 24.
      const double product = static_cast<double>(code) * static_cast<double>(scale);
      store_element(to, dtype, dtype == Dtype::kF32 ? static_cast<float>(product) : round_to_odd(product));
      if (std::isfinite(load_element(to, dtype))) continue;
      require(!std::isnan(code), matrix, fmt::format("its quantized value at [{}, {}] is NaN", first + row, column),
              "Give the checkpoint's matrix; quantizers write finite values.");
      require(false, matrix,
              fmt::format("[{}, {}] is {} times {}, beyond {}", first + row, column, code, scale, dtype_name(dtype)),
              {"Convert q and latents to bf16 or fp32, or check the scales."});
    }
  }
}

}  // namespace ringattn
