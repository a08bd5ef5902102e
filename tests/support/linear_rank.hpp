// SPDX-License-Identifier: Apache-2.0
// One rank's part of a Linear, in the memory of its backend, and the expected result.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "ops/linear/linear.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/linear_runner.hpp"

namespace ringattn::testing {

// A layer's data, and y [rows, N] of a single kernel call.
struct LinearCase {
  LinearData data;
  std::vector<std::byte> y;
};

// `kernel`: the backend's kernel whose bits are expected.
inline LinearCase make_linear_case(const LinearSpec& spec, std::int64_t rows, std::uint64_t seed,
                                   const KernelRow<LinearSpec>& kernel) {
  LinearCase made;
  made.data = linear_data(spec, rows, seed);
  made.y = multiplied(kernel, made.data);
  return made;
}

class LinearRank {
 public:
  LinearRank(Linear& layer, const Transport& world, const LinearCase& given)
      : layer_(layer),
        part_(part_of(layer, world, given.data)),
        expected_(given.y),
        x_(layer.backend(), part_.x.size()) {
    x_.write(part_.x);
    LinearWeights weights = part_.weights();
    place(weights.matrix, part_.matrices[0]);
    if (part_.spec.gated) place(weights.up, part_.matrices[1]);
    layer_.load(weights, stream());
    y_.emplace(layer.backend(), row_bytes() * static_cast<std::size_t>(part_.rows));
  }

  // All tokens, and the first ones.
  void run() { layer_.run(x_view(part_.rows), y_view(part_.rows), stream()); }
  void enqueue(std::int64_t tokens) { layer_.enqueue(x_view(tokens), y_view(tokens), stream()); }
  Stream stream() { return layer_.backend().stream(); }
  TensorView x_view(std::int64_t tokens) const {
    return dense_view(static_cast<const void*>(x_.data()), part_.spec.dtype, tokens, 1, layer_.features().size());
  }
  MutableTensorView y_view(std::int64_t tokens) const {
    return dense_view(static_cast<void*>(y_->data()), part_.spec.dtype, shown_tokens(tokens).size(), 1,
                      shown_columns().size());
  }

  // Whether y has other bits than expected, or was written outside the rows of the first tokens. Clears y.
  bool differs(std::int64_t tokens) {
    const FeatureRange mine = shown_tokens(tokens);
    const FeatureRange columns = shown_columns();
    const std::size_t whole_row = static_cast<std::size_t>(part_whole_columns()) * size_of(part_.spec.dtype);
    std::vector<std::byte> wanted;
    for (std::int64_t t = mine.begin; t < mine.end; ++t) {
      const auto row = expected_.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(t) * whole_row);
      const auto at = [&](std::int64_t column) {
        return row + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(column) * size_of(part_.spec.dtype));
      };
      wanted.insert(wanted.end(), at(columns.begin), at(columns.end));
    }
    wanted.resize(row_bytes() * static_cast<std::size_t>(part_.rows), std::byte{0xff});
    const bool differ = y_->read() != wanted;
    y_->clear();
    return differ;
  }

 private:
  static LinearData part_of(const Linear& layer, const Transport& world, const LinearData& data) {
    if (data.spec.parallel == LinearParallel::kRow) return leaves_of(data, linear_leaves(world.size(), world.rank()));
    return columns_of(data, layer.columns().begin, layer.columns().end);
  }

  void place(LinearMatrix& matrix, const LinearData::Matrix& from) {
    const auto copy = [&](const void* data, std::size_t bytes) -> const std::byte* {
      if (bytes == 0) return nullptr;
      const auto* const first = static_cast<const std::byte*>(data);
      arrays_.emplace_back(layer_.backend(), bytes).write({first, first + bytes});
      return arrays_.back().data();
    };
    matrix.data = copy(from.values.data(), from.values.size());
    matrix.scales = reinterpret_cast<const float*>(copy(from.scales.data(), from.scales.size() * sizeof(float)));
    matrix.zeros = reinterpret_cast<const std::uint8_t*>(copy(from.zeros.data(), from.zeros.size()));
    matrix.bias = copy(from.bias.data(), from.bias.size());
  }

  bool has_column_shard() const {
    return part_.spec.parallel == LinearParallel::kColumn && layer_.job().output == LinearOutput::kShard;
  }
  FeatureRange shown_columns() const {
    return has_column_shard() ? layer_.columns() : FeatureRange{0, part_whole_columns()};
  }
  FeatureRange shown_tokens(std::int64_t tokens) const {
    const bool all = part_.spec.parallel == LinearParallel::kNone || has_column_shard() ||
                     layer_.job().output == LinearOutput::kReplicated;
    return all ? FeatureRange{0, tokens} : layer_.tokens_of_rank(tokens);
  }
  std::int64_t part_whole_columns() const { return layer_.job().spec.out_features; }
  std::size_t row_bytes() const { return static_cast<std::size_t>(shown_columns().size()) * size_of(part_.spec.dtype); }
  Linear& layer_;
  LinearData part_;
  std::vector<std::byte> expected_;
  DeviceArray x_;
  std::optional<DeviceArray> y_;
  std::deque<DeviceArray> arrays_;
};

// Runs a layer for each LinearJob::output, and enqueues it for fewer tokens. Returns the number of wrong results.
inline std::int64_t linear_differences(Transport& world, const LinearCase& given, const LinearOptions& options) {
  std::int64_t differ = 0;
  for (const LinearOutput output : {LinearOutput::kShard, LinearOutput::kTokens, LinearOutput::kReplicated}) {
    const std::int64_t tokens = given.data.rows;
    if (given.data.spec.parallel == LinearParallel::kNone && output != LinearOutput::kShard) continue;
    // Once by size, and in passes of different lengths.
    const std::int64_t block = output == LinearOutput::kShard ? 0 : output == LinearOutput::kTokens ? 3 : tokens / 6;
    Linear layer({.spec = given.data.spec, .max_tokens = tokens, .output = output, .token_block = block}, world,
                 options);
    EXPECT_EQ(layer.kernel().row->backend, options.kernel.backend);
    LinearRank first(layer, world, given);
    first.run();
    differ += first.differs(tokens) ? 1 : 0;
    first.enqueue(tokens / 2);
    layer.wait();
    differ += first.differs(tokens / 2) ? 1 : 0;
  }
  return differ;
}

}  // namespace ringattn::testing
