// SPDX-License-Identifier: Apache-2.0
// Runs that are enqueued consecutively give the same bits as runs that are waited for one by one, in any world.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

constexpr int kHeads = 4, kKvHeads = 2, kDim = 32;
constexpr int kLayers = 5;

Job small_job(std::int64_t tokens) {
  return {make_spec(Dtype::kBf16, kHeads, kKvHeads, kDim, {-1, 0}), uniform_batch(1, tokens, tokens)};
}

Options on_cpu(std::int64_t block_tokens = 128) {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  options.block_tokens = block_tokens;
  return options;
}

// One rank's rows of a layer.
struct Layer {
  std::vector<std::byte> q, k, v, out;
  std::vector<float> lse;

  Layer(const Attention& attention, const JobTensors& tensors, int rank) {
    const AttentionSpec& spec = attention.job().spec;
    const auto shard = [rank](const Layout& layout, const std::vector<std::byte>& packed, std::int64_t bytes) {
      std::vector<std::byte> rows(static_cast<std::size_t>(layout.tokens(rank) * bytes));
      layout.shard(rank, packed.data(), rows.data(), bytes);
      return rows;
    };
    q = shard(attention.layout().queries, tensors.q, spec.heads * spec.head_dim * 2);
    k = shard(attention.layout().keys, tensors.k, spec.kv_heads * spec.head_dim * 2);
    v = shard(attention.layout().keys, tensors.v, spec.kv_heads * spec.head_dim_v * 2);
    out.assign(q.size(), std::byte{0xff});
    lse.assign(static_cast<std::size_t>(attention.q_rows() * spec.heads), -1.0F);
  }

  Inputs inputs() const {
    const auto view = [](const std::vector<std::byte>& bytes, int heads) {
      const auto rows = static_cast<std::int64_t>(bytes.size()) / (heads * kDim * 2);
      return dense_view(static_cast<const void*>(bytes.data()), Dtype::kBf16, rows, heads, kDim);
    };
    return {view(q, kHeads), view(k, kKvHeads), view(v, kKvHeads)};
  }
  Outputs outputs() {
    const auto rows = static_cast<std::int64_t>(lse.size()) / kHeads;
    return {dense_view(static_cast<void*>(out.data()), Dtype::kBf16, rows, kHeads, kDim), {lse.data(), kHeads, 1}, {}};
  }
  bool same_bits(const Layer& other) const {
    if (out != other.out) return false;
    return lse.empty() || std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
  }
};

std::vector<Layer> layers_of(const Attention& attention, int rank, std::uint64_t seed) {
  std::vector<Layer> layers;
  for (int i = 0; i < kLayers; ++i) {
    layers.emplace_back(attention, random_tensors(attention.job(), seed + static_cast<std::uint64_t>(i)), rank);
  }
  return layers;
}

class Enqueue : public ::testing::TestWithParam<int> {
 protected:
  void in_world(const std::function<void(Transport&)>& rank_main) {
    if (GetParam() > 1) {
      run_threads_world(GetParam(), {}, rank_main);
    } else {
      rank_main(*make_self_transport());
    }
  }
};

TEST_P(Enqueue, LayersInARowAreTheLayersOneByOne) {
  in_world([](Transport& world) {
    Attention attention(small_job(700), world, on_cpu());
    std::vector<std::byte> workspace(attention.workspace_bytes());
    std::vector<Layer> apart = layers_of(attention, world.rank(), 11);
    std::vector<Layer> row = layers_of(attention, world.rank(), 11);
    for (Layer& layer : apart) attention.run(layer.inputs(), layer.outputs(), workspace);
    for (Layer& layer : row) attention.enqueue(layer.inputs(), layer.outputs(), workspace);
    attention.wait();
    for (int i = 0; i < kLayers; ++i) {
      EXPECT_TRUE(row[static_cast<std::size_t>(i)].same_bits(apart[static_cast<std::size_t>(i)])) << "layer " << i;
    }
  });
}

