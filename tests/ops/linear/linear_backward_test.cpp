// SPDX-License-Identifier: Apache-2.0
// Gradients of linear layers: against finite differences of the layer in fp64, the same bits on 1 to 8 ranks by memcmp,
// rows of dx alone and in a batch, and sums over tokens in the order that is promised.
#include "ops/linear/linear_backward.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "kernels/common/token_units.hpp"
#include "ops/linear/gradient_reduction.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

using Floats = std::vector<float>;

Floats random_floats(std::int64_t count, unsigned seed, float size) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw(0.0F, size);
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = draw(random);
  return values;
}

// A layer in fp32, and the gradients that it should have.
struct Layer {
  LinearSpec spec;
  std::int64_t tokens = 0;
  Floats x, weight, bias, dy;  // [tokens, K], [rows, K], [rows], [tokens, N]

  std::int64_t rows() const { return spec.sum_columns(); }
};

struct Gradients {
  Floats dx, dweight, dbias;

  bool operator==(const Gradients& other) const {
    const auto same = [](const Floats& a, const Floats& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return same(dx, other.dx) && same(dweight, other.dweight) && same(dbias, other.dbias);
  }
};

Layer make_layer(LinearActivation activation, bool gated, LinearParallel parallel, std::int64_t tokens,
                 std::int64_t features = 48, std::int64_t columns = 128) {
  Layer layer;
  layer.spec = {Dtype::kF32, WeightFormat::kFloat, features, columns, activation, gated, true, parallel};
  layer.tokens = tokens;
  layer.x = random_floats(tokens * features, 1, 1.0F);
  layer.weight = random_floats(layer.rows() * features, 2, 0.2F);
  layer.bias = random_floats(layer.rows(), 3, 0.5F);
  layer.dy = random_floats(tokens * columns, 4, 1.0F);
  return layer;
}

// Columns [columns.begin, columns.end) of rows.
Floats cut_columns(const Floats& rows, std::int64_t width, FeatureRange columns) {
  Floats part;
  for (std::size_t at = 0; at < rows.size(); at += static_cast<std::size_t>(width)) {
    part.insert(part.end(), rows.begin() + static_cast<std::ptrdiff_t>(at) + columns.begin,
                rows.begin() + static_cast<std::ptrdiff_t>(at) + columns.end);
  }
  return part;
}

// The rows of a rank's columns in a stacked weight or bias.
Floats cut_rows(const Layer& layer, const Floats& whole, std::int64_t width, FeatureRange columns) {
  Floats part;
  for (std::int64_t first = 0; first < layer.rows(); first += layer.spec.out_features) {
    const auto at = whole.begin() + (first + columns.begin) * width;
    part.insert(part.end(), at, at + columns.size() * width);
  }
  return part;
}

TensorView rows_view(const Floats& data, std::int64_t tokens, std::int64_t dim) {
  return dense_view(static_cast<const void*>(data.data()), Dtype::kF32, tokens, 1, dim);
}

// A rank's gradients.
using ChangeInputs = std::function<void(LinearBackwardInputs&)>;

Gradients gradients_of(const Layer& layer, Transport& world, LinearOutput output, const ChangeInputs& change = {}) {
  const LinearJob job{layer.spec, layer.tokens, output};
  LinearBackward backward(job, world, {{"cpu", "auto"}, 1, 60.0});
  const FeatureRange columns = backward.columns(), features = backward.features();
  const std::int64_t k = features.size(), n = layer.rows() / layer.spec.out_features * columns.size();
  const Floats x = cut_columns(layer.x, layer.spec.in_features, features);
  const Floats weight =
      cut_columns(cut_rows(layer, layer.weight, layer.spec.in_features, columns), layer.spec.in_features, features);
  const Floats bias = cut_rows(layer, layer.bias, 1, columns);
  const bool shard = layer.spec.parallel == LinearParallel::kColumn && output == LinearOutput::kShard;
  const std::int64_t width = shard ? columns.size() : layer.spec.out_features;
  const Floats dy = shard ? cut_columns(layer.dy, layer.spec.out_features, columns) : layer.dy;
  Floats transposed;
  for (std::int64_t i = 0; i < k; ++i) {
    for (const FeatureRange& run : linear_gradient_order(job, world.size(), world.rank())) {
      for (std::int64_t row = run.begin; row < run.end; ++row) {
        transposed.push_back(weight[static_cast<std::size_t>(row * k + i)]);
      }
    }
  }
  LinearBackwardInputs inputs;
  inputs.x = rows_view(x, layer.tokens, k);
  inputs.dy = rows_view(dy, layer.tokens, width);
  const std::int64_t row_bytes = k * static_cast<std::int64_t>(sizeof(float));
  inputs.weights.matrix = {.data = weight.data(), .row_stride = row_bytes, .bias = bias.data()};
  inputs.weights.up = {.data = weight.data() + columns.size() * k,
                       .row_stride = row_bytes,
                       .bias = bias.data() + (layer.spec.gated ? columns.size() : 0)};
  inputs.transposed = {.data = transposed.data(), .row_stride = n * static_cast<std::int64_t>(sizeof(float))};
  if (change) change(inputs);
  Gradients made{Floats(x.size(), -1.0F), Floats(weight.size(), -1.0F), Floats(bias.size(), -1.0F)};
  backward.run(inputs, {dense_view(static_cast<void*>(made.dx.data()), Dtype::kF32, layer.tokens, 1, k),
                        made.dweight.data(), made.dbias.data()});
  return made;
}

Gradients alone(const Layer& layer) { return gradients_of(layer, *make_self_transport(), LinearOutput::kShard); }

double activate(LinearActivation activation, double z) {
  switch (activation) {
    case LinearActivation::kNone:
      return z;
    case LinearActivation::kSilu:
      return z / (1.0 + std::exp(-z));
    case LinearActivation::kGelu:
      return 0.5 * z * std::erfc(-z / std::sqrt(2.0));
    case LinearActivation::kGeluTanh:
      return 0.5 * z * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (z + 0.044715 * z * z * z)));
  }
  return z;
}

