// SPDX-License-Identifier: Apache-2.0
// cpu_attention_backward: accurate against fp64, and in the order of sums that attention_backward.hpp states.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "tests/kernels/attention_backward/backward_data.hpp"
#include "tests/kernels/common/forced_target.hpp"
#include "tests/support/error_of.hpp"

namespace ringattn::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Empty sequences, one token, more queries than keys and fewer, offsets that are odd and negative, rows without keys.
const std::vector<SequenceShape> kSequences = {{0, 5, 0},  {37, 37, 0},   {1, 1, 0},     {90, 150, 59},
                                               {12, 0, 3}, {70, 41, -33}, {75, 20, 131}, {1, 200, 77}};
const Mask kMasks[] = {{-1, 0}, {-1, -1}, {30, 0}, {17, 9}, {-1, 5}, {4, -1}};

void expect_accurate(const BackwardInputs& inputs) {
  EXPECT_EQ(check_gradients(inputs, differentiate(inputs)), "") << describe(inputs.spec());
}

TEST(AttentionBackward, IsAccurateForEveryMaskAndHeadRatio) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const Mask& mask : kMasks) {
      for (const auto& [heads, kv_heads] : {std::pair{2, 2}, {3, 1}, {8, 2}}) {
        expect_accurate(random_backward_inputs(make_spec(dtype, heads, kv_heads, 32, mask), kSequences, 11));
      }
    }
  }
}

TEST(AttentionBackward, IsAccurateForEveryHeadDim) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const auto& [head_dim, head_dim_v] :
         {std::pair{8, 8}, {64, 64}, {96, 96}, {128, 128}, {192, 128}, {40, 136}, {576, 512}}) {
      const AttentionSpec spec = make_spec(dtype, 3, 1, head_dim, {-1, 0}, head_dim_v);
      expect_accurate(random_backward_inputs(spec, {{70, 100, 29}, {3, 3, 0}}, 12));
    }
  }
}

TEST(AttentionBackward, IsAccurateWithSoftcapSinksAndGradientOfLse) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const Mask& mask : kMasks) {
      for (const float softcap : {0.0F, 2.0F}) {
        AttentionSpec spec = make_spec(dtype, 6, 2, 40, mask, 24);
        spec.softcap = softcap;
        spec.sinks = true;
        BackwardInputs inputs = random_backward_inputs(spec, kSequences, 13, true);
        expect_accurate(inputs);
        inputs.gradients = Dtype::kF32;
        expect_accurate(inputs);
      }
    }
  }
}

TEST(AttentionBackward, SinkWithoutWeightHasNoGradient) {
  AttentionSpec spec = make_spec(Dtype::kF32, 2, 1, 8, {2, 0});
  spec.sinks = true;
  BackwardInputs inputs = random_backward_inputs(spec, {{20, 5, 0}}, 14, true);
  inputs.forward.sinks = {-kInfinity, 0.5F};
  run_forward(inputs);
  const Gradients result = differentiate(inputs);
  for (std::size_t token = 0; token < 20; ++token) {
    EXPECT_EQ(result.sink_terms[2 * token], 0.0F);
    EXPECT_TRUE(std::isfinite(result.sink_terms[2 * token + 1]));
    // Queries from position 7 on see no key: the sink is all of LSE, and gets its gradient.
    if (token >= 7) {
      EXPECT_EQ(result.sink_terms[2 * token + 1], inputs.dlse[2 * token + 1]);
      EXPECT_EQ(result.stats[4 * token], 0.0F);
    }
  }
}

TEST(AttentionBackward, WritesZerosForRowsThatSeeNothing) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 2, 1, 16, {3, 0});
  const BackwardInputs inputs = random_backward_inputs(spec, {{10, 40, 12}, {9, 0, 0}, {0, 7, 0}}, 15);
  for (const int ranks : {1, 2}) {
    const Gradients result = differentiate(inputs, {.tiles_per_task = ranks == 1 ? 0 : 1, .ranks = ranks});
    EXPECT_EQ(check_gradients(inputs, result), "");
    const std::vector<std::byte> zeros(7 * 16 * sizeof(float));
    EXPECT_TRUE(std::equal(zeros.begin(), zeros.end(), result.dq.begin() + 10 * 2 * 16 * 4));  // without keys
    EXPECT_TRUE(std::equal(zeros.begin(), zeros.end(), result.dk.begin() + 40 * 16 * 4));      // without queries
    EXPECT_TRUE(std::equal(zeros.begin(), zeros.end(), result.dv.begin() + 40 * 16 * 4));
    EXPECT_TRUE(std::equal(zeros.begin(), zeros.end(), result.dv.begin() + 22 * 16 * 4));  // after every window
  }
}

