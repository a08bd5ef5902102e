// SPDX-License-Identifier: Apache-2.0
// A Linear whose ranks share GPUs has the bits of its kernel on one rank, by memcmp: sums and rows are exchanged
// between device memories. Layers are enqueued one after the other, and captured in a CUDA graph on one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/gpu.hpp"
#include "comm/self.hpp"
#include "comm/world.hpp"
#include "ops/linear/gradient_reduction.hpp"
#include "ops/linear/linear_backward.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/linear_rank.hpp"

namespace ringattn::testing {
namespace {

LinearOptions linear_on_gpu() { return {{"cuda", "auto"}, 1, 60.0}; }

class GpuLinear : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
    if (const std::string reason = kernel_table<LinearSpec>().front().unavailable(); !reason.empty()) {
      GTEST_SKIP() << "needs: " << reason;
    }
  }

  static LinearCase case_of(const LinearSpec& spec, std::int64_t rows) {
    return make_linear_case(spec, rows, 41, *choose_kernel(spec, linear_on_gpu().kernel).row);
  }
  static void expect_same(const std::function<std::int64_t(Transport&)>& differences, const std::string& what) {
    WorldRequest request;
    request.memory = WantedMemory::kDevice;
    request.ranks = GetParam();
    std::string failure;
    std::atomic<std::int64_t> differ = 0;
    run_world(
        request,
        [&](Transport& world) {
          differ += differences(world);
          return 0;
        },
        [&](const Error& error) { failure = error.what(); });
    EXPECT_EQ(failure, "") << what;
    EXPECT_EQ(differ, 0) << what;
  }
};

TEST_P(GpuLinear, HasTheBitsOfOneRank) {
  for (const LinearParallel parallel : {LinearParallel::kRow, LinearParallel::kColumn, LinearParallel::kNone}) {
    for (const auto& [dtype, gated] :
         {std::pair{Dtype::kBf16, true}, {Dtype::kF16, false}, {Dtype::kF32, true}, {Dtype::kF32, false}}) {
      const LinearSpec spec{dtype, WeightFormat::kFloat, 2304, 264, LinearActivation::kSilu, gated, !gated, parallel};
      for (const std::int64_t rows : {13, 150, 700}) {  // 700: blocks of many rows
        const LinearCase given = case_of(spec, rows);
        expect_same([&](Transport& world) { return linear_differences(world, given, linear_on_gpu()); },
                    describe(spec));
      }
    }
  }
}

// A rank's gradients of a layer with an activation, and of the same layer on the host.
struct DeviceGradients {
  std::vector<std::byte> dx;
  std::vector<float> dweight, dbias;
};

DeviceGradients gradients_of(Transport& world, const LinearData& data, const std::vector<std::byte>& dy,
                             const LinearOptions& options) {
  const LinearJob job{data.spec, data.rows, LinearOutput::kReplicated};
  LinearBackward backward(job, world, options);
  const auto backend = backward.kernel().row->make_backend({1, world.device()});
  const FeatureRange columns = backward.columns();
  const std::int64_t k = data.spec.in_features, n = columns.size();
  const LinearData part = columns_of(data, columns.begin, columns.end);
  std::vector<std::byte> weight, bias, transposed;
  for (int m = 0; m < (data.spec.gated ? 2 : 1); ++m) {
    weight.insert(weight.end(), part.matrices[m].values.begin(), part.matrices[m].values.end());
    bias.insert(bias.end(), part.matrices[m].bias.begin(), part.matrices[m].bias.end());
  }
  const auto element = static_cast<std::int64_t>(size_of(data.spec.dtype));
  const std::int64_t rows = std::ssize(weight) / (k * element);
  for (std::int64_t i = 0; i < k; ++i) {
    for (const FeatureRange& run : linear_gradient_order(job, world.size(), world.rank())) {
      for (std::int64_t row = run.begin; row < run.end; ++row) {
        const auto at = weight.begin() + (row * k + i) * element;
        transposed.insert(transposed.end(), at, at + element);
      }
    }
  }
  std::vector<std::unique_ptr<DeviceArray>> arrays;
  const auto place = [&](const std::vector<std::byte>& bytes) {
    arrays.push_back(std::make_unique<DeviceArray>(*backend, std::max<std::size_t>(1, bytes.size())));
    arrays.back()->write(bytes);
    return arrays.back()->data();
  };
  const auto view = [&](std::byte* bytes, std::int64_t dim) {
    return dense_view(static_cast<void*>(bytes), data.spec.dtype, data.rows, 1, dim);
  };
  LinearBackwardInputs inputs;
  inputs.x = view(place(data.x), k);
  inputs.dy = view(place(dy), data.spec.out_features);
  LinearMatrix& gate = inputs.weights.matrix;
  gate.data = place(weight);
  gate.bias = place(bias);
  gate.row_stride = k * element;
  inputs.weights.up = gate;
  if (data.spec.gated) {
    inputs.weights.up.data = static_cast<const std::byte*>(gate.data) + n * gate.row_stride;
    inputs.weights.up.bias = static_cast<const std::byte*>(gate.bias) + n * element;
  }
  inputs.transposed = {.data = place(transposed), .row_stride = rows * element};
  DeviceArray dx(*backend, data.x.size());
  DeviceArray dweight(*backend, static_cast<std::size_t>(std::max<std::int64_t>(1, rows * k)) * sizeof(float));
  DeviceArray dbias(*backend, static_cast<std::size_t>(std::max<std::int64_t>(1, rows)) * sizeof(float));
  backward.run(inputs, {view(dx.data(), k), dweight.floats(), dbias.floats()}, backend->stream());
  return {dx.read(), dweight.read_floats(), dbias.read_floats()};
}

