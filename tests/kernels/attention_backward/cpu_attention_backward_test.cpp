// SPDX-License-Identifier: Apache-2.0
// cpu_attention_backward beyond what backward_conformance_test.cpp checks of every kernel: the exact order of its sums,
// its SIMD targets, and its choice by the registry. Also the checks of tasks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/common/registry.hpp"
#include "tests/kernels/common/forced_target.hpp"
#include "tests/support/backward_accuracy.hpp"
#include "tests/support/backward_runner.hpp"
#include "tests/support/environment.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

const AttentionBackwardRow& cpu_row() {
  for (const AttentionBackwardRow& row : kernel_table<AttentionBackwardSpec>()) {
    if (row.name == "cpu_attention_backward") return row;
  }
  throw std::logic_error("the table has no cpu_attention_backward");
}

BackwardResult differentiate(const BackwardInputs& inputs, const BackwardArrangement& arrangement = {}) {
  BackwardResult result = differentiate_with(cpu_row(), inputs, arrangement);
  EXPECT_EQ(result.error, "");
  return result;
}

AttentionBackwardSpec fp32_spec(int heads, const Mask& mask) {
  return {make_spec(Dtype::kF32, heads, 1, 8, mask), Dtype::kF32};
}

void set_to_zero(std::vector<std::byte>& tensor) { std::fill(tensor.begin(), tensor.end(), std::byte{0}); }

TEST(CpuAttentionBackward, SinkWithoutWeightHasNoGradient) {
  AttentionBackwardSpec spec = fp32_spec(2, {2, 0});
  spec.forward.sinks = true;
  BackwardInputs inputs = random_backward_inputs(spec, {{20, 5, 0}}, 14);
  inputs.attention.sinks = {-kInfinity, 0.5F};
  compute_forward(inputs);
  const BackwardResult result = differentiate(inputs);
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

// LSE may come from another system: weights above 1 are not clamped, and weights that overflow are ∞.
TEST(CpuAttentionBackward, DoesNotClampWeights) {
  BackwardInputs inputs = random_backward_inputs(fp32_spec(1, {-1, -1}), {{1, 1, 0}}, 16);
  set_to_zero(inputs.attention.q);
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

// With scores of 0, LSE 0 makes P 1; with dO 0 as well, dLSE 1 makes dS 1. Gradients are then sums of rows in the order
// that attention_backward.hpp states.
BackwardInputs inputs_with_unit_weights(int heads, const SequenceShape& sequence, const Mask& mask) {
  AttentionBackwardSpec spec = fp32_spec(heads, mask);
  spec.forward.softmax_scale = 1.0F;
  BackwardInputs inputs = random_backward_inputs(spec, {sequence}, 17);
  std::fill(inputs.lse.begin(), inputs.lse.end(), 0.0F);
  std::fill(inputs.dlse.begin(), inputs.dlse.end(), 1.0F);
  return inputs;
}

float f32(const std::vector<std::byte>& bytes, std::int64_t index) {
  return load_element(bytes.data() + index * 4, Dtype::kF32);
}

// The sum of a gradient element: the rows of a tile from zero, the tiles of a split and the splits as left folds.
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
    merged_ = is_empty_ ? split_ : merged_ + split_;
    is_empty_ = false;
    split_is_empty_ = true;
  }
  float value() const { return is_empty_ ? 0.0F : merged_; }

 private:
  float tile_ = 0.0F, split_ = 0.0F, merged_ = 0.0F;
  bool split_is_empty_ = true, is_empty_ = true;
};

TEST(CpuAttentionBackward, AddsKeysInTheStatedOrder) {
  const std::int64_t keys = 2 * kBackwardKvSplit + 300;
  const int key_tile = BackwardRunner(cpu_row(), fp32_spec(1, {-1, -1})).kernel().key_tile();
  for (const Mask& mask : {Mask{-1, -1}, Mask{kBackwardKvSplit + 41, -1}, Mask{500, 3}}) {
    BackwardInputs inputs = inputs_with_unit_weights(1, {30, keys, keys - 130}, mask);
    set_to_zero(inputs.attention.q);
    set_to_zero(inputs.dout);
    for (const std::int64_t tiles : {0, 1, 7, 65}) {
      const BackwardResult result =
          differentiate(inputs, {.tiles_per_task = tiles, .ranks = tiles == 7 ? 3 : 1, .run_rows = 11});
      for (std::int64_t i = 0; i < 30; ++i) {
        const std::int64_t position = keys - 130 + i;
        for (int dim = 0; dim < 8; ++dim) {
          SplitSum sum;
          for (std::int64_t key = 0; key < keys; ++key) {
            if (key % key_tile == 0) sum.end_tile();
            if (key % kBackwardKvSplit == 0) sum.end_split();
            if (mask.left >= 0 && key < position - mask.left) continue;
            if (mask.right >= 0 && key > position + mask.right) continue;
            sum.add(f32(inputs.attention.k, key * 8 + dim));
          }
          sum.end_tile();
          sum.end_split();
          ASSERT_EQ(f32(result.dq, i * 8 + dim), sum.value()) << describe(mask) << ", query " << i;
        }
      }
    }
  }
}