// LSE may come from elsewhere: weights above 1 are not clamped, and those that overflow are ∞.
TEST(AttentionBackward, DoesNotClampWeights) {
  BackwardInputs inputs = random_backward_inputs(make_spec(Dtype::kF32, 1, 1, 8, {-1, -1}), {{1, 1, 0}}, 16);
  std::fill(inputs.forward.q.begin(), inputs.forward.q.end(), std::byte{0});
  inputs.set_dout(0, 0, 0, 1.0F);
  const auto first_dv = [&](float lse) {
    inputs.lse[0] = lse;
    float value = 0.0F;
    std::memcpy(&value, differentiate(inputs).dv.data(), sizeof(value));
    return value;
  };
  EXPECT_NEAR(first_dv(-1.0F), std::exp(1.0), 1e-5);
  EXPECT_NEAR(first_dv(-80.0F) / static_cast<float>(std::exp(80.0)), 1.0, 1e-4);
  EXPECT_EQ(first_dv(-200.0F), kInfinity);
  EXPECT_EQ(first_dv(200.0F), 0.0F);
  EXPECT_TRUE(std::isnan(first_dv(kNan)));
}

// Scores of 0 and LSE 0 make P 1, and dlse 1 with dO = 0 makes dS 1: gradients are sums of rows, in the stated order.
BackwardInputs inputs_of_ones(int heads, const std::vector<SequenceShape>& sequences, const Mask& mask) {
  AttentionSpec spec = make_spec(Dtype::kF32, heads, 1, 8, mask);
  spec.softmax_scale = 1.0F;
  BackwardInputs inputs = random_backward_inputs(spec, sequences, 17);
  std::fill(inputs.lse.begin(), inputs.lse.end(), 0.0F);
  inputs.dlse.assign(inputs.lse.size(), 1.0F);
  return inputs;
}

float f32(const std::vector<std::byte>& bytes, std::int64_t index) {
  return load_element(bytes.data() + index * 4, Dtype::kF32);
}

// A left fold of splits of tiles, each from zero.
class SplitSum {
 public:
  void add(float value) { tile_ += value; }
  void end_tile() {
    split_ = split_is_empty_ ? tile_ : split_ + tile_;
    split_is_empty_ = false;
    tile_ = 0.0F;
  }
  void end_split() {
    if (split_is_empty_) return;
    closed_ = is_empty_ ? split_ : closed_ + split_;
    is_empty_ = false;
    split_is_empty_ = true;
  }
  float value() const { return is_empty_ ? 0.0F : closed_; }

 private:
  float tile_ = 0.0F, split_ = 0.0F, closed_ = 0.0F;
  bool split_is_empty_ = true, is_empty_ = true;
};

TEST(AttentionBackward, AddsKeysInTheStatedOrder) {
  const std::int64_t keys = 2 * kBackwardKvSplit + 300;
  for (const Mask& mask : {Mask{-1, -1}, Mask{kBackwardKvSplit + 41, -1}, Mask{500, 3}}) {
    BackwardInputs inputs = inputs_of_ones(1, {{30, keys, keys - 130}}, mask);
    std::fill(inputs.forward.q.begin(), inputs.forward.q.end(), std::byte{0});
    std::fill(inputs.dout.begin(), inputs.dout.end(), std::byte{0});
    for (const std::int64_t tiles : {0, 1, 7, 65}) {
      const Gradients result = differentiate(inputs, {.tiles_per_task = tiles, .ranks = tiles == 7 ? 3 : 1});
      for (std::int64_t i = 0; i < 30; ++i) {
        const std::int64_t position = keys - 130 + i;
        for (int dim = 0; dim < 8; ++dim) {
          SplitSum sum;
          for (std::int64_t key = 0; key < keys; ++key) {
            if (key % 128 == 0) sum.end_tile();
            if (key % kBackwardKvSplit == 0) sum.end_split();
            if (mask.left >= 0 && key < position - mask.left) continue;
            if (mask.right >= 0 && key > position + mask.right) continue;
            sum.add(f32(inputs.forward.k, key * 8 + dim));
          }
          sum.end_tile();
          sum.end_split();
          ASSERT_EQ(f32(result.dq, i * 8 + dim), sum.value()) << describe(mask) << ", query " << i;
        }
      }
    }
  }
}