// Every activation: near the gradients of the host, whose products are rounded alike, and on each rank those of one.
TEST_P(GpuLinear, ActivationsHaveGradients) {
  for (const std::string_view name : activation_names()) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
      LinearSpec spec{dtype, WeightFormat::kFloat, 64, 256};
      spec.parallel = LinearParallel::kColumn;
      spec.bias = true;
      parse_activation(name, spec.activation, spec.gated);
      const LinearData data = linear_data(spec, 45, 12);
      const std::vector<std::byte> dy = linear_data({dtype, WeightFormat::kFloat, 256, 8}, 45, 13).x;
      const DeviceGradients host = gradients_of(*make_self_transport(), data, dy, {{"cpu", "auto"}, 1, 60.0});
      // Sums of 256 products of about 1, or of 45. A dz may be rounded to the other neighbour: 1/256 of it, or 1/2048.
      // In fp32 its activation is within 1e-5.
      const float allowed = dtype == Dtype::kBf16 ? 0.1F : dtype == Dtype::kF16 ? 0.02F : 1e-3F;
      expect_same(
          [&](Transport& world) {
            const DeviceGradients found = gradients_of(world, data, dy, linear_on_gpu());
            std::int64_t far = 0;
            for (std::size_t i = 0; i < host.dx.size(); i += size_of(dtype)) {
              far += std::abs(load_element(found.dx.data() + i, dtype) - load_element(host.dx.data() + i, dtype)) >
                     allowed;
            }
            if (world.size() > 1) {
              far +=
                  found.dx !=
                  gradients_of(*make_self_transport(MemoryKind::kDevice, world.device()), data, dy, linear_on_gpu()).dx;
              return far;
            }
            for (std::size_t i = 0; i < host.dweight.size(); ++i) {
              far += std::abs(found.dweight[i] - host.dweight[i]) > allowed;
            }
            for (std::size_t i = 0; i < host.dbias.size(); ++i) {
              far += std::abs(found.dbias[i] - host.dbias[i]) > allowed;
            }
            return far;
          },
          describe(spec));
    }
  }
}

// Gradients in device memory, added on their GPUs: the bits of a sum on the host.
TEST_P(GpuLinear, GradientsAreReduced) {
  constexpr std::int64_t kElements = 10'007;
  std::vector<std::vector<float>> leaves;
  for (int leaf = 0; leaf < kLinearLeaves; ++leaf) {
    const LinearData data = linear_data({Dtype::kF32, WeightFormat::kFloat, kElements, 8}, 1, 20 + leaf);
    leaves.emplace_back(kElements);
    std::memcpy(leaves.back().data(), data.x.data(), kElements * sizeof(float));
  }
  const auto reduced = [&](Transport& world, const LinearOptions& options) {
    GradientReduction reduction(kElements, world, options);
    const auto backend = reduction.kernel().row->make_backend({1, world.device()});
    DeviceArray gradient(*backend, kElements * sizeof(float)), sum(*backend, kElements * sizeof(float));
    for (int leaf = reduction.leaves().begin; leaf < reduction.leaves().end; ++leaf) {
      const auto* const bytes = reinterpret_cast<const std::byte*>(leaves[static_cast<std::size_t>(leaf)].data());
      gradient.write({bytes, bytes + kElements * sizeof(float)});
      reduction.add(leaf == 5 ? nullptr : gradient.floats(), backend->stream());
      backend->synchronize(backend->stream(), Deadline::after(60.0), {});
    }
    reduction.run(sum.floats(), backend->stream());
    return sum.read();
  };
  const std::vector<std::byte> expected = reduced(*make_self_transport(), {{"cpu", "auto"}, 1, 60.0});
  expect_same([&](Transport& world) { return std::int64_t{reduced(world, linear_on_gpu()) != expected}; }, "gradients");
}

