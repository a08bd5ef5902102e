// SPDX-License-Identifier: Apache-2.0
// A Linear on 1 to 8 ranks gives the bits of the kernel on one, by memcmp: row- and column-parallel, in each format of
// weights, sharded and replicated, in one pass and in several; and two layers of which the second reads what the first
// leaves on its rank.
#include "ops/linear/linear.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/self.hpp"
#include "comm/threads.hpp"
#include "ops/linear/token_blocks.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/forwarding_transport.hpp"
#include "tests/support/linear_runner.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kTokens = 13;

LinearOptions on_cpu() { return {{"cpu", "auto"}, 1, 60.0}; }

void run_world(int ranks, const std::function<void(Transport&)>& rank_main) {
  if (ranks == 1) return rank_main(*make_self_transport());
  run_threads_world(ranks, {}, rank_main);
}

std::size_t row_bytes(const LinearSpec& spec, std::int64_t columns) {
  return static_cast<std::size_t>(columns) * size_of(spec.dtype);
}

// Rows and columns [begin, end) of dense rows.
std::vector<std::byte> cut(const std::vector<std::byte>& rows, std::size_t row, FeatureRange tokens, std::size_t begin,
                           std::size_t end) {
  std::vector<std::byte> part;
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    const auto at = rows.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(t) * row);
    part.insert(part.end(), at + static_cast<std::ptrdiff_t>(begin), at + static_cast<std::ptrdiff_t>(end));
  }
  return part;
}

struct Case {
  LinearData data;
  std::vector<std::byte> y;  // [kTokens, N] of one kernel call
};

Case make_case(LinearSpec spec) {
  Case made;
  made.data = linear_data(spec, kTokens, 21);
  made.data.set_x(4, 3, std::numeric_limits<float>::quiet_NaN());
  made.y = multiplied(kernel_table<LinearSpec>().back(), made.data);
  return made;
}

// Runs a rank's part. Returns how many results differ from those expected.
std::int64_t differences(Transport& world, const Case& given, LinearOutput output, std::int64_t token_block) {
  const LinearSpec& spec = given.data.spec;
  const int rank = world.rank();
  const int ranks = world.size();
  Linear layer({.spec = spec, .max_tokens = kTokens, .output = output, .token_block = token_block}, world, on_cpu());
  const bool is_row = spec.parallel == LinearParallel::kRow;
  const FeatureRange columns = layer.columns();
  const LinearData part =
      is_row ? leaves_of(given.data, linear_leaves(ranks, rank)) : columns_of(given.data, columns.begin, columns.end);
  EXPECT_EQ(part.features, layer.features().size());
  layer.load(part.weights());
  std::int64_t differ = 0;
  for (const std::int64_t tokens : {kTokens, std::int64_t{5}, std::int64_t{1}, std::int64_t{0}}) {
    const bool shard = output == LinearOutput::kShard;
    const bool column_shard = spec.parallel == LinearParallel::kColumn && shard;
    const bool all_tokens =
        spec.parallel == LinearParallel::kNone || column_shard || output == LinearOutput::kReplicated;
    const FeatureRange mine = all_tokens ? FeatureRange{0, tokens} : layer.tokens_of_rank(tokens);
    const FeatureRange shown = column_shard ? columns : FeatureRange{0, spec.out_features};
    const std::vector<std::byte> expected = cut(given.y, row_bytes(spec, spec.out_features), mine,
                                                row_bytes(spec, shown.begin), row_bytes(spec, shown.end));
    // y lies in wider rows.
    const std::int64_t stride = shown.size() + 3;
    std::vector<std::byte> wide(row_bytes(spec, stride) * static_cast<std::size_t>(mine.size()), std::byte{0xff});
    const TensorView x =
        dense_view(static_cast<const void*>(part.x.data()), spec.dtype, tokens, 1, layer.features().size());
    const MutableTensorView y{wide.data(), spec.dtype, mine.size(), 1, shown.size(), stride, shown.size()};
    if (tokens == kTokens) {
      layer.run(x, y);
    } else {
      layer.enqueue(x, y);
      layer.wait();
    }
    differ += cut(wide, row_bytes(spec, stride), {0, mine.size()}, 0, row_bytes(spec, shown.size())) != expected;
  }
  return differ;
}

