// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/layer_weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

static_assert(std::endian::native == std::endian::little);  // words of int32 are read as bytes

constexpr std::int64_t kPerWord = 8;  // 4-bit values of an int32
// The column in a word whose value is in the n-th four bits, in AWQ.
constexpr int kAwqOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr std::int64_t kBlockBytes = std::int64_t{4} << 20;  // bytes of a transposed tensor that are read at a time

std::int64_t words_of(std::int64_t values) { return (values + kPerWord - 1) / kPerWord; }

const std::vector<std::int64_t>& shape_of(const TensorSource& tensor) { return tensor.info->shape; }

void need_dtype(const TensorSource& tensor, FileDtype dtype) {
  require(tensor.info->dtype == dtype, tensor, fmt::format("it must be {}", file_dtype_name(dtype)),
          "Check how the layer was written.");
}

void need_shape(const TensorSource& tensor, const std::vector<std::int64_t>& shape, const TensorSource& weight) {
  require(shape_of(tensor) == shape, tensor, fmt::format("it must be {}, as {}", shape_text(shape), described(weight)),
          "Check that the tensors are of one layer, and not transposed.");
}

void need_matrix(const TensorSource& tensor) {
  const std::vector<std::int64_t>& shape = shape_of(tensor);
  require(shape.size() == 2 && shape[0] > 0 && shape[1] > 0, tensor, "it must be a matrix",
          "Check how the layer was written.");
}

Dtype scale_dtype(const TensorSource& scales) {
  const std::optional<Dtype> dtype = attention_dtype(scales.info->dtype);
  require(dtype.has_value(), scales, "scales are F32, BF16 or F16", "Check how the layer was written.");
  return *dtype;
}

// Reads rows [rows.begin, rows.end) and columns of a matrix in a file to `target`, dense.
void read_block(const TensorSource& matrix, FeatureRange rows, FeatureRange columns, std::int64_t element_bytes,
                std::byte* target) {
  const std::int64_t width = shape_of(matrix).size() == 1 ? 1 : shape_of(matrix)[1];
  if (rows.size() == 0 || columns.size() == 0) return;
  const auto bytes = [&](std::int64_t elements) { return static_cast<std::size_t>(elements * element_bytes); };
  if (columns.size() == width) {
    matrix.shard->read(*matrix.info, rows.begin * width * element_bytes, {target, bytes(rows.size() * width)});
    return;
  }
  for (std::int64_t row = rows.begin; row < rows.end; ++row, target += bytes(columns.size())) {
    matrix.shard->read(*matrix.info, (row * width + columns.begin) * element_bytes, {target, bytes(columns.size())});
  }
}

std::vector<std::uint32_t> read_words(const TensorSource& matrix, FeatureRange rows, FeatureRange columns) {
  std::vector<std::uint32_t> words(static_cast<std::size_t>(rows.size() * columns.size()));
  read_block(matrix, rows, columns, 4, reinterpret_cast<std::byte*>(words.data()));
  return words;
}

std::uint32_t nibble(std::uint32_t word, int index) { return word >> (4 * index) & 15U; }

// The index of a column's four bits in its word.
int awq_index(std::int64_t column) {
  return static_cast<int>(std::ranges::find(kAwqOrder, static_cast<int>(column % kPerWord)) - std::begin(kAwqOrder));
}

}  // namespace

LayerWeights::LayerWeights(LayerTensors tensors, const std::optional<QuantizationConfig>& config)
    : tensors_(std::move(tensors)) {
  if (config) config->check(tensors_);
  need_matrix(tensors_.weight);
  switch (tensors_.format) {
    case LayerFormat::kFloat:
      check_float();
      break;
    case LayerFormat::kIntQuantized:
      check_int8();
      break;
    case LayerFormat::kPackQuantized:
      check_pack_quantized();
      break;
    case LayerFormat::kGptq:
      check_gptq(config);
      break;
    case LayerFormat::kAwq:
      check_awq();
      break;
  }
}

