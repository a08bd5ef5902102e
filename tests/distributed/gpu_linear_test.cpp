// SPDX-License-Identifier: Apache-2.0
// A Linear whose ranks share GPUs has the bits of its kernel on one rank, by memcmp: sums and rows are exchanged
// between device memories. Layers are enqueued one after the other, and captured in a CUDA graph on one rank.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "base/gpu.hpp"
#include "comm/self.hpp"
#include "comm/world.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/linear_rank.hpp"

namespace ringattn::testing {
namespace {

LinearOptions on_gpu() { return {{"cuda", "auto"}, 1, 60.0}; }

class GpuLinear : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
    if (const std::string reason = kernel_table<LinearSpec>().front().unavailable(); !reason.empty()) {
      GTEST_SKIP() << "needs: " << reason;
    }
  }

  static LinearCase case_of(const LinearSpec& spec, std::int64_t rows) {
    return make_linear_case(spec, rows, 41, *choose_kernel(spec, on_gpu().kernel).row);
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
    for (const bool gated : {false, true}) {
      const LinearSpec spec{gated ? Dtype::kBf16 : Dtype::kF16,
                            WeightFormat::kFloat,
                            2304,
                            264,
                            LinearActivation::kSilu,
                            gated,
                            !gated,
                            parallel};
      for (const std::int64_t rows : {13, 150}) {
        const LinearCase given = case_of(spec, rows);
        expect_same([&](Transport& world) { return linear_differences(world, given, on_gpu()); }, describe(spec));
      }
    }
  }
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
  const LinearCase second{second_data, multiplied(*choose_kernel(down, on_gpu().kernel).row, second_data)};
  expect_same(
      [&](Transport& world) {
        Linear one({up, kTokens}, world, on_gpu());
        Linear two({down, kTokens, LinearOutput::kReplicated}, world, on_gpu());
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
            Linear layer({spec, rows}, world, on_gpu());
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