class LinearWorld : public ::testing::TestWithParam<int> {};

TEST_P(LinearWorld, HasTheBitsOfOneRank) {
  std::vector<Case> cases;
  for (const LinearParallel parallel : {LinearParallel::kRow, LinearParallel::kColumn, LinearParallel::kNone}) {
    cases.push_back(
        make_case({Dtype::kBf16, WeightFormat::kFloat, 344, 50, LinearActivation::kGelu, false, true, parallel}));
    cases.push_back(
        make_case({Dtype::kF16, WeightFormat::kInt8, 344, 40, LinearActivation::kNone, false, true, parallel}));
    cases.push_back(
        make_case({Dtype::kBf16, WeightFormat::kInt4, 640, 40, LinearActivation::kSilu, true, false, parallel}));
    cases.push_back(
        make_case({Dtype::kF32, WeightFormat::kFloat, 40, 33, LinearActivation::kSilu, true, true, parallel}));
  }
  for (const Case& given : cases) {
    for (const LinearOutput output : {LinearOutput::kShard, LinearOutput::kTokens, LinearOutput::kReplicated}) {
      if (given.data.spec.parallel == LinearParallel::kNone && output != LinearOutput::kShard) continue;
      // One product for the tokens of all ranks; and up to 7 passes, the last of which may have tokens of some ranks.
      for (const std::int64_t token_block : {0, output == LinearOutput::kReplicated ? 2 : 1}) {
        std::atomic<std::int64_t> differ = 0;
        run_world(GetParam(), [&](Transport& world) { differ += differences(world, given, output, token_block); });
        EXPECT_EQ(differ, 0) << describe(given.data.spec) << ", output " << static_cast<int>(output) << ", blocks of "
                             << token_block;
      }
    }
  }
}

// gate_up_proj and down_proj of an MLP: the hidden columns of a rank are the features of its second layer.
TEST_P(LinearWorld, TwoLayersShareTheirCut) {
  for (const WeightFormat format : {WeightFormat::kFloat, WeightFormat::kInt8, WeightFormat::kInt4}) {
    constexpr std::int64_t kHidden = 1152;
    const LinearSpec up{Dtype::kBf16,           format, 256, kHidden, LinearActivation::kSilu, true, false,
                        LinearParallel::kColumn};
    const LinearSpec down{Dtype::kBf16,        format, kHidden, 64, LinearActivation::kNone, false, true,
                          LinearParallel::kRow};
    const LinearData first = linear_data(up, kTokens, 31);
    LinearData second = linear_data(down, kTokens, 32);
    const KernelRow<LinearSpec>& row = kernel_table<LinearSpec>().back();
    second.x = multiplied(row, first);
    const std::vector<std::byte> expected = multiplied(row, second);
    std::atomic<std::int64_t> differ = 0;
    run_world(GetParam(), [&](Transport& world) {
      Linear one({up, kTokens, LinearOutput::kShard, leaf_unit(format)}, world, on_cpu());
      Linear two({down, kTokens, LinearOutput::kReplicated}, world, on_cpu());
      EXPECT_EQ(one.columns(), two.features());
      const LinearData mine = columns_of(first, one.columns().begin, one.columns().end);
      const LinearData ours = leaves_of(second, linear_leaves(world.size(), world.rank()));
      one.load(mine.weights());
      two.load(ours.weights());
      const std::int64_t hidden = one.columns().size();
      std::vector<std::byte> between(row_bytes(up, hidden) * kTokens, std::byte{0xff});
      std::vector<std::byte> y(expected.size(), std::byte{0xff});
      one.run(first.x_view(), dense_view(static_cast<void*>(between.data()), up.dtype, kTokens, 1, hidden));
      two.run(dense_view(static_cast<const void*>(between.data()), up.dtype, kTokens, 1, hidden),
              dense_view(static_cast<void*>(y.data()), up.dtype, kTokens, 1, 64));
      differ += y != expected;
    });
    EXPECT_EQ(differ, 0) << describe(up);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, LinearWorld, ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8));

