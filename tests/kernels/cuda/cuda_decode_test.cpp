// SPDX-License-Identifier: Apache-2.0
// What the tests of every decode kernel don't ask of those on a GPU: steps captured in a graph, which follow lengths
// that grow on the device.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/cuda.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/decode_runner.hpp"
#include "tests/support/kernel_dims.hpp"

namespace ringattn::testing {
namespace {

TEST(CudaDecode, AGraphFollowsGrowingSequences) {
  for (const DecodeRow& row : kernel_table<DecodeSpec>()) {
    if (row.backend != "cuda") continue;
    const std::string reason = row.unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    const auto folds = kernel_table<FoldSpec>();
    const auto fold = std::ranges::find_if(folds, [&](const FoldRow& other) { return other.name == row.name; });
    ASSERT_NE(fold, folds.end());
    FoldSpec spec = make_spec(usual_dims(*fold).front(), 8, 2, {-1, 0});
    spec.sinks = true;
    constexpr std::int64_t kSteps = 300;
    const FoldInputs longest = decode_inputs(spec, 2, {8192 + 150, 420, kSteps}, 5);
    DecodeRunner runner(row, longest, {.page_size = 16});
    const Stream stream = runner.backend().stream();
    const Graph graph(stream, [&] { runner.enqueue(stream); });
    FoldRunner folder(*fold, spec);
    for (std::int64_t step = 0; step <= kSteps; ++step) {
      std::vector<std::int64_t> lengths;
      for (const SequenceShape& shape : longest.sequences) lengths.push_back(shape.k_len - kSteps + step);
      runner.set_lengths(lengths);
      graph.launch();
      graph.launch();  // at once again: nothing of the first launch is left over
      const FoldResult result = runner.read();
      if (step % 7 != 0 && step % 64 > 2) continue;  // the fold of all keys takes far longer than the step
      ASSERT_TRUE(result.same_bits(folder.run(shortened(longest, lengths)))) << "step " << step;
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
