// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/synthetic_weights.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/common/synthetic.hpp"
#include "ops/linear/round_to_nearest.hpp"

namespace ringattn {

namespace {

constexpr auto kWeightTensor = static_cast<SyntheticTensor>(1);  // the second of the job's, after x
constexpr std::int64_t kRowsAtOnce = 64;

// Calls `use` with each row of the part's values, [in_features] of the dtype.
template <class Use>
void for_each_row(std::uint64_t seed, Dtype dtype, FeatureRange rows, std::int64_t in_features, const Use& use) {
  const std::size_t row_bytes = static_cast<std::size_t>(in_features) * size_of(dtype);
  std::vector<std::byte> block(row_bytes * static_cast<std::size_t>(std::min(kRowsAtOnce, rows.size())));
  for (std::int64_t begin = rows.begin; begin < rows.end; begin += kRowsAtOnce) {
    const PackedRun run{begin, std::min(rows.end, begin + kRowsAtOnce)};
    fill_synthetic(seed, kWeightTensor, {&run, 1},
                   dense_view(static_cast<void*>(block.data()), dtype, run.tokens(), 1, in_features));
    for (std::int64_t row = 0; row < run.tokens(); ++row) {
      use(begin - rows.begin + row, block.data() + static_cast<std::size_t>(row) * row_bytes);
    }
  }
}

}  // namespace

void SyntheticWeights::quantize(FeatureRange rows, FeatureRange features, std::byte* data, float* scales) const {
  std::vector<float> values(static_cast<std::size_t>(in_features_));
  std::vector<std::int8_t> integers(values.size());
  std::vector<std::byte> packed(static_cast<std::size_t>(weight_row_bytes(format_, dtype_, in_features_)));
  std::vector<float> row_of_scales(static_cast<std::size_t>(row_scales(format_, in_features_)));
  const std::int64_t row_bytes = weight_row_bytes(format_, dtype_, features.size());
  const std::int64_t part_scales = row_scales(format_, features.size());
  const std::int64_t first_scale = format_ == WeightFormat::kInt4 ? features.begin / kInt4Group : 0;
  for_each_row(seed_, dtype_, rows, in_features_, [&](std::int64_t row, const std::byte* from) {
    for (std::size_t k = 0; k < values.size(); ++k) values[k] = load_element(from + k * size_of(dtype_), dtype_);
    quantize_row(values, {format_, dtype_}, integers, packed.data(), row_of_scales.data());
    if (data != nullptr) {
      std::memcpy(data + row * row_bytes, packed.data() + weight_row_bytes(format_, dtype_, features.begin),
                  static_cast<std::size_t>(row_bytes));
    }
    if (scales != nullptr) std::copy_n(row_of_scales.data() + first_scale, part_scales, scales + row * part_scales);
  });
}

void SyntheticWeights::read(FeatureRange rows, FeatureRange features, std::byte* data) const {
  if (format_ != WeightFormat::kFloat) return quantize(rows, features, data, nullptr);
  const std::int64_t row_bytes = weight_row_bytes(format_, dtype_, features.size());
  for_each_row(seed_, dtype_, rows, in_features_, [&](std::int64_t row, const std::byte* from) {
    std::memcpy(data + row * row_bytes, from + weight_row_bytes(format_, dtype_, features.begin),
                static_cast<std::size_t>(row_bytes));
  });
}

void SyntheticWeights::read_scales(FeatureRange rows, FeatureRange features, float* scales, std::uint8_t*) const {
  if (format_ != WeightFormat::kFloat) quantize(rows, features, nullptr, scales);
}

}  // namespace ringattn
