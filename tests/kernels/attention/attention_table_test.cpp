// SPDX-License-Identifier: Apache-2.0
// The attention table: every kernel × tail × head ratio × mask × dtype, with soft-cap, sinks and query offset, against
// the oracle.
#include <fmt/format.h>

#include <array>
#include <optional>
#include <vector>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/environment.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kTails[] = {1, 127, 128, 129, 1000};
constexpr Dtype kDtypes[] = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};
constexpr Mask kMasks[] = {{-1, -1}, {-1, 0}, {0, 0}, {70, -1}, {70, 9}, {-1, 9}};
constexpr int kHeads = 8;

// What varies beside the table's axes.
struct Options {
  float softcap;
  bool sinks;
  int offset;  // −1: before the first key; 0; 1: after it
};
constexpr std::array<Options, 12> kOptions = {{{0, false, 0},
                                               {20, true, 1},
                                               {0, true, -1},
                                               {20, false, 0},
                                               {0, false, 1},
                                               {20, true, -1},
                                               {0, true, 0},
                                               {20, false, 1},
                                               {0, false, -1},
                                               {20, true, 0},
                                               {0, true, 1},
                                               {20, false, -1}}};

class AttentionTable : public KernelRowTest {
 protected:
  void check(Dtype dtype, int kv_heads) {
    const std::optional<Dims> dims = usual_dims(row(), dtype);
    if (!dims) GTEST_SKIP() << row().name << " has no kernel for " << dtype_name(dtype);
    // Without RINGATTN_TEST_LONG each point of the table gets three of the twelve options, in turn.
    std::size_t turn = static_cast<std::size_t>(dtype) + static_cast<std::size_t>(kv_heads);
    const std::size_t per_point = long_tests() ? kOptions.size() : 3;
    for (const std::int64_t keys : kTails) {
      for (const Mask& mask : kMasks) {
        for (std::size_t n = 0; n < per_point; ++n, ++turn) {
          const Options& options = kOptions[turn % kOptions.size()];
          AttentionSpec spec = make_spec(*dims, kHeads, kv_heads, mask);
          spec.softcap = options.softcap;
          spec.sinks = options.sinks;
          const std::int64_t rows = keys > 200 && !long_tests() ? 7 : std::min<std::int64_t>(keys, 19);
          const std::int64_t offset = options.offset < 0 ? -7 : options.offset == 0 ? 0 : keys - rows / 2;
          const AttentionInputs inputs = random_inputs(spec, {{rows, keys, offset}}, turn + 1);
          const AttentionResult result = attend_with(row(), inputs);
          ASSERT_EQ(check_accuracy(inputs, result.out, result.lse), "")
              << describe(spec) << ", " << keys << " keys, offset " << offset;
        }
        turn += 1;  // so that a mask meets all options over the tails
      }
    }
  }
};

TEST_P(AttentionTable, Fp32Mha) { check(Dtype::kF32, 8); }
TEST_P(AttentionTable, Fp32Gqa) { check(Dtype::kF32, 2); }
TEST_P(AttentionTable, Fp32Mqa) { check(Dtype::kF32, 1); }
TEST_P(AttentionTable, Bf16Mha) { check(Dtype::kBf16, 8); }
TEST_P(AttentionTable, Bf16Gqa) { check(Dtype::kBf16, 2); }
TEST_P(AttentionTable, Bf16Mqa) { check(Dtype::kBf16, 1); }
TEST_P(AttentionTable, Fp16Mha) { check(Dtype::kF16, 8); }
TEST_P(AttentionTable, Fp16Gqa) { check(Dtype::kF16, 2); }
TEST_P(AttentionTable, Fp16Mqa) { check(Dtype::kF16, 1); }

// Head dims, equal and not: those that every kernel is asked for, and a sweep with nothing a multiple of anything else
// for kernels that take any.
TEST_P(AttentionTable, HeadDims) {
  std::vector<Dims> list = all_dims(row());
  for (const Dtype dtype : kDtypes) {
    for (int dim = 8; dim <= 256; dim += long_tests() ? 8 : 40) {
      for (const int dim_v : {dim, 264 - dim, 24}) list.push_back({dtype, dim, dim_v});
    }
    list.insert(list.end(), {{dtype, 264, 392}, {dtype, 512, 24}, {dtype, 40, 504}});
  }
  for (const Dims& dims : list) {
    const AttentionSpec spec = make_spec(dims, 3, 1, {-1, 0});
    if (!cannot_run(row(), spec).empty()) continue;  // of the sweep
    const auto seed = static_cast<std::uint64_t>(dims.head_dim + dims.head_dim_v);
    const AttentionInputs inputs = random_inputs(spec, {{29, 157, 128}}, seed);
    const AttentionResult result = attend_with(row(), inputs);
    ASSERT_EQ(check_accuracy(inputs, result.out, result.lse), "") << describe(spec);
  }
}

TEST_P(AttentionTable, RaggedBatch) {
  // Empty sequences, queries without keys, keys without queries, one token, more queries than keys.
  const std::vector<SequenceShape> sequences = {{0, 0, 0},      {1, 1, 0},       {5, 0, -5}, {0, 130, 0},
                                                {40, 300, 260}, {200, 129, -71}, {3, 3, 0},  {0, 0, 0}};
  for (const Mask& mask : kMasks) {
    for (const bool sinks : {false, true}) {
      AttentionSpec spec = make_spec(usual_dims(row()).front(), 4, 2, mask);
      spec.sinks = sinks;
      const AttentionInputs inputs = random_inputs(spec, sequences, 7);
      const AttentionResult result = attend_with(row(), inputs);
      ASSERT_EQ(check_accuracy(inputs, result.out, result.lse), "") << describe(spec);
    }
  }
}

// There is nothing to compare but that it ends, and without a row.
TEST_P(AttentionTable, NoTokensAtAll) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 4, 2, {-1, 0});
  for (const std::vector<SequenceShape>& sequences : {std::vector<SequenceShape>{}, {{0, 7, 0}}}) {
    const AttentionResult result = attend_with(row(), random_inputs(spec, sequences, 1));
    EXPECT_TRUE(result.out.empty());
    EXPECT_TRUE(result.lse.empty());
    count_check();
  }
}

RINGATTN_FOR_EVERY_KERNEL(AttentionTable);

}  // namespace
}  // namespace ringattn::testing