// Runs of other lengths in a prepared object are runs of an object that was made for them.
TEST_P(Enqueue, ShorterLengthsInAPreparedJob) {
  const auto packed = [](std::vector<std::pair<std::int64_t, std::int64_t>> lengths) {
    Batch batch;
    for (const auto& [queries, keys] : lengths) batch.sequences.push_back({queries, keys, keys - queries});
    return batch;
  };
  const Batch longest = packed({{700, 700}, {300, 900}, {64, 64}, {1, 2000}});
  const std::vector<Batch> lengths{
      packed({{700, 700}, {300, 899}, {64, 64}, {1, 2000}}),
      packed({{1, 1}, {1, 1}, {1, 1}, {1, 1}}),
      packed({{0, 0}, {300, 900}}),
      packed({{129, 700}, {300, 300}, {63, 63}, {0, 1999}}),
      longest,
      packed({{333, 333}}),
  };
  for (const std::int64_t block : {0, 128, 1024}) {
    in_world([&](Transport& world) {
      Options options = on_cpu(block);
      options.shorter_lengths = true;
      Attention attention({small_job(1).spec, longest}, world, options);
      std::vector<std::byte> workspace(attention.workspace_bytes());
      for (const Batch& batch : lengths) {
        Attention alone({small_job(1).spec, batch}, world, on_cpu(block));
        std::vector<std::byte> own(alone.workspace_bytes());
        std::vector<Layer> expected = layers_of(alone, world.rank(), 11);
        for (Layer& layer : expected) alone.run(layer.inputs(), layer.outputs(), own);

        attention.set_lengths(batch);
        EXPECT_EQ(attention.job().batch, batch);
        EXPECT_LE(attention.workspace_bytes(), workspace.size());
        std::vector<Layer> found = layers_of(attention, world.rank(), 11);
        for (Layer& layer : found) attention.enqueue(layer.inputs(), layer.outputs(), workspace);
        attention.wait();
        ASSERT_TRUE(std::ranges::equal(attention.layout().queries.runs(world.rank()),
                                       alone.layout().queries.runs(world.rank())));
        for (std::size_t i = 0; i < found.size(); ++i) {
          EXPECT_TRUE(found[i].same_bits(expected[i])) << "layer " << i << " of " << batch.sequences.size();
        }
      }
    });
  }
}

TEST_P(Enqueue, LengthsBeyondThePreparedAreRefused) {
  in_world([](Transport& world) {
    Options options = on_cpu();
    options.shorter_lengths = true;
    Attention attention({small_job(1).spec, uniform_batch(2, 100, 300)}, world, options);
    for (const Batch& batch : {uniform_batch(3, 1, 1), uniform_batch(1, 101, 300), uniform_batch(2, 100, 301)}) {
      const Error error = error_of([&] { attention.set_lengths(batch); });
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_NE(std::string(error.what()).find("were prepared"), std::string::npos) << error.what();
    }
    EXPECT_EQ(error_of([&] { attention.set_lengths({{-1, 5, 0}}); }).code(), ErrorCode::kUsage);
    EXPECT_EQ(attention.job().batch, uniform_batch(2, 100, 300));  // nothing has changed
    Attention fixed({small_job(1).spec, uniform_batch(2, 100, 300)}, world, on_cpu());
    EXPECT_EQ(error_of([&] { fixed.set_lengths(uniform_batch(2, 100, 299)); }).code(), ErrorCode::kUsage);
  });
}

TEST_P(Enqueue, TwoJobsFollowEachOther) {
  in_world([](Transport& world) {
    Attention longer(small_job(900), world, on_cpu());
    Attention shorter(small_job(333), world, on_cpu(64));
    std::vector<std::byte> workspace(std::max(longer.workspace_bytes(), shorter.workspace_bytes()));
    for (Attention* attention : {&longer, &shorter}) {
      std::vector<Layer> expected = layers_of(*attention, world.rank(), 5);
      for (Layer& layer : expected) attention->run(layer.inputs(), layer.outputs(), workspace);
      std::vector<Layer> mixed = layers_of(*attention, world.rank(), 5);
      Attention& other = attention == &longer ? shorter : longer;
      std::vector<Layer> between = layers_of(other, world.rank(), 9);
      for (std::size_t i = 0; i < mixed.size(); ++i) {
        attention->enqueue(mixed[i].inputs(), mixed[i].outputs(), workspace);
        other.enqueue(between[i].inputs(), between[i].outputs(), workspace);
      }
      attention->wait();
      other.wait();
      for (std::size_t i = 0; i < mixed.size(); ++i) EXPECT_TRUE(mixed[i].same_bits(expected[i])) << "layer " << i;
    }
  });
}