TEST(AttentionBackward, AddsQueriesInTheStatedOrder) {
  for (const int heads : {64, 24, 7}) {
    for (const std::int64_t offset : {0, 37, -100}) {
      for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{90, 25}}) {
        const BackwardSequence lengths{heads == 7 ? 1300 : 330, 150, offset};
        BackwardInputs inputs = inputs_of_ones(heads, {{lengths.q_len, lengths.k_len, offset}}, mask);
        std::fill(inputs.forward.k.begin(), inputs.forward.k.end(), std::byte{0});
        const std::int64_t split = backward_query_split(inputs.forward.spec);
        BackwardInputs without_dout = inputs;
        std::fill(without_dout.dout.begin(), without_dout.dout.end(), std::byte{0});
        const BackwardArrangement arrangement{.tiles_per_task = offset == 37 ? 2 : 0, .ranks = offset == 0 ? 1 : 2};
        const Gradients result = differentiate(inputs, arrangement);
        const Gradients of_ones = differentiate(without_dout, arrangement);
        for (std::int64_t key = 0; key < lengths.k_len; key += 29) {
          for (int dim = 0; dim < 8; ++dim) {
            SplitSum dk, dv;
            for (std::int64_t tile = first_query_tile(lengths); tile < offset + lengths.q_len; tile += kBackwardTile) {
              if (tile % split == 0) {
                dk.end_split();
                dv.end_split();
              }
              for (int head = 0; head < heads; ++head) {
                bool sees = false;
                for (std::int64_t position = std::max(tile, offset);
                     position < std::min(tile + kBackwardTile, offset + lengths.q_len); ++position) {
                  if (mask.left >= 0 && key < position - mask.left) continue;
                  if (mask.right >= 0 && key > position + mask.right) continue;
                  sees = true;
                  const std::int64_t at = ((position - offset) * heads + head) * 8 + dim;
                  dk.add(f32(inputs.forward.q, at));
                  dv.add(f32(inputs.dout, at));
                }
                if (!sees) continue;
                dk.end_tile();
                dv.end_tile();
              }
            }
            dk.end_split();
            dv.end_split();
            ASSERT_EQ(f32(result.dv, key * 8 + dim), dv.value()) << heads << " heads, offset " << offset;
            ASSERT_EQ(f32(of_ones.dk, key * 8 + dim), dk.value()) << heads << " heads, offset " << offset;
          }
        }
      }
    }
  }
}