TEST(CpuAttentionBackward, AddsQueriesInTheStatedOrder) {
  CaseChoice cases(4);
  // Query splits of one, two and nine tiles.
  for (const int heads : {64, 24, 7}) {
    for (const std::int64_t offset : {0, 37, -100}) {
      for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{90, 25}}) {
        if (!cases.take()) continue;
        const BackwardSequence lengths{heads == 7 ? 1300 : 330, 150, offset};
        BackwardInputs inputs = inputs_with_unit_weights(heads, {lengths.q_len, lengths.k_len, offset}, mask);
        set_to_zero(inputs.attention.k);
        const std::int64_t split = backward_query_split(inputs.attention.spec);
        BackwardInputs without_dout = inputs;
        set_to_zero(without_dout.dout);
        const BackwardArrangement arrangement{
            .tiles_per_task = offset == 37 ? 2 : 0, .ranks = offset == 0 ? 1 : 2, .run_rows = 37, .deal = 19};
        const BackwardResult with_dout = differentiate(inputs, arrangement);
        const BackwardResult result_without_dout = differentiate(without_dout, arrangement);
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
                  dk.add(f32(inputs.attention.q, at));
                  dv.add(f32(inputs.dout, at));
                }
                if (!sees) continue;
                dk.end_tile();
                dv.end_tile();
              }
            }
            dk.end_split();
            dv.end_split();
            ASSERT_EQ(f32(with_dout.dv, key * 8 + dim), dv.value()) << heads << " heads, offset " << offset;
            ASSERT_EQ(f32(result_without_dout.dk, key * 8 + dim), dk.value()) << heads << " heads, offset " << offset;
          }
        }
      }
    }
  }
}

TEST(CpuAttentionBackward, IsChosenAndRefusedByTheRegistry) {
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

TEST(CpuAttentionBackward, ChecksTasks) {
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
  DkvTask dkv_task;
  static_cast<BackwardTask&>(dkv_task) = task;
  dkv_task.k = view(1);
  dkv_task.v = view(1);
  dkv_task.sources = queries;
  EXPECT_NO_THROW(check_backward_task(spec, dkv_task));
  const MutableTensorView dk = dense_view(const_cast<std::byte*>(memory.data()), Dtype::kBf16, 3, 1, 8);
  dkv_task.dk = &dk;  // without dv
  EXPECT_EQ(error_of([&] { check_backward_task(spec, dkv_task); }).code(), ErrorCode::kInternal);
}

class BackwardTargets : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(BackwardTargets, AreAccurateAndInvariant) {
  const ForcedTarget forced(GetParam());
  const std::string identity = cpu_row().make_backend({1, 0})->identity();
  if (identity != hwy::TargetName(GetParam())) GTEST_SKIP() << "needs: a build with " << hwy::TargetName(GetParam());
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const float softcap : {0.0F, 15.0F}) {
      AttentionBackwardSpec spec{make_spec(dtype, 6, 2, 64, {50, 7}, 24), dtype};
      spec.forward.softcap = softcap;
      const BackwardInputs inputs = random_backward_inputs(spec, {{32, 300, 260}, {70, 90, -2}}, 18);
      const BackwardResult whole = differentiate(inputs);
      ASSERT_EQ(check_gradients(inputs, whole), "") << describe(spec);
      const BackwardArrangement other{
          .threads = 2, .tiles_per_task = 1, .ranks = 2, .run_rows = 11, .deal = 20, .shuffle = 21, .strided = true};
      ASSERT_TRUE(differentiate(inputs, other).same_bits(whole)) << describe(spec);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Highway, BackwardTargets, ::testing::ValuesIn(targets_here()),
                         [](const auto& test) { return std::string(hwy::TargetName(test.param)); });

}  // namespace
}  // namespace ringattn::testing
