// SPDX-License-Identifier: Apache-2.0
// The promise: dQ, dK, dV and the sinks' gradient have the same bits for any number of ranks, layout, stripe, block
// size, route, order of delivery and number of threads, and whatever else is in the batch.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "tests/support/backward_job.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

struct Case {
  const char* name;
  Job job;
  Dtype gradients = Dtype::kBf16;

  friend std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name; }
};

AttentionSpec with_everything(AttentionSpec spec) {
  spec.softcap = 20.0F;
  spec.sinks = true;
  return spec;
}

std::vector<Case> cases() {
  const Mask causal{-1, 0};
  const Mask full{-1, -1};
  const Mask window{200, 0};
  const Mask both_sides{100, 150};
  const std::vector<Sequence> ragged = {{1, 1, 0},     {300, 300, 0}, {0, 0, 0},     {129, 129, 0}, {5, 700, 695},
                                        {257, 90, 11}, {64, 0, 0},    {500, 500, 0}, {17, 40, -9},  {128, 128, 0}};
  return {
      {"causal_bf16", {make_spec(Dtype::kBf16, 4, 2, 64, causal), uniform_batch(1, 1031, 1031)}},
      {"full_fp32", {make_spec(Dtype::kF32, 2, 1, 40, full, 24), uniform_batch(1, 577, 577)}, Dtype::kF32},
      {"window_fp16", {make_spec(Dtype::kF16, 2, 2, 32, window), uniform_batch(1, 1200, 1200)}, Dtype::kF16},
      {"both_sides_sinks",
       {with_everything(make_spec(Dtype::kBf16, 3, 1, 64, both_sides, 32)), uniform_batch(2, 500, 500)},
       Dtype::kF32},
      {"ragged_causal", {with_everything(make_spec(Dtype::kBf16, 2, 1, 32, causal)), ragged}},
      {"ragged_full", {make_spec(Dtype::kF32, 1, 1, 16, full), ragged}, Dtype::kF32},
      {"cached_prefix", {make_spec(Dtype::kBf16, 2, 2, 32, causal), uniform_batch(1, 333, 1400)}},
      {"more_queries_than_keys", {make_spec(Dtype::kBf16, 7, 1, 32, causal), {{{900, 333, -100}}}}},
      {"one_token", {make_spec(Dtype::kBf16, 2, 1, 32, causal), uniform_batch(1, 1, 1)}},
      {"one_query_many_keys", {make_spec(Dtype::kBf16, 2, 1, 32, causal), uniform_batch(1, 1, 3000)}},
  };
}

// Also where a GPU is: a world of one rank would take it, and host transports move nothing of its memory.
Options on_the_cpu() {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

class BackwardInvariance : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    job_ = {GetParam().job, GetParam().gradients};
    tensors_ = random_backward_tensors(job_.forward, 7);
    reference_ = run_backward(job_, on_the_cpu(), tensors_, 1);
  }

  void expect_same(const Options& options, int world, const ThreadsDelivery& delivery, const std::string& what) {
    const BackwardResult result = run_backward(job_, options, tensors_, world, delivery);
    EXPECT_EQ(result.difference(reference_), "") << GetParam().name << ": " << what << ", world " << world;
  }

  BackwardJob job_;
  BackwardTensors tensors_;
  BackwardResult reference_;
};

TEST_P(BackwardInvariance, WorldsLayoutsAndBlocks) {
  for (const int world : {1, 2, 3, 4, 5, 7, 8}) {
    for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
      for (const std::int64_t block : {0, 128, 512}) {
        Options options = on_the_cpu();
        options.layout.kind = kind;
        options.block_tokens = block;
        expect_same(options, world, {}, std::string(layout_name(kind)) + ", block " + std::to_string(block));
      }
    }
  }
}

TEST_P(BackwardInvariance, StripesOfAnyLength) {
  for (const std::int64_t stripe : {1, 37, 64, 100, 200, 640}) {
    for (const int world : {2, 3}) {
      Options options = on_the_cpu();
      options.layout.stripe = stripe;
      options.block_tokens = 384;
      expect_same(options, world, {}, "stripe " + std::to_string(stripe));
    }
  }
}