TEST(AttentionBackward, IsChosenAndRefusedByTheRegistry) {
  AttentionBackwardSpec spec{make_spec(Dtype::kBf16, 32, 8, 128, {-1, 0}), Dtype::kBf16};
  EXPECT_EQ(describe(spec), "backward of bf16, heads 32/8 (GQA 4:1), head_dim 128, causal");
  EXPECT_EQ(choose_kernel(spec, {"cpu"}).row->name, "cpu_attention_backward");
  spec.gradients = Dtype::kF32;
  EXPECT_EQ(describe(spec), "backward of bf16, heads 32/8 (GQA 4:1), head_dim 128, causal, gradients in fp32");
  EXPECT_EQ(missing_in_backward(spec), std::vector<std::string>());
  spec.gradients = Dtype::kF16;
  spec.forward.positions = 1;
  spec.forward.block_mask.heads = 1;
  spec.forward.block_mask.query_block = 128;
  spec.forward.block_mask.key_block = 128;
  EXPECT_EQ(missing_in_backward(spec),
            (std::vector<std::string>{"block masks", "key positions", "gradients in fp16 (supported: bf16, fp32)"}));
  spec.forward.head_dim = 260;
  const Error error = error_of([&] { choose_kernel(spec, {"cpu"}); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(error.what()).find("head_dim 260"), std::string::npos) << error.what();
}

TEST(AttentionBackward, ChecksTasks) {
  const AttentionBackwardSpec spec{make_spec(Dtype::kBf16, 2, 1, 8, {-1, 0}), Dtype::kBf16};
  const std::vector<std::byte> memory(4096);
  const BackwardSequence sequences[] = {{3, 3, 0}};
  const QueryRun rows[] = {{0, 0, 0, 3}};
  const KeyRun runs[] = {{0, 0, 1, 0}};
  const PageRun tiles[] = {{0, 0}};
  const auto view = [&](std::int64_t heads) { return dense_view(memory.data(), Dtype::kBf16, 3, heads, 8); };
  const BackwardKeySource keys[] = {{view(1), view(1)}};
  const float* const stats = reinterpret_cast<const float*>(memory.data());
  DqTask task;
  task.sequences = sequences;
  task.rows = rows;
  task.runs = runs;
  task.tiles = tiles;
  task.save = false;
  task.q = view(2);
  task.dout = view(2);
  task.stats = stats;
  task.sources = keys;
  EXPECT_NO_THROW(check_backward_task(spec, 128, task));
  const auto refused = [&](const auto& changed) {
    return error_of([&] { check_backward_task(spec, 128, changed); }).code() == ErrorCode::kInternal;
  };
  DqTask changed = task;
  changed.save = true;  // without a state
  EXPECT_TRUE(refused(changed));
  changed = task;
  changed.dout = view(1);
  EXPECT_TRUE(refused(changed));
  changed = task;
  changed.stats = nullptr;
  EXPECT_TRUE(refused(changed));
  changed = task;
  changed.tiles = {};
  EXPECT_TRUE(refused(changed));
  const KeyRun beyond[] = {{0, 0, 2, 0}};
  changed = task;
  changed.runs = beyond;
  EXPECT_TRUE(refused(changed));

  const BackwardQuerySource queries[] = {{view(2), view(2), stats}};
  DkvTask of_keys;
  static_cast<BackwardTask&>(of_keys) = task;
  of_keys.k = view(1);
  of_keys.v = view(1);
  of_keys.sources = queries;
  EXPECT_NO_THROW(check_backward_task(spec, of_keys));
  const MutableTensorView dk = dense_view(const_cast<std::byte*>(memory.data()), Dtype::kBf16, 3, 1, 8);
  of_keys.dk = &dk;  // without dv
  EXPECT_EQ(error_of([&] { check_backward_task(spec, of_keys); }).code(), ErrorCode::kInternal);
}

class BackwardTargets : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(BackwardTargets, AreAccurateAndInvariant) {
  const ForcedTarget forced(GetParam());
  const std::string identity = kernel_table<AttentionBackwardSpec>().back().make_backend({1, 0})->identity();
  if (identity != hwy::TargetName(GetParam())) GTEST_SKIP() << "needs: a build with " << hwy::TargetName(GetParam());
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const float softcap : {0.0F, 15.0F}) {
      AttentionSpec spec = make_spec(dtype, 6, 2, 64, {50, 7}, 24);
      spec.softcap = softcap;
      const BackwardInputs inputs = random_backward_inputs(spec, {{32, 300, 260}, {70, 90, -2}}, 18);
      const Gradients whole = differentiate(inputs);
      ASSERT_EQ(check_gradients(inputs, whole), "") << describe(inputs.spec());
      const BackwardArrangement other{.threads = 2, .tiles_per_task = 1, .ranks = 2, .max_run = 11, .strided = true};
      ASSERT_TRUE(differentiate(inputs, other).same_bits(whole)) << describe(inputs.spec());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Highway, BackwardTargets, ::testing::ValuesIn(targets_here()),
                         [](const auto& test) { return std::string(hwy::TargetName(test.param)); });

}  // namespace
}  // namespace ringattn::testing