// Σ y · dy of the layer in fp64, with `change` added to one element of one of its tensors.
double loss(const Layer& layer, const Floats* changed, std::size_t element, double change) {
  const auto read = [&](const Floats& tensor, std::int64_t at) {
    const auto index = static_cast<std::size_t>(at);
    return static_cast<double>(tensor[index]) + (&tensor == changed && index == element ? change : 0.0);
  };
  const std::int64_t k = layer.spec.in_features, n = layer.spec.out_features;
  double sum = 0.0;
  for (std::int64_t token = 0; token < layer.tokens; ++token) {
    for (std::int64_t column = 0; column < n; ++column) {
      const auto z_of = [&](std::int64_t row) {
        double z = read(layer.bias, row);
        for (std::int64_t i = 0; i < k; ++i) z += read(layer.x, token * k + i) * read(layer.weight, row * k + i);
        return z;
      };
      double y = activate(layer.spec.activation, z_of(column));
      if (layer.spec.gated) y *= z_of(n + column);
      sum += y * read(layer.dy, token * n + column);
    }
  }
  return sum;
}

std::string layer_name(const Layer& layer) { return describe(layer.spec); }

TEST(LinearGradients, AreTheSlopesOfTheLayer) {
  for (const LinearActivation activation :
       {LinearActivation::kNone, LinearActivation::kGelu, LinearActivation::kGeluTanh, LinearActivation::kSilu}) {
    for (const bool gated : {false, true}) {
      if (gated && activation == LinearActivation::kNone) continue;
      const Layer layer = make_layer(activation, gated, LinearParallel::kNone, 3, 24, 16);
      const Gradients found = alone(layer);
      for (const auto& [tensor, gradient] : {std::pair{&layer.x, &found.dx}, std::pair{&layer.weight, &found.dweight},
                                             std::pair{&layer.bias, &found.dbias}}) {
        ASSERT_EQ(tensor->size(), gradient->size());
        for (std::size_t element = 0; element < tensor->size(); element += tensor->size() / 7) {
          constexpr double kStep = 1e-4;
          const double slope =
              (loss(layer, tensor, element, kStep) - loss(layer, tensor, element, -kStep)) / (2.0 * kStep);
          // Products of up to 48 addends of about 1, each rounded to 24 bits, and erfcc within 1.2e-7.
          EXPECT_NEAR((*gradient)[element], slope, 2e-5) << layer_name(layer) << ", element " << element;
        }
      }
    }
  }
}

