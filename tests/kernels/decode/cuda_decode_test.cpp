// SPDX-License-Identifier: Apache-2.0
// What the tests of every decode kernel don't ask of those on a GPU: steps captured in a graph, which follow lengths
// that grow on the device, and pages beyond whose end nothing may be read.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "base/cuda.hpp"
#include "tests/support/block_mask_inputs.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/decode_runner.hpp"
#include "tests/support/far_pages.hpp"
#include "tests/support/kernel_dims.hpp"

namespace ringattn::testing {
namespace {

const AttentionRow& attention_of(const DecodeRow& row) {
  const auto folds = kernel_table<AttentionSpec>();
  return *std::ranges::find_if(folds, [&](const AttentionRow& other) { return other.name == row.name; });
}

AttentionSpec usual_spec() { return make_spec(Dtype::kBf16, 8, 2, 128, {-1, 0}); }

// The kernels on a GPU that can run here, with the bits of an attention kernel.
std::vector<const DecodeRow*> decoding_rows_here() {
  std::vector<const DecodeRow*> rows;
  for (const DecodeRow& row : kernel_table<DecodeSpec>()) {
    if (row.backend == "cuda" && row.unavailable().empty() && row.missing({usual_spec()}).empty()) rows.push_back(&row);
  }
  return rows;
}

// Launches a step over sequences that are each shorter by that many keys, and at once again: nothing of the first
// launch is left over. Returns their lengths.
std::vector<std::int64_t> launch_twice(DecodeRunner& runner, const Graph& graph, const AttentionInputs& longest,
                                       std::int64_t less) {
  std::vector<std::int64_t> lengths;
  for (const SequenceShape& shape : longest.sequences) lengths.push_back(shape.k_len - less);
  runner.set_lengths(lengths);
  graph.launch();
  graph.launch();
  return lengths;
}

TEST(CudaDecode, AGraphFollowsGrowingSequences) {
  const auto rows = decoding_rows_here();
  if (rows.empty()) GTEST_SKIP() << "needs a GPU with a kernel that decodes";
  for (const DecodeRow* here : rows) {
    const DecodeRow& row = *here;
    SCOPED_TRACE(row.name);
    AttentionSpec spec = make_spec(usual_dims(attention_of(row)).front(), 8, 2, {-1, 0});
    spec.sinks = true;
    constexpr std::int64_t kSteps = 300;
    const AttentionInputs longest = decode_inputs(spec, 2, {8192 + 150, 420, kSteps}, 5);
    DecodeRunner runner(row, longest, {.page_size = 16});
    const Stream stream = runner.backend().stream();
    const Graph graph(stream, [&] { runner.enqueue(stream); });
    AttentionRunner attention_runner(attention_of(row), spec);
    for (std::int64_t step = 0; step <= kSteps; ++step) {
      const std::vector<std::int64_t> lengths = launch_twice(runner, graph, longest, kSteps - step);
      const AttentionResult result = runner.read();
      if (step % 7 != 0 && step % 64 > 2) continue;  // attention over all keys takes far longer than the step
      ASSERT_TRUE(result.same_bits(attention_runner.run(shortened(longest, lengths)))) << "step " << step;
    }
  }
}

// The prefix that sequences share is computed for all that are long enough by then: by single CTAs, and by two.
TEST(CudaDecode, AGraphOfSharedPrefixesFollowsGrowingSequences) {
  const auto rows = decoding_rows_here();
  if (rows.empty()) GTEST_SKIP() << "needs a GPU with a kernel that decodes";
  for (const DecodeRow* here : rows) {
    for (const int dim : {64, 128}) {
      const AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, dim, {-1, 0});
      SCOPED_TRACE(fmt::format("{}, {}", here->name, dim));
      AttentionRunner attention_runner(attention_of(*here), spec);
      const std::int64_t group = std::int64_t{kTilesPerKvSplit} * attention_runner.kernel().key_tile();
      constexpr std::int64_t kSteps = 60;
      const std::vector<std::int32_t> prefix_of = {1, 0, 1, 1, -1, 0};
      // The second prefix leaves a KV split incomplete, so that sequences continue it after the prefix's tiles.
      const std::vector<std::int32_t> prefix_keys = {static_cast<std::int32_t>(group),
                                                     static_cast<std::int32_t>(2 * group + 649)};
      const AttentionInputs longest = with_prefixes(
          decode_inputs(spec, 3, {2 * group + 730, group + 30, 2 * group + 701, 2 * group + 652, kSteps, group + 700},
                        6),
          prefix_of, prefix_keys);
      DecodeRunner runner(*here, longest, {.page_size = 64, .prefix_of = prefix_of, .prefix_keys = prefix_keys});
      const Stream stream = runner.backend().stream();
      const Graph graph(stream, [&] {
        runner.enqueue(stream);
        runner.enqueue(stream);
      });
      for (std::int64_t step = 0; step <= kSteps; ++step) {
        const std::vector<std::int64_t> lengths = launch_twice(runner, graph, longest, kSteps - step);
        const AttentionResult result = runner.read();
        ASSERT_TRUE(result.same_bits(attention_runner.run(shortened(longest, lengths)))) << "step " << step;
      }
    }
  }
}

// Lists and lengths that change between launches are followed.
TEST(CudaDecode, AGraphFollowsBlockMasks) {
  const auto rows = decoding_rows_here();
  if (rows.empty()) GTEST_SKIP() << "needs a GPU with a kernel that decodes";
  for (const DecodeRow* here : rows) {
    const DecodeRow& row = *here;
    SCOPED_TRACE(row.name);
    const AttentionSpec spec = make_spec(usual_dims(attention_of(row)).front(), 8, 2, {-1, 0});
    AttentionRunner dense(attention_of(row), spec);
    const int query_tile = dense.kernel().query_tile();
    const int key_tile = dense.kernel().key_tile();
    const BlockMaskShape shape{query_tile, std::lcm(query_tile, key_tile), 2};
    const std::int64_t group = std::int64_t{kTilesPerKvSplit} * key_tile;
    constexpr std::int64_t kSteps = 150;
    const AttentionInputs longest = decode_inputs(spec, 2, {3 * group + 150, 420, kSteps, group + 10}, 5);
    DecodeRunner runner(row, with_random_block_mask(longest, shape, 100, 0), {.page_size = 16});
    const Stream stream = runner.backend().stream();
    const Graph graph(stream, [&] { runner.enqueue(stream); });
    for (std::int64_t step = 0; step <= kSteps; ++step) {
      std::vector<std::int64_t> lengths;
      for (const SequenceShape& sequence : longest.sequences) lengths.push_back(sequence.k_len - kSteps + step);
      const AttentionInputs now = with_random_block_mask(
          shortened(longest, lengths), shape, static_cast<unsigned>(step) % 101, static_cast<unsigned>(step));
      runner.set_lengths(lengths);
      runner.set_block_mask(now);
      graph.launch();
      graph.launch();  // at once again: nothing of the first launch is left over
      const AttentionResult result = runner.read();
      if (step % 7 != 0 && step < kSteps - 3) continue;
      AttentionRunner attention_runner(attention_of(row), now.spec);
      ASSERT_TRUE(result.same_bits(attention_runner.run(now))) << "step " << step;
    }
  }
}

// Three partitions write their partials and one of them merges, all in one graph.
TEST(CudaDecode, AGraphOfPartitionsFollowsGrowingSequences) {
  const auto rows = decoding_rows_here();
  if (rows.empty()) GTEST_SKIP() << "needs a GPU with a kernel that decodes";
  for (const DecodeRow* here : rows) {
    const DecodeRow& row = *here;
    SCOPED_TRACE(row.name);
    const AttentionSpec spec = make_spec(usual_dims(attention_of(row)).front(), 8, 2, {-1, 0});
    constexpr std::int64_t kSteps = 40;
    constexpr std::int64_t kLongest = 3 * 8192 + 20;
    const AttentionInputs longest = decode_inputs(spec, 3, {kLongest, kSteps, 8192 + 5}, 6);
    std::vector<std::unique_ptr<DecodeRunner>> runners;
    std::vector<const float*> shares;
    for (int i = 0; i < 3; ++i) {
      runners.push_back(
          std::make_unique<DecodeRunner>(row, longest, CacheLayout{.page_size = 16 << i, .partition = {i, 3}}));
      runners.back()->make_partials(splits_per_partition(kLongest, 3, runners.back()->kernel().kv_split_keys()));
      shares.push_back(runners.back()->partials());
    }
    const Stream stream = runners[0]->backend().stream();
    const Graph graph(stream, [&] {
      for (const auto& runner : runners) runner->enqueue_leave(stream);
      runners[0]->enqueue_merge(shares, stream);
    });
    AttentionRunner attention_runner(attention_of(row), spec);
    for (std::int64_t step = 0; step <= kSteps; ++step) {
      std::vector<std::int64_t> lengths;
      for (const SequenceShape& shape : longest.sequences) lengths.push_back(shape.k_len - kSteps + step);
      for (const auto& runner : runners) runner->set_lengths(lengths);
      graph.launch();
      const AttentionResult result = runners[0]->read();
      if (step % 5 != 0 && step < kSteps - 22) continue;  // attention over all keys takes far longer than the step
      ASSERT_TRUE(result.same_bits(attention_runner.run(shortened(longest, lengths)))) << "step " << step;
    }
  }
}

// A captured step of more sequences than a launch takes follows lengths that grow: plain, of shared prefixes whose
// sequences are in several launches, of partitions, and with masks, of which a launch takes half as many sequences.
TEST(CudaDecode, AGraphOfMoreSequencesThanALaunch) {
  const auto rows = decoding_rows_here();
  if (rows.empty()) GTEST_SKIP() << "needs a GPU with a kernel that decodes";
  for (const DecodeRow* here : rows) {
    const DecodeRow& row = *here;
    SCOPED_TRACE(row.name);
    const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0});
    AttentionRunner attention_runner(attention_of(row), spec);
    const int query_tile = attention_runner.kernel().query_tile();
    const int key_tile = attention_runner.kernel().key_tile();
    const std::int64_t group = std::int64_t{kTilesPerKvSplit} * key_tile;
    constexpr std::int64_t kCount = 1100;
    constexpr std::int64_t kSteps = 3;
    const std::int32_t shared = 2 * key_tile + 9;
    std::vector<std::int64_t> lengths;
    std::vector<std::int32_t> prefix_of;
    for (std::int64_t s = 0; s < kCount; ++s) {
      lengths.push_back(kSteps + (s % 11 == 0 ? s % 55 : shared + s % 40));
      prefix_of.push_back(static_cast<std::int32_t>(s % 3) - 1);
    }
    for (const std::int64_t s : {1, 500, 1090, 1099}) {
      lengths[static_cast<std::size_t>(s)] = group + 40 + s % 16;
      prefix_of[static_cast<std::size_t>(s)] = 2;
    }
    const std::vector<std::int32_t> prefix_keys = {shared, key_tile, static_cast<std::int32_t>(group + key_tile / 4)};
    const AttentionInputs longest = with_prefixes(decode_inputs(spec, 2, lengths, 9), prefix_of, prefix_keys);
    const BlockMaskShape shape{query_tile, std::lcm(query_tile, key_tile), 2};
    DecodeRunner plain(row, longest, {.page_size = 32});
    DecodeRunner prefixes(row, longest, {.page_size = 32, .prefix_of = prefix_of, .prefix_keys = prefix_keys});
    DecodeRunner lists(row, with_random_block_mask(longest, shape, 50, 0), {.page_size = 16});
    DecodeRunner first(row, longest, {.page_size = 16, .partition = {0, 2}});
    DecodeRunner second(row, longest, {.partition = {1, 2}});
    for (DecodeRunner* partition : {&first, &second})
      partition->make_partials(splits_per_partition(group + 60, 2, group));
    const auto graph_of = [](DecodeRunner& runner) {
      const Stream stream = runner.backend().stream();
      return std::make_unique<Graph>(stream, [&runner, stream] { runner.enqueue(stream); });
    };
    const auto plain_graph = graph_of(plain), prefixes_graph = graph_of(prefixes), lists_graph = graph_of(lists);
    const Stream stream = first.backend().stream();
    const Graph shares_graph(stream, [&] {
      first.enqueue_leave(stream);
      second.enqueue_leave(stream);
      first.enqueue_merge({first.partials(), second.partials()}, stream);
    });
    for (std::int64_t step = 0; step <= kSteps; ++step) {
      SCOPED_TRACE(fmt::format("step {}", step));
      const AttentionResult result = [&] {
        launch_twice(plain, *plain_graph, longest, kSteps - step);
        return plain.read();
      }();
      const std::vector<std::int64_t> now = launch_twice(prefixes, *prefixes_graph, longest, kSteps - step);
      const AttentionInputs shorter = shortened(longest, now);
      const AttentionResult expected = attention_runner.run(shorter);
      EXPECT_TRUE(result.same_bits(expected));
      EXPECT_TRUE(prefixes.read().same_bits(expected));
      for (DecodeRunner* partition : {&first, &second}) partition->set_lengths(now);
      shares_graph.launch();
      EXPECT_TRUE(first.read().same_bits(expected));
      const AttentionInputs listed = with_random_block_mask(shorter, shape, 50, static_cast<unsigned>(step));
      lists.set_lengths(now);
      lists.set_block_mask(listed);
      lists_graph->launch();
      EXPECT_TRUE(lists.read().same_bits(AttentionRunner(attention_of(row), listed.spec).run(listed)));
      for (const std::size_t begin : {std::size_t{0}, std::size_t{530}, std::size_t{1050}}) {
        const AttentionInputs few = sequences_of(shorter, begin, 50);
        EXPECT_TRUE(DecodeRunner(row, few, {.page_size = 64}).run().same_bits(rows_of(result, few, begin))) << begin;
      }
    }
  }
}