void LayerWeights::check_float() {
  dtype_ = row_dtype(tensors_.weight);
  out_features_ = shape_of(tensors_.weight)[0];
  in_features_ = shape_of(tensors_.weight)[1];
}

void LayerWeights::check_int8() {
  format_ = WeightFormat::kInt8;
  const TensorSource& scales = *tensors_.scales;
  out_features_ = shape_of(tensors_.weight)[0];
  in_features_ = shape_of(tensors_.weight)[1];
  dtype_ = scale_dtype(scales);
  if (tensors_.zeros) {
    require(false, *tensors_.zeros, "int8 weights are symmetric: they have no zero points",
            "Quantize the layer symmetrically.");
  }
  const std::vector<std::int64_t>& shape = shape_of(scales);
  const bool each_row = shape == std::vector{out_features_} || shape == std::vector<std::int64_t>{out_features_, 1};
  require(each_row, scales, fmt::format("int8 weights have one scale for each of {} rows", out_features_),
          "Quantize the layer per channel.");
}

void LayerWeights::check_groups(std::int64_t groups) const {
  const TensorSource& scales = *tensors_.scales;
  if (groups > 0 && in_features_ == groups * kInt4Group) return;
  const bool whole = groups > 0 && in_features_ % groups == 0;
  require(false, scales,
          whole ? fmt::format("it has groups of {} of {} features", in_features_ / groups, in_features_)
                : fmt::format("{} features are not a multiple of {}", in_features_, groups),
          fmt::format("Groups of {} are read; quantize the layer with these.", kInt4Group));
}

void LayerWeights::check_pack_quantized() {
  format_ = WeightFormat::kInt4;
  const TensorSource& weight = tensors_.weight;
  const TensorSource& shape = *tensors_.shape;
  need_dtype(weight, FileDtype::kI32);
  const std::vector<std::int64_t> sizes = read_integers(shape);
  require(sizes.size() == 2 && sizes[0] > 0 && sizes[1] > 0 && sizes[0] == shape_of(weight)[0], shape,
          fmt::format("it must hold the shape of the weight; {}", described(weight)),
          "Check how the layer was written.");
  out_features_ = sizes[0];
  in_features_ = sizes[1];
  const std::int64_t bits = 32 * shape_of(weight)[1] / in_features_;
  require(bits == 4 && in_features_ % kPerWord == 0 && shape_of(weight)[1] * kPerWord == in_features_, weight,
          fmt::format("a row of {} features has {} bits for each", in_features_, bits),
          "Values of 4 bits are read, and 8 bits as int-quantized.");
  dtype_ = scale_dtype(*tensors_.scales);
  need_matrix(*tensors_.scales);
  check_groups(shape_of(*tensors_.scales)[1]);
  need_shape(*tensors_.scales, {out_features_, in_features_ / kInt4Group}, weight);
  if (!tensors_.zeros) return;
  has_zeros_ = true;
  need_dtype(*tensors_.zeros, FileDtype::kI32);
  need_shape(*tensors_.zeros, {words_of(out_features_), in_features_ / kInt4Group}, weight);
}