// The second layer reads what the first leaves on its rank, without a wait between them.
TEST_P(GpuLinear, LayersAreOrderedOnTheStream) {
  constexpr std::int64_t kTokens = 70, kHidden = 1152;
  const LinearSpec up{Dtype::kBf16, WeightFormat::kFloat,   512, kHidden, LinearActivation::kSilu, true,
                      false,        LinearParallel::kColumn};
  const LinearSpec down{Dtype::kBf16, WeightFormat::kFloat, kHidden, 264, LinearActivation::kNone, false,
                        true,         LinearParallel::kRow};
  const LinearCase first = case_of(up, kTokens);
  LinearData second_data = linear_data(down, kTokens, 42);
  second_data.x = first.y;
  const LinearCase second{second_data, multiplied(*choose_kernel(down, linear_on_gpu().kernel).row, second_data)};
  expect_same(
      [&](Transport& world) {
        Linear one({up, kTokens}, world, linear_on_gpu());
        Linear two({down, kTokens, LinearOutput::kReplicated}, world, linear_on_gpu());
        LinearRank a(one, world, first);
        LinearRank b(two, world, second);
        const Stream stream = a.stream();
        DeviceArray y(two.backend(), second.y.size());
        two.backend().synchronize(two.backend().stream(), Deadline::after(60.0), {});
        one.enqueue(a.x_view(kTokens), a.y_view(kTokens), stream);
        const MutableTensorView hidden = a.y_view(kTokens);
        two.enqueue(dense_view(static_cast<const void*>(hidden.data), down.dtype, kTokens, 1, hidden.dim),
                    dense_view(static_cast<void*>(y.data()), down.dtype, kTokens, 1, 264), stream);
        one.wait();
        two.wait();
        return std::int64_t{y.read() != second.y} + (a.differs(kTokens) ? 1 : 0);
      },
      "two layers");
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuLinear, ::testing::Values(1, 2, 3));

using GpuLinearGraph = GpuLinear;

// One rank's layer is captured. One whose ranks exchange sums is refused with the reason, and works afterwards.
TEST_P(GpuLinearGraph, HoldsALayer) {
  for (const std::int64_t rows : {5, 140}) {
    for (const LinearParallel parallel : {LinearParallel::kNone, LinearParallel::kRow}) {
      const LinearSpec spec{Dtype::kBf16, WeightFormat::kFloat, 4096, 264, LinearActivation::kGelu, false, true,
                            parallel};
      const LinearCase given = case_of(spec, rows);
      expect_same(
          [&](Transport& world) {
            Linear layer({spec, rows}, world, linear_on_gpu());
            LinearRank rank(layer, world, given);
            std::int64_t differ = 0;
            if (world.size() > 1 && parallel == LinearParallel::kRow) {
              Error refused(ErrorCode::kInternal, "");
              const Graph graph(rank.stream(), [&] { refused = error_of([&] { rank.enqueue(rows); }); });
              EXPECT_EQ(refused.code(), ErrorCode::kUnsupported) << refused.what();
              rank.run();
              return std::int64_t{rank.differs(rows)};
            }
            const Graph graph(rank.stream(), [&] { rank.enqueue(rows); });
            for (int i = 0; i < 3; ++i) {
              graph.launch();
              layer.backend().synchronize(rank.stream(), Deadline::after(60.0), {});
              differ += rank.differs(rows) ? 1 : 0;
            }
            return differ;
          },
          describe(spec));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuLinearGraph, ::testing::Values(1, 2));

}  // namespace
}  // namespace ringattn::testing