TEST_P(BackwardInvariance, ShuffledAndDelayedDeliveryOnBothRoutes) {
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    for (const Route route : {Route::kDirect, Route::kChain}) {
      for (const int world : {3, 5}) {
        Options options = on_the_cpu();
        options.block_tokens = 256;
        options.checksum = seed == 1;
        options.overlap = seed != 2;
        expect_same(options, world, {route, seed, std::chrono::microseconds(300)}, "seed " + std::to_string(seed));
      }
    }
  }
}

TEST_P(BackwardInvariance, EnqueuedRuns) {
  for (const int world : {1, 3}) {
    EXPECT_EQ(run_backward(job_, on_the_cpu(), tensors_, world, {}, true).difference(reference_), "") << world;
  }
}

TEST_P(BackwardInvariance, AnyNumberOfThreads) {
  for (const int threads : {2, 3}) {
    Options options = on_the_cpu();
    options.threads = threads;
    expect_same(options, 1, {}, std::to_string(threads) + " threads");
  }
}

INSTANTIATE_TEST_SUITE_P(Jobs, BackwardInvariance, ::testing::ValuesIn(cases()),
                         [](const auto& tested) { return std::string(tested.param.name); });

// Longer than a KV split and than several query splits, so that splits end inside and between blocks.
TEST(BackwardSplits, EndInsideAndBetweenBlocks) {
  const BackwardJob job{{make_spec(Dtype::kBf16, 2, 1, 16, {-1, 0}), uniform_batch(1, 9000, 9000)}};
  const BackwardTensors tensors = random_backward_tensors(job.forward, 3);
  const BackwardResult reference = run_backward(job, on_the_cpu(), tensors, 1);
  for (const int world : {1, 2}) {
    for (const std::int64_t block : {1024, 3000, 8192}) {
      Options options = on_the_cpu();
      options.block_tokens = block;
      EXPECT_EQ(run_backward(job, options, tensors, world).difference(reference), "") << block << ", world " << world;
    }
  }
}

// What a sequence's gradients are does not depend on the other sequences of the batch.
TEST(BackwardPacking, DoesNotChangeASequencesGradients) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 32, {-1, 0});
  const BackwardJob packed{{spec, std::vector<Sequence>{{100, 100, 0}, {333, 333, 0}, {70, 70, 0}}}};
  const BackwardTensors all = random_backward_tensors(packed.forward, 5);
  const BackwardResult together = run_backward(packed, on_the_cpu(), all, 2);
  const BackwardJob alone{{spec, std::vector<Sequence>{{333, 333, 0}}}};
  const auto part = [](const std::vector<std::byte>& bytes, int heads) {
    const std::ptrdiff_t token = std::ptrdiff_t{heads} * 32 * 2;
    return std::vector<std::byte>(bytes.begin() + 100 * token, bytes.begin() + 433 * token);
  };
  const auto rows = [](const std::vector<float>& values) {
    return std::vector<float>(values.begin() + 100 * 4, values.begin() + 433 * 4);
  };
  const BackwardTensors own{{part(all.forward.q, 4), part(all.forward.k, 2), part(all.forward.v, 2), {}},
                            part(all.out, 4),
                            rows(all.lse),
                            part(all.dout, 4),
                            rows(all.dlse)};
  const BackwardResult single = run_backward(alone, on_the_cpu(), own, 3);
  EXPECT_EQ(single.dq, part(together.dq, 4));
  EXPECT_EQ(single.dk, part(together.dk, 2));
  EXPECT_EQ(single.dv, part(together.dv, 2));
}

TEST(BackwardRefusals, NameWhatHasNoGradient) {
  const auto transport = make_self_transport();
  const auto message = [&](const BackwardJob& job, const Options& options = on_the_cpu()) {
    return std::string(error_of([&] { AttentionBackward(job, *transport, options); }).what());
  };
  const Job plain{make_spec(Dtype::kBf16, 2, 1, 32, {-1, 0}), uniform_batch(1, 64, 64)};
  BackwardJob job{plain};
  job.forward.page_size = 16;
  EXPECT_EQ(message(job), "no gradients for keys in pages (pages are caches for decoding). Give k and v in rows.");
  job = {plain, Dtype::kF16};
  EXPECT_EQ(message(job), "gradients in fp16 (the inputs are bf16). Use the dtype of the inputs, or fp32.");
  Options options = on_the_cpu();
  options.state_out = true;
  EXPECT_NE(message({plain}, options).find("no gradients for an attention state"), std::string::npos);
}

}  // namespace
}  // namespace ringattn::testing