// A run beside enqueued ones waits for them too, and its times are its own.
TEST_P(Enqueue, RunsMayLieBetween) {
  in_world([](Transport& world) {
    Attention attention(small_job(400), world, on_cpu());
    std::vector<std::byte> workspace(attention.workspace_bytes());
    std::vector<Layer> layers = layers_of(attention, world.rank(), 3);
    attention.enqueue(layers[0].inputs(), layers[0].outputs(), workspace);
    const RunStats stats = attention.run(layers[1].inputs(), layers[1].outputs(), workspace);
    EXPECT_EQ(stats.blocks.size(), attention.plan().blocks.size());
    for (const BlockTimes& block : stats.blocks) EXPECT_LE(block.compute_end, stats.seconds);
    attention.wait();  // nothing is left
    Layer again = layers[0];
    attention.run(again.inputs(), again.outputs(), workspace);
    EXPECT_TRUE(again.same_bits(layers[0]));
  });
}

// Refused here, before anybody else hears of it: the others' run is not disturbed by one that never began.
TEST_P(Enqueue, ShapesAreCheckedWithoutTheOthers) {
  in_world([](Transport& world) {
    Attention attention(small_job(400), world, on_cpu());
    std::vector<std::byte> workspace(attention.workspace_bytes());
    std::vector<Layer> layers = layers_of(attention, world.rank(), 3);
    if (world.rank() == 0) {
      Inputs wrong = layers[0].inputs();
      wrong.q.tokens -= 1;
      const Error error = error_of([&] { attention.enqueue(wrong, layers[0].outputs(), workspace); });
      EXPECT_EQ(error.code(), ErrorCode::kUsage) << error.what();
      if (!workspace.empty()) {
        const std::span<std::byte> small(workspace.data(), workspace.size() - 1);
        EXPECT_EQ(error_of([&] { attention.enqueue(layers[0].inputs(), layers[0].outputs(), small); }).code(),
                  ErrorCode::kUsage);
      }
    }
    attention.enqueue(layers[0].inputs(), layers[0].outputs(), workspace);
    attention.wait();
    attention.run(layers[1].inputs(), layers[1].outputs(), workspace);
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Enqueue, ::testing::Values(1, 2, 3, 5),
                         [](const auto& test) { return "Ranks" + std::to_string(test.param); });

// The rank that doesn't enqueue is named by those that wait for it.
TEST(EnqueueFailures, NameTheRankThatDidNotCome) {
  const Error error = error_of([&] {
    run_threads_world(2, {}, [&](Transport& world) {
      Options options = on_cpu();
      options.timeout_seconds = 0.5;
      options.machine = {"fast", 1e12, 1e12, 0.0};  // compute time is estimated as 0
      Attention attention(small_job(700), world, options);
      std::vector<std::byte> workspace(attention.workspace_bytes());
      std::vector<Layer> layers = layers_of(attention, world.rank(), 3);
      if (world.rank() == 0) {
        attention.enqueue(layers[0].inputs(), layers[0].outputs(), workspace);
        attention.wait();
      } else {
        while (true) {  // until the other one gives up
          world.progress();
          std::this_thread::yield();
        }
      }
    });
  });
  EXPECT_EQ(error.code(), ErrorCode::kPeer);
  EXPECT_NE(std::string(error.what()).find("rank 0 waits for rank 1"), std::string::npos) << error.what();
}

}  // namespace
}  // namespace ringattn::testing