class LinearGradientRanks : public ::testing::TestWithParam<int> {};

TEST_P(LinearGradientRanks, HaveTheBitsOfOne) {
  const int ranks = GetParam();
  for (const LinearParallel parallel : {LinearParallel::kColumn, LinearParallel::kRow}) {
    for (const bool gated : {false, true}) {
      const Layer layer = make_layer(LinearActivation::kSilu, gated, parallel, 21);
      const Gradients whole = alone(layer);
      for (const LinearOutput output : {LinearOutput::kShard, LinearOutput::kReplicated}) {
        if (parallel == LinearParallel::kRow && output == LinearOutput::kShard) continue;
        std::atomic<int> differ = 0;
        run_threads_world(ranks, {}, [&](Transport& world) {
          const Gradients found = gradients_of(layer, world, output);
          const LinearJob job{layer.spec, layer.tokens, output};
          const FeatureRange columns = linear_columns(job, ranks, world.rank());
          const FeatureRange features = linear_features(job, ranks, world.rank());
          const std::int64_t k = layer.spec.in_features;
          const Gradients expected{cut_columns(whole.dx, k, features),
                                   cut_columns(cut_rows(layer, whole.dweight, k, columns), k, features),
                                   cut_rows(layer, whole.dbias, 1, columns)};
          differ += !(found == expected);
        });
        EXPECT_EQ(differ, 0) << layer_name(layer) << ", output " << static_cast<int>(output);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, LinearGradientRanks, ::testing::Values(2, 3, 4, 5, 7, 8));

// Tokens [first, first + tokens) of a layer's batch.
Layer tokens_of(const Layer& layer, std::int64_t first, std::int64_t tokens) {
  Layer part = layer;
  part.tokens = tokens;
  const std::int64_t k = layer.spec.in_features, n = layer.spec.out_features;
  part.x.assign(layer.x.begin() + first * k, layer.x.begin() + (first + tokens) * k);
  part.dy.assign(layer.dy.begin() + first * n, layer.dy.begin() + (first + tokens) * n);
  return part;
}

TEST(LinearGradients, RowsStandAloneAndUnitsOfTokensAreAddedInOrder) {
  constexpr std::int64_t kTokens = 2 * kTokenUnit + 5;
  const Layer layer = make_layer(LinearActivation::kGelu, true, LinearParallel::kColumn, kTokens, 16, 8);
  const Gradients whole = alone(layer);
  Gradients joined;
  for (std::int64_t first = 0; first < kTokens; first += kTokenUnit) {
    const Gradients unit = alone(tokens_of(layer, first, std::min(kTokenUnit, kTokens - first)));
    joined.dx.insert(joined.dx.end(), unit.dx.begin(), unit.dx.end());
    if (first == 0) {
      joined.dweight = unit.dweight;
      joined.dbias = unit.dbias;
      continue;
    }
    for (std::size_t i = 0; i < unit.dweight.size(); ++i) joined.dweight[i] += unit.dweight[i];
    for (std::size_t i = 0; i < unit.dbias.size(); ++i) joined.dbias[i] += unit.dbias[i];
  }
  EXPECT_TRUE(joined == whole);
  const Gradients row = alone(tokens_of(layer, 3000, 1));
  EXPECT_EQ(std::memcmp(row.dx.data(), whole.dx.data() + 3000 * 16, 16 * sizeof(float)), 0);
}

// The gradients of weight and bias, over tokens that ranks have dealt in leaves.
Floats reduced_gradients(const Layer& layer, const std::vector<FeatureRange>& leaves, Transport& world) {
  const std::int64_t weights = layer.rows() * layer.spec.in_features, elements = weights + layer.rows();
  GradientReduction reduction(elements, world, {{"cpu", "auto"}, 1, 60.0});
  Floats sum(static_cast<std::size_t>(elements), -1.0F);
  for (int again = 0; again < 2; ++again) {  // the second sum is made in the memory of the first
    if (again == 1 && reduction.leaves().begin < reduction.leaves().end) {
      reduction.add(nullptr);
      reduction.reset();
    }
    for (int leaf = reduction.leaves().begin; leaf < reduction.leaves().end; ++leaf) {
      const FeatureRange tokens = leaves[static_cast<std::size_t>(leaf)];
      if (tokens.size() == 0) {
        reduction.add(nullptr);
        continue;
      }
      const Gradients own = alone(tokens_of(layer, tokens.begin, tokens.size()));
      Floats flat = own.dweight;
      flat.insert(flat.end(), own.dbias.begin(), own.dbias.end());
      reduction.add(flat.data());
    }
    reduction.run(sum.data());
  }
  return sum;
}

// Any number of ranks, more than there are leaves too; tokens that don't fill the leaves; and leaves of several units.
TEST(GradientReduction, HasTheBitsOfOneRankOnAny) {
  for (const std::int64_t tokens : {std::int64_t{3}, std::int64_t{29}, 17 * kTokenUnit / 2}) {
    const Layer layer = make_layer(LinearActivation::kSilu, true, LinearParallel::kNone, tokens, 8, 8);
    std::vector<FeatureRange> leaves;
    for (int leaf = 0; leaf < kLinearLeaves; ++leaf) leaves.push_back(linear_tokens(tokens, kLinearLeaves, leaf));
    const Floats whole = reduced_gradients(layer, leaves, *make_self_transport());
    const Gradients plain = alone(layer);
    for (std::size_t i = 0; i < plain.dweight.size(); ++i) {
      // Up to 17k products of about 1, in another order.
      EXPECT_NEAR(whole[i], plain.dweight[i], 1e-2) << i;
    }
    for (const int ranks : {2, 3, 5, 8, 11}) {
      if (tokens > kTokenUnit && ranks == 11) continue;
      std::atomic<int> differ = 0;
      run_threads_world(ranks, {}, [&](Transport& world) {
        const Floats found = reduced_gradients(layer, leaves, world);
        differ += std::memcmp(found.data(), whole.data(), whole.size() * sizeof(float)) != 0;
      });
      EXPECT_EQ(differ, 0) << ranks << " ranks, " << tokens << " tokens";
    }
  }
}

TEST(GradientReduction, RefusesWhatIsMissingOrTooMuch) {
  std::atomic<int> refused = 0;
  const auto expect = [&](const std::function<void()>& call, ErrorCode code, const std::string& text) {
    const Error error = error_of(call);
    refused += error.code() == code && std::string(error.what()).find(text) != std::string::npos;
  };
  run_threads_world(3, {}, [&](Transport& world) {
    const LinearOptions options{{"cpu", "auto"}, 1, 60.0};
    const Floats numbers(4, 1.0F);
    Floats sum(4);
    GradientReduction reduction(4, world, options);
    const LeafRange leaves = reduction.leaves();
    for (int leaf = leaves.begin; leaf + (world.rank() == 1 ? 1 : 0) < leaves.end; ++leaf) {
      reduction.add(numbers.data());
    }
    expect([&] { reduction.run(sum.data()); }, ErrorCode::kUsage,
           "gradients of 2 of 3 leaves were added (rank 1 of 3 has leaves 2 to 4)");
    if (world.rank() == 1) reduction.add(numbers.data());
    expect([&] { reduction.add(numbers.data()); }, ErrorCode::kUsage, "the gradient of one leaf too many is added");
    reduction.run(sum.data());
    EXPECT_EQ(sum, Floats(4, 8.0F));
    expect([&] { GradientReduction(world.rank() + 4, world, options); }, ErrorCode::kUnsupported, "elements");
    for (const std::string& long_text : {std::string(), std::string(300, 'x')}) {
      expect([&] { GradientReduction(4, world, options, long_text + (world.rank() == 2 ? "[2, 2]" : "[4]")); },
             ErrorCode::kUnsupported, "rank 2 and rank 0 differ in job");
    }
    expect([&] { GradientReduction(0, world, options); }, ErrorCode::kUsage, "gradients of 0 elements");
  });
  EXPECT_EQ(refused, 18);
}

// Bad weights of one rank end the run of all ranks before they exchange anything.
TEST(LinearGradients, AllRanksRefuseTheWeightsOfOne) {
  const std::pair<const char*, ChangeInputs> cases[] = {
      {"of the weights", [](LinearBackwardInputs& inputs) { inputs.weights.up.data = nullptr; }},
      {"bias of the matrix", [](LinearBackwardInputs& inputs) { inputs.weights.matrix.bias = nullptr; }},
      {"bytes apart", [](LinearBackwardInputs& inputs) { inputs.transposed.row_stride = 4; }},
  };
  for (const LinearParallel parallel : {LinearParallel::kColumn, LinearParallel::kRow}) {
    const Layer layer = make_layer(LinearActivation::kSilu, true, parallel, 5);
    for (const auto& [text, change] : cases) {
      std::atomic<int> refused = 0;
      run_threads_world(3, {}, [&, text = text, change = change](Transport& world) {
        const Error error = error_of([&] {
          gradients_of(layer, world, LinearOutput::kReplicated, world.rank() == 1 ? change : ChangeInputs());
        });
        refused += error.code() == ErrorCode::kUsage && std::string(error.what()).find(text) != std::string::npos;
      });
      EXPECT_EQ(refused, 3) << text << ", " << layer_name(layer);
    }
  }
}

TEST(LinearGradients, RefuseWhatHasNone) {
  const auto refused = [](LinearSpec spec, int ranks, LinearOutput output) {
    std::string text;
    run_threads_world(ranks, {}, [&](Transport& world) {
      const Error error = error_of([&] { LinearBackward({spec, 4, output}, world, {{"cpu", "auto"}, 1, 60.0}); });
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      if (world.rank() == 0) text = error.what();
    });
    return text;
  };
  LinearSpec spec{.in_features = 256, .out_features = 64, .parallel = LinearParallel::kRow};
  EXPECT_NE(refused(spec, 2, LinearOutput::kShard).find("divided by tokens"), std::string::npos);
  spec.parallel = LinearParallel::kColumn;
  EXPECT_NE(refused(spec, 2, LinearOutput::kTokens).find("divided by tokens"), std::string::npos);
  spec.gated = true;
  spec.activation = LinearActivation::kSilu;
  spec.out_features = 48;
  EXPECT_NE(refused(spec, 3, LinearOutput::kShard).find("not whole leaves"), std::string::npos);
  spec.out_features = 50;
  EXPECT_NE(refused(spec, 1, LinearOutput::kShard).find("256 to 50 features (weight gradients have multiples of 8)"),
            std::string::npos);
  spec.weights = WeightFormat::kInt8;
  EXPECT_NE(refused(spec, 1, LinearOutput::kShard).find("int8 weights"), std::string::npos);
}

}  // namespace
}  // namespace ringattn::testing