void LayerWeights::check_gptq(const std::optional<QuantizationConfig>& config) {
  format_ = WeightFormat::kInt4;
  const TensorSource& weight = tensors_.weight;
  const TensorSource& scales = *tensors_.scales;
  const TensorSource& zeros = *tensors_.zeros;
  need_dtype(weight, FileDtype::kI32);
  need_dtype(zeros, FileDtype::kI32);
  need_matrix(scales);
  need_matrix(zeros);
  dtype_ = scale_dtype(scales);
  out_features_ = shape_of(weight)[1];
  require(shape_of(scales)[1] == out_features_, scales,
          fmt::format("{}: both have a column for each row of W", described(weight)),
          "Check that the tensors are of one layer, and not transposed.");
  const std::int64_t bits = 32 * shape_of(zeros)[1] / out_features_;
  require(bits == 4 && shape_of(zeros)[1] * kPerWord == out_features_, zeros,
          fmt::format("{} rows of W have {} bits for each zero", out_features_, bits),
          "GPTQ layers of 4 bits are read.");
  in_features_ = shape_of(weight)[0] * kPerWord;
  check_groups(shape_of(scales)[0]);
  need_shape(zeros, {in_features_ / kInt4Group, out_features_ / kPerWord}, weight);
  has_zeros_ = true;
  if (!config) {
    fail(ErrorCode::kFile, fmt::format("{} is of GPTQ, and no config says how its zeros are stored", tensors_.text()),
         "they are less one, or as they are, by the config's checkpoint_format",
         {"Name the model's config with ", setting("quantization_config", "config.json"), "."});
  }
  zeros_less_one_ = config->zeros_less_one;
  if (!tensors_.group_index) return;
  const TensorSource& index = *tensors_.group_index;
  need_dtype(index, FileDtype::kI32);
  need_shape(index, {in_features_}, weight);
  const std::vector<std::int64_t> group_of = read_integers(index);
  for (std::int64_t k = 0; k < in_features_; ++k) {
    const std::int64_t group = group_of[static_cast<std::size_t>(k)];
    require(group == k / kInt4Group, index,
            fmt::format("feature {} is in group {}: the layer has activation ordering (desc_act)", k, group),
            "Quantize the model with desc_act false.");
  }
}

void LayerWeights::check_awq() {
  format_ = WeightFormat::kInt4;
  const TensorSource& weight = tensors_.weight;
  const TensorSource& scales = *tensors_.scales;
  const TensorSource& zeros = *tensors_.zeros;
  need_dtype(weight, FileDtype::kI32);
  need_dtype(zeros, FileDtype::kI32);
  need_matrix(scales);
  dtype_ = scale_dtype(scales);
  in_features_ = shape_of(weight)[0];
  out_features_ = shape_of(scales)[1];
  const std::int64_t bits = 32 * shape_of(weight)[1] / out_features_;
  require(bits == 4 && shape_of(weight)[1] * kPerWord == out_features_, weight,
          fmt::format("{} have {} bits a value, if the layer is of AWQ", described(scales), bits),
          "AWQ layers of 4 bits are read. Check that the tensors are of one layer, and not transposed.");
  check_groups(shape_of(scales)[0]);
  need_shape(zeros, {in_features_ / kInt4Group, out_features_ / kPerWord}, weight);
  has_zeros_ = true;
}

void LayerWeights::read(FeatureRange rows, FeatureRange features, std::byte* data) const {
  const TensorSource& weight = tensors_.weight;
  const std::int64_t row_bytes = weight_row_bytes(format_, dtype_, features.size());
  switch (tensors_.format) {
    case LayerFormat::kFloat:
      return read_block(weight, rows, features, static_cast<std::int64_t>(size_of(dtype_)), data);
    case LayerFormat::kIntQuantized:
      return read_block(weight, rows, features, 1, data);
    case LayerFormat::kPackQuantized:
      return read_block(weight, rows, {features.begin / kPerWord, features.end / kPerWord}, 4, data);
    case LayerFormat::kGptq: {
      const std::int64_t at_once =
          std::max<std::int64_t>(1, kBlockBytes / (4 * std::max<std::int64_t>(1, rows.size())));
      for (std::int64_t begin = features.begin / kPerWord; begin < features.end / kPerWord; begin += at_once) {
        const FeatureRange lines{begin, std::min(begin + at_once, features.end / kPerWord)};
        const std::vector<std::uint32_t> words = read_words(weight, lines, rows);
        std::byte* const first = data + 4 * (begin - features.begin / kPerWord);
        for (std::int64_t n = 0; n < rows.size(); ++n) {
          for (std::int64_t line = 0; line < lines.size(); ++line) {
            std::memcpy(first + n * row_bytes + 4 * line, &words[static_cast<std::size_t>(line * rows.size() + n)], 4);
          }
        }
      }
      return;
    }
    case LayerFormat::kAwq: {
      const FeatureRange columns{rows.begin / kPerWord, words_of(rows.end)};
      const std::int64_t width = columns.size();
      const std::int64_t at_once =
          std::max<std::int64_t>(2, kBlockBytes / (4 * std::max<std::int64_t>(1, width)) / 2 * 2);
      for (std::int64_t begin = features.begin; begin < features.end; begin += at_once) {
        const FeatureRange lines{begin, std::min(begin + at_once, features.end)};
        const std::vector<std::uint32_t> words = read_words(weight, lines, columns);
        for (std::int64_t n = rows.begin; n < rows.end; ++n) {
          const int index = awq_index(n);
          const std::uint32_t* word = words.data() + (n / kPerWord - columns.begin);
          std::byte* target = data + (n - rows.begin) * row_bytes + (begin - features.begin) / 2;
          for (std::int64_t k = 0; k < lines.size(); k += 2, word += 2 * width) {
            *target++ = static_cast<std::byte>(nibble(word[0], index) | nibble(word[width], index) << 4);
          }
        }
      }
      return;
    }
  }
}