TEST(TokenBlocks, HoldEachTokenOnce) {
  LinearJob job{.spec = {.in_features = 256, .parallel = LinearParallel::kRow}, .max_tokens = 20'000};
  for (const auto& [columns, token_block] : {std::pair{64, 0}, {4096, 0}, {100'000, 0}, {4096, 3}}) {
    job.spec.out_features = columns;
    job.token_block = token_block;
    for (const int ranks : {2, 3, 8}) {
      const TokenBlockLimits limits = token_block_limits(job, ranks);
      for (const std::int64_t tokens : {0, 1, 5, 64, 1000, 8192, 20'000}) {
        const TokenBlocks blocks = token_blocks(job, ranks, tokens);
        EXPECT_LE(blocks.size, limits.block);
        EXPECT_LE(blocks.one_product ? tokens : blocks.size, limits.product);
        EXPECT_TRUE(!blocks.one_product || blocks.passes == 1);
        std::int64_t next = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          for (int pass = 0; pass < blocks.passes; ++pass) {
            const FeatureRange block = blocks.block(rank, pass);
            EXPECT_EQ(block.begin, next);
            EXPECT_LE(block.size(), blocks.size);
            next = block.end;
          }
        }
        EXPECT_EQ(next, tokens);
      }
      EXPECT_GE(limits.pass, ranks * limits.block);
    }
  }
  job.spec.out_features = 4096;
  job.token_block = 0;
  EXPECT_TRUE(token_blocks(job, 2, 64).one_product);     // a decode step reads its weights once
  EXPECT_FALSE(token_blocks(job, 2, 8192).one_product);  // sums travel while others are computed
}

// Buffers for sums hold blocks, however many tokens a call has.
TEST(TokenBlocks, BoundTheMemory) {
  const LinearSpec spec{.in_features = 256, .out_features = 4096, .parallel = LinearParallel::kRow};
  const LinearChoice choice = choose_kernel(spec, on_cpu().kernel);
  const auto backend = choice.row->make_backend({1, kNoDevice});
  const auto bytes = [&](std::int64_t tokens) {
    return linear_rank_bytes({spec, tokens, LinearOutput::kReplicated}, choice, *backend, 4, 1);
  };
  EXPECT_LT(bytes(1000), bytes(50'000));
  EXPECT_EQ(bytes(50'000), bytes(5'000'000));
}

// Stops after some exchanges. Its heartbeats go on until the others give up.
class StoppingRank final : public ForwardingTransport {
 public:
  StoppingRank(Transport& inner, int exchanges) : ForwardingTransport(inner), exchanges_(exchanges) {}

  Ticket post(Exchange exchange, Stream stream) override {
    while (exchanges_ == 0) {
      progress();
      std::this_thread::yield();
    }
    --exchanges_;
    return ForwardingTransport::post(std::move(exchange), stream);
  }

 private:
  int exchanges_;
};

TEST(Linears, NameTheRankThatStopsBetweenBlocks) {
  const LinearSpec spec{.in_features = 256, .out_features = 8, .parallel = LinearParallel::kRow};
  const LinearJob job{.spec = spec, .max_tokens = kTokens, .token_block = 2};
  const LinearData data = linear_data(spec, kTokens, 1);
  const Error error = error_of([&] {
    run_threads_world(3, {}, [&](Transport& world) {
      StoppingRank stopping(world, 3);  // in the second of three passes of two exchanges each
      Linear layer(job, world.rank() == 2 ? static_cast<Transport&>(stopping) : world, {{"cpu", "auto"}, 1, 0.5});
      const LinearData part = leaves_of(data, linear_leaves(3, world.rank()));
      layer.load(part.weights());
      std::vector<std::byte> y(row_bytes(spec, 8) * kTokens);
      layer.enqueue(
          dense_view(static_cast<const void*>(part.x.data()), spec.dtype, kTokens, 1, layer.features().size()),
          dense_view(static_cast<void*>(y.data()), spec.dtype, layer.tokens_of_rank(kTokens).size(), 1, 8));
      layer.wait();
    });
  });
  EXPECT_EQ(error.code(), ErrorCode::kPeer);
  EXPECT_NE(std::string(error.what()).find("for rank 2"), std::string::npos) << error.what();
}

TEST(Linears, RefuseWhatCanNotBeShared) {
  const LinearSpec row{.in_features = 256, .out_features = 8, .parallel = LinearParallel::kRow};
  const auto refused = [](const auto& call) {
    const Error error = error_of(call);
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return std::string(error.what());
  };
  EXPECT_EQ(
      refused([&] {
        check_linear_job({row, 1}, 9);
      }),
      "a row-parallel layer over 9 ranks (its features are dealt in 8 parts, whatever the number of ranks). Use at "
      "most 8 ranks for a layer.");
  EXPECT_NO_THROW(check_linear_job({row, 1}, 8));
  EXPECT_NE(
      refused([&] { check_linear_job({.spec = row, .max_tokens = 1, .token_block = -1}, 2); }).find("token_block -1"),
      std::string::npos);
  constexpr std::int64_t kTooMany = std::numeric_limits<std::int64_t>::max();
  EXPECT_NE(refused([&] { check_linear_job({row, kTooMany}, 2); }).find("up to 2^40"), std::string::npos);
  EXPECT_NE(refused([&] { check_linear_job({.spec = row, .max_tokens = 1, .token_block = kTooMany}, 2); }).find("2^40"),
            std::string::npos);
  LinearSpec plain = row;
  plain.parallel = LinearParallel::kNone;
  EXPECT_NE(refused([&] {
              check_linear_job({plain, 1, LinearOutput::kReplicated}, 2);
            }).find("a replicated output"),
            std::string::npos);
  std::atomic<int> seen = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    Linear layer({row, 3}, world, on_cpu());
    const LinearData part = leaves_of(linear_data(row, 3, 1), linear_leaves(2, world.rank()));
    std::vector<std::byte> y(row_bytes(row, 8) * 3);
    const auto run = [&](std::int64_t features, std::int64_t tokens) {
      layer.enqueue(dense_view(static_cast<const void*>(part.x.data()), row.dtype, tokens, 1, features),
                    dense_view(static_cast<void*>(y.data()), row.dtype, layer.tokens_of_rank(tokens).size(), 1, 8));
    };
    EXPECT_NE(refused([&] { run(128, 3); }).find("load() was not called"), std::string::npos);
    layer.load(part.weights());
    EXPECT_EQ(refused([&] { run(100, 3); }),
              fmt::format("x has 100 features (rank {} has features {} of the layer). Cut x and the weights at 128.",
                          world.rank(), world.rank() == 0 ? "0 to 128" : "128 to 256"));
    EXPECT_NE(refused([&] { run(128, 4); }).find("made for up to 3"), std::string::npos);
    const std::int64_t tokens = 3 - world.rank();
    const std::string differ = refused([&] {
      layer.run(dense_view(static_cast<const void*>(part.x.data()), row.dtype, tokens, 1, 128),
                dense_view(static_cast<void*>(y.data()), row.dtype, layer.tokens_of_rank(tokens).size(), 1, 8));
    });
    EXPECT_NE(differ.find("rank 1 and rank 0 run different jobs"), std::string::npos) << differ;
    ++seen;
  });
  EXPECT_EQ(seen, 2);
}

// Such a rank still finishes rows: it reads scales and biases.
TEST(Linears, ARankWithoutFeaturesIsCheckedToo) {
  const LinearSpec spec{.dtype = Dtype::kBf16,
                        .weights = WeightFormat::kInt8,
                        .in_features = 16,
                        .out_features = 8,
                        .bias = true,
                        .parallel = LinearParallel::kRow};
  std::atomic<int> seen = 0;
  run_threads_world(2, {}, [&](Transport& world) {
    Linear layer({spec, 3}, world, on_cpu());
    if (world.rank() == 1) return;
    ASSERT_EQ(layer.features().size(), 0);
    const LinearData data = linear_data(spec, 3, 1);
    LinearWeights weights = data.weights();
    weights.matrix.data = nullptr;
    layer.load(weights);
    weights.matrix.scales = nullptr;
    EXPECT_EQ(error_of([&] { layer.load(weights); }).code(), ErrorCode::kUsage);
    weights = data.weights();
    weights.matrix.bias = nullptr;
    EXPECT_EQ(error_of([&] { layer.load(weights); }).code(), ErrorCode::kUsage);
    ++seen;
  });
  EXPECT_EQ(seen, 1);
}

}  // namespace
}  // namespace ringattn::testing