// Pages are read to their ends and not beyond, wherever they lie.
TEST(CudaDecode, PagesFarApartAtTheEndsOfTheirMemory) {
  const auto rows = decoding_rows_here();
  if (rows.empty()) GTEST_SKIP() << "needs a GPU with a kernel that decodes";
  for (const DecodeRow* here : rows) {
    for (const auto& [dim, slices] : {std::pair{64, 2}, {64, 4}, {128, 2}, {128, 4}}) {
      const AttentionSpec spec = make_spec(Dtype::kBf16, 8, 2, dim, {-1, 0});
      const AttentionInputs inputs = decode_inputs(spec, 1, {1000, 17, 1, 545, 32}, 7);
      const AttentionResult expected = AttentionRunner(attention_of(*here), spec).run(inputs);
      for (const std::int64_t page : {16, 32, 64}) {
        for (const bool head_major : {false, true}) {
          SCOPED_TRACE(fmt::format("{}, {}, slices {}, page {}{}", here->name, dim, slices, page,
                                   head_major ? ", by heads" : ""));
          DecodeRunner runner(*here, inputs, {.page_size = page, .head_major = head_major, .slices = slices});
          const FarPages k(runner.backend(), runner.step().k), v(runner.backend(), runner.step().v);
          runner.set_pools(k.view(), v.view());
          EXPECT_TRUE(runner.run().same_bits(expected));
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::testing