void LayerWeights::read_scales(FeatureRange rows, FeatureRange features, float* scales, std::uint8_t* zeros) const {
  if (format_ == WeightFormat::kFloat) return;
  const std::int64_t groups = row_scales(format_, features.size());
  const FeatureRange columns = format_ == WeightFormat::kInt8
                                   ? FeatureRange{0, 1}
                                   : FeatureRange{features.begin / kInt4Group, features.end / kInt4Group};
  const auto element = static_cast<std::int64_t>(size_of(dtype_));
  std::vector<std::byte> raw(static_cast<std::size_t>(rows.size() * groups * element));
  read_block(*tensors_.scales, transposed() ? columns : rows, transposed() ? rows : columns, element, raw.data());
  for (std::int64_t n = 0; n < rows.size(); ++n) {
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::int64_t at = transposed() ? group * rows.size() + n : n * groups + group;
      const float scale = load_element(raw.data() + at * element, dtype_);
      if (!std::isfinite(scale) || std::signbit(scale)) {
        fail(ErrorCode::kFile,
             fmt::format("{} has a scale {} at row {} of W, group {}", tensors_.scales->text(), scale, rows.begin + n,
                         columns.begin + group),
             "a scale is finite and not negative", "Check how the layer was quantized.");
      }
      scales[n * groups + group] = scale;
    }
  }
  if (has_zeros_) read_zeros(rows, columns, zeros);
}

void LayerWeights::read_zeros(FeatureRange rows, FeatureRange groups, std::uint8_t* zeros) const {
  const FeatureRange words_of_rows{rows.begin / kPerWord, words_of(rows.end)};
  const std::vector<std::uint32_t> words =
      read_words(*tensors_.zeros, transposed() ? groups : words_of_rows, transposed() ? words_of_rows : groups);
  const bool awq = tensors_.format == LayerFormat::kAwq;
  for (std::int64_t n = rows.begin; n < rows.end; ++n) {
    const std::int64_t line = n / kPerWord - words_of_rows.begin;
    const int index = awq ? awq_index(n) : static_cast<int>(n % kPerWord);
    for (std::int64_t group = 0; group < groups.size(); ++group) {
      const std::int64_t at = transposed() ? group * words_of_rows.size() + line : line * groups.size() + group;
      std::uint32_t zero = nibble(words[static_cast<std::size_t>(at)], index);
      if (zeros_less_one_ && zero == 15) {
        fail(ErrorCode::kFile,
             fmt::format("{} has a zero stored as 15 at row {} of W, group {}", tensors_.zeros->text(), n,
                         groups.begin + group),
             "less one, that is a zero of 16, which kernels take for 16 or for 0",
             "Quantize the layer with checkpoint_format gptq_v2.");
      }
      if (zeros_less_one_) ++zero;
      zeros[(n - rows.begin) * groups.size() + group] = static_cast<std::uint8_t>(zero);
    }
  }
}

}  // namespace ringattn
