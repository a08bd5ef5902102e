// SPDX-License-Identifier: Apache-2.0
// What every backward kernel of the table promises: gradients as accurate as check_gradients() says, in the same bits
// however rows are dealt, tasks are cut and memory is laid out; and values that are not finite stay behind the mask. A
// case that a kernel can't do is skipped.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/common/kernel_row_test.hpp"
#include "tests/support/backward_accuracy.hpp"
#include "tests/support/backward_runner.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/environment.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn {
inline void PrintTo(const KernelRow<AttentionBackwardSpec>& row, std::ostream* stream) { *stream << row.name; }
}  // namespace ringattn

namespace ringattn::testing {
namespace {

constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kF16, Dtype::kF32};
constexpr Mask kMasks[] = {{-1, -1}, {-1, 0}, {0, 0}, {100, 0}, {70, 33}, {-1, 5}, {7, -1}};

struct HeadDims {
  int head_dim;
  int head_dim_v;
};
constexpr HeadDims kHeadDims[] = {{64, 64}, {128, 128}, {96, 96}, {192, 128}, {256, 256}};

// Empty and one-token sequences, no queries, no keys, more queries than keys and fewer, and positions before and after
// the keys.
std::vector<SequenceShape> ragged() {
  return {{130, 200, 70}, {0, 60, 0}, {90, 77, -9}, {1, 1, 0}, {20, 0, 0}, {0, 0, 0}, {70, 64, -64}};
}

std::string to_string(const BackwardArrangement& a) {
  return fmt::format(
      "threads {}, tiles per task {}, cuts {}, ranks {}, run rows {}, deal {}, needed tiles {}, shuffle {}, sources "
      "{}, "
      "strided {}, odd {}, separate finish {}, keep state {}",
      a.threads, a.tiles_per_task, a.cuts, a.ranks, a.run_rows, a.deal, a.needed_tiles, a.shuffle, a.sources, a.strided,
      a.odd, a.separate_finish, a.keep_state);
}

class AttentionBackward : public ::testing::TestWithParam<AttentionBackwardRow> {
 protected:
  void SetUp() override {
    const std::string reason = row().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(row().name, checks_made() - checks_before_);
  }

  const AttentionBackwardRow& row() const { return GetParam(); }
  bool can(const AttentionBackwardSpec& spec) const { return row().missing(spec).empty(); }
  // As KernelRowTest's.
  CaseChoice choose_cases(std::int64_t every) const { return CaseChoice(row().backend == "cpu" ? every : 1); }

  // The first head dims that the kernel has for a dtype, with gradients in fp32 and, if `rounded`, in the dtype.
  std::vector<AttentionBackwardSpec> usual_specs(int heads, int kv_heads, const Mask& mask, bool rounded = true) const {
    std::vector<AttentionBackwardSpec> specs;
    for (const Dtype dtype : kDtypes) {
      for (const Dtype gradients : {Dtype::kF32, dtype}) {
        for (const HeadDims& dims : kHeadDims) {
          // GPUs store dS at 128, and not at 64
          if (row().backend == "cuda" && dtype == Dtype::kBf16 && dims.head_dim == 64) continue;
          const AttentionBackwardSpec spec{make_spec(dtype, heads, kv_heads, dims.head_dim, mask, dims.head_dim_v),
                                           gradients};
          if (!can(spec) || (!rounded && gradients != Dtype::kF32)) continue;
          if (!specs.empty() && specs.back() == spec) continue;
          specs.push_back(spec);
          break;
        }
      }
    }
    return specs;
  }
  // One of them: 16-bit where the kernel has it, with gradients in fp32.
  std::vector<AttentionBackwardSpec> usual_spec(int heads, int kv_heads, const Mask& mask) const {
    std::vector<AttentionBackwardSpec> specs = usual_specs(heads, kv_heads, mask, false);
    if (specs.size() > 1) specs.resize(1);
    return specs;
  }

  // Against the oracle, and the same bits dealt and cut.
  void check(const BackwardInputs& inputs, ForwardResults forward = ForwardResults::kGiven) {
    SCOPED_TRACE(describe(inputs.spec()));
    BackwardRunner runner(row(), inputs.spec());
    const BackwardResult result = runner.run(inputs);
    ASSERT_EQ(check_gradients(inputs, result, forward), "");
    ASSERT_TRUE(runner
                    .run(inputs, {.cuts = 3,
                                  .ranks = 3,
                                  .run_rows = 50,
                                  .deal = 4,
                                  .needed_tiles = true,
                                  .shuffle = 5,
                                  .keep_state = true})
                    .same_bits(result));
  }

  static std::vector<BackwardArrangement> several_splits_arrangements() {
    return {{.threads = 3},
            {.tiles_per_task = 1, .shuffle = 11, .strided = true},
            {.tiles_per_task = 2, .separate_finish = true},
            {.ranks = 2, .run_rows = 33, .deal = 12},
            {.tiles_per_task = 3, .ranks = 3, .run_rows = 37, .deal = 13, .needed_tiles = true},
            {.tiles_per_task = 1, .ranks = 7, .run_rows = 5, .deal = 14, .shuffle = 15, .strided = true}};
  }

  void expect_same(const BackwardInputs& inputs, const std::vector<BackwardArrangement>& arrangements) {
    const BackwardResult expected = differentiate_with(row(), inputs);
    ASSERT_EQ(expected.error, "");
    for (const BackwardArrangement& arrangement : arrangements) {
      const BackwardResult result = differentiate_with(row(), inputs, arrangement);
      ASSERT_EQ(result.error, "") << to_string(arrangement);
      ASSERT_TRUE(result.same_bits(expected)) << describe(inputs.spec()) << "; " << to_string(arrangement);
    }
  }

 private:
  std::int64_t checks_before_ = 0;
};

TEST_P(AttentionBackward, EveryMask) {
  for (const Mask& mask : kMasks) {
    for (const AttentionBackwardSpec& spec : usual_specs(4, 2, mask, false)) {
      check(random_backward_inputs(spec, {{70, 130, 60}, {30, 77, -9}, {1, 1, 0}, {9, 0, 0}, {0, 12, 0}}, 501));
    }
  }
}

// The gradients of the attention itself, and not only of O and LSE as they were rounded.
TEST_P(AttentionBackward, OfExactForwardResults) {
  for (const AttentionBackwardSpec& spec : usual_specs(4, 2, {-1, 0})) {
    check(random_backward_inputs(spec, {{60, 90, 30}, {40, 30, -9}}, 502), ForwardResults::kExact);
  }
}

TEST_P(AttentionBackward, EveryHeadRatio) {
  constexpr std::pair<int, int> kHeads[] = {{6, 2}, {10, 2}, {7, 1}, {14, 2}, {3, 3}, {16, 1}, {71, 1}};
  for (const auto& [heads, kv_heads] : kHeads) {
    for (const AttentionBackwardSpec& spec : usual_spec(heads, kv_heads, {-1, 0})) {
      check(random_backward_inputs(spec, {{75, 75, 0}, {20, 70, 50}}, 503));
    }
  }
}

TEST_P(AttentionBackward, EveryHeadDim) {
  std::vector<HeadDims> every_dims(std::begin(kHeadDims), std::end(kHeadDims));
  every_dims.insert(every_dims.end(), {{8, 8}, {40, 136}, {40, 24}, {328, 200}, {576, 512}});
  for (const Dtype dtype : kDtypes) {
    for (const HeadDims& dims : every_dims) {
      for (const Dtype gradients : {Dtype::kF32, dtype}) {
        AttentionBackwardSpec spec{make_spec(dtype, 2, 1, dims.head_dim, {-1, 0}, dims.head_dim_v), gradients};
        if (!can(spec) || (gradients == dtype && dtype == Dtype::kF32 && dims.head_dim > 64)) continue;
        const BackwardInputs inputs = random_backward_inputs(spec, {{90, 140, 50}}, 504);
        check(inputs);
        if (gradients == dtype) expect_same(inputs, {{.tiles_per_task = 1, .shuffle = 12}, {.odd = true}});
      }
    }
  }
}

TEST_P(AttentionBackward, SoftcapAndSinks) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{50, 9}}) {
    for (AttentionBackwardSpec spec : usual_specs(4, 2, mask, mask.is_causal())) {
      for (const float softcap : {0.0F, 1.5F, 30.0F}) {
        spec.forward.softcap = softcap;
        spec.forward.sinks = softcap != 30.0F;
        if (can(spec)) check(random_backward_inputs(spec, {{50, 80, 20}, {30, 20, -14}, {5, 0, 0}}, 505));
      }
    }
  }
}

// Tiles of queries begin at multiples of kBackwardTile positions, wherever the sequence does.
TEST_P(AttentionBackward, EveryOffset) {
  for (const Mask& mask : {Mask{-1, 0}, Mask{40, 25}}) {
    for (const AttentionBackwardSpec& spec : usual_spec(2, 1, mask)) {
      for (const std::int64_t offset : {-200, -130, -65, -64, -63, -1, 0, 1, 31, 63, 64, 65, 127, 1000}) {
        check(random_backward_inputs(spec, {{100, 150, offset}, {3, 70, offset}}, 506));
      }
    }
  }
}

TEST_P(AttentionBackward, Ragged) {
  for (const AttentionBackwardSpec& spec : usual_specs(4, 2, {-1, 0})) {
    check(random_backward_inputs(spec, ragged(), 507));
  }
}

TEST_P(AttentionBackward, WithoutGradientOfLse) {
  for (const AttentionBackwardSpec& spec : usual_specs(4, 2, {-1, 0}, false)) {
    BackwardInputs inputs = random_backward_inputs(spec, {{60, 90, 30}}, 517);
    inputs.dlse.clear();
    check(inputs);
  }
}

// Gradients of rows without pairs are written, and are 0.
TEST_P(AttentionBackward, RowsWithoutPairs) {
  for (const bool sinks : {false, true}) {
    for (AttentionBackwardSpec spec : usual_specs(4, 2, {-1, 0})) {
      spec.forward.sinks = sinks;
      if (!can(spec)) continue;
      // Causal: no query of the first sequence sees a key, and no query sees the keys from 31 on of the second one. The
      // third has no keys, and the last no queries.
      const BackwardInputs inputs =
          random_backward_inputs(spec, {{40, 90, -40}, {31, 200, 0}, {9, 0, 0}, {0, 7, 0}}, 508);
      const BackwardResult result = differentiate_with(row(), inputs);
      EXPECT_EQ(check_gradients(inputs, result), "") << describe(spec);
      const auto is_zero = [](const std::vector<std::byte>& rows, std::size_t begin, std::size_t end) {
        return std::all_of(rows.begin() + static_cast<std::ptrdiff_t>(begin),
                           rows.begin() + static_cast<std::ptrdiff_t>(end),
                           [](std::byte byte) { return byte == std::byte{0}; });
      };
      const std::size_t element = size_of(spec.gradients);
      const std::size_t q_token = 4 * static_cast<std::size_t>(spec.forward.head_dim) * element;
      EXPECT_TRUE(is_zero(result.dq, 0, 40 * q_token));
      EXPECT_TRUE(is_zero(result.dq, (40 + 31) * q_token, 80 * q_token));
      for (const std::vector<std::byte>* rows : {&result.dk, &result.dv}) {
        const std::size_t token = rows->size() / 297;
        EXPECT_TRUE(is_zero(*rows, 0, 90 * token));
        EXPECT_TRUE(is_zero(*rows, (90 + 31) * token, 297 * token));
      }
    }
  }
}

// O and LSE may come from another system: gradients follow what is given.
TEST_P(AttentionBackward, OfGivenForwardResults) {
  for (const AttentionBackwardSpec& spec : usual_specs(4, 2, {-1, 0})) {
    BackwardInputs inputs = random_backward_inputs(spec, {{90, 120, 30}}, 509);
    for (std::size_t i = 0; i < inputs.lse.size(); ++i) inputs.lse[i] += i % 2 == 0 ? -0.75F : 0.5F;
    std::fill(inputs.out.begin(), inputs.out.end(), std::byte{0x3c});
    check(inputs);
  }
}

// dO up to 2^15 in fp16, as loss scaling makes it.
TEST_P(AttentionBackward, LargeGradientsInFp16) {
  bool any = false;
  for (const AttentionBackwardSpec& spec : usual_specs(4, 2, {-1, 0})) {
    if (spec.forward.dtype != Dtype::kF16) continue;
    any = true;
    BackwardInputs inputs = random_backward_inputs(spec, {{90, 120, 30}, {40, 40, 0}}, 510);
    for (std::size_t at = 0; at < inputs.attention.v.size(); at += 2) {
      const float value = load_element(inputs.attention.v.data() + at, Dtype::kF16);
      store_element(inputs.attention.v.data() + at, Dtype::kF16, 0x1p-6F * value);
    }
    for (std::int64_t token = 0; token < 130; token += 9) {
      for (int head = 0; head < 4; ++head) {
        const auto dim = static_cast<int>(token + head) % spec.forward.head_dim_v;
        inputs.set_dout(token, head, dim, token % 2 == 0 ? 0x1p15F : -0x1p15F);
      }
    }
    compute_forward(inputs);
    check(inputs);
  }
  if (!any) GTEST_SKIP() << row().name << " has no fp16";
}

TEST_P(AttentionBackward, HugeLogits) {
  for (const float factor : {30.0F, 3000.0F}) {
    for (const AttentionBackwardSpec& spec : usual_specs(4, 2, {-1, 0})) {
      const Dtype dtype = spec.forward.dtype;
      BackwardInputs inputs = random_backward_inputs(spec, {{90, 120, 30}}, 511);
      std::vector<std::byte>& q = inputs.attention.q;
      for (std::size_t at = 0; at < q.size(); at += size_of(dtype)) {
        store_element(q.data() + at, dtype, factor * load_element(q.data() + at, dtype));
      }
      compute_forward(inputs);
      check(inputs);
    }
  }
}

TEST_P(AttentionBackward, ScalesOfZeroAndBelow) {
  for (const float scale : {0.0F, -0.2F}) {
    for (AttentionBackwardSpec spec : usual_spec(4, 2, {-1, 0})) {
      spec.forward.softmax_scale = scale;
      check(random_backward_inputs(spec, {{90, 120, 30}}, 512));
    }
  }
}

// dQ over several KV splits, and dK and dV over several query splits, whole and cut within them.
TEST_P(AttentionBackward, SeveralSplits) {
  const std::int64_t keys = 2 * kBackwardKvSplit + 200;
  for (const AttentionBackwardSpec& spec : usual_spec(1, 1, {-1, 0})) {
    check(random_backward_inputs(spec, {{6, keys, keys - 5}}, 513));
    const std::int64_t queries = 2 * backward_query_split(spec.forward) + 100;
    check(random_backward_inputs(spec, {{queries, 20, -17}}, 514));
  }
  for (const AttentionBackwardSpec& spec : usual_spec(64, 1, {-1, 0})) {
    check(random_backward_inputs(spec, {{130, 20, -10}}, 515));
  }
  for (const HeadDims& dims : kHeadDims) {
    const AttentionBackwardSpec spec{make_spec(Dtype::kBf16, 64, 1, dims.head_dim, {-1, 0}, dims.head_dim_v),
                                     Dtype::kF32};
    if (can(spec)) expect_same(random_backward_inputs(spec, {{70, 20, 0}}, 520), {{.tiles_per_task = 1}});
  }
}

TEST_P(AttentionBackward, KvSplitsCutAnyhow) {
  const std::int64_t keys = 2 * kBackwardKvSplit + 77;
  for (const Mask& mask : {Mask{-1, 0}, Mask{9000, 10}}) {
    for (const AttentionBackwardSpec& spec : usual_spec(2, 1, mask)) {
      const BackwardInputs inputs = random_backward_inputs(spec, {{20, keys, keys - 28}}, 518);
      expect_same(inputs, several_splits_arrangements());
    }
  }
}

// Query splits of one tile each, because a KV head has 64 query heads or more.
TEST_P(AttentionBackward, QuerySplitsCutAnyhow) {
  constexpr std::pair<int, Mask> kCases[] = {{64, {-1, 0}}, {71, {100, 30}}};
  for (const auto& [heads, mask] : kCases) {
    for (const AttentionBackwardSpec& spec : usual_spec(heads, 1, mask)) {
      const BackwardInputs inputs =
          random_backward_inputs(spec, {{100, 100, 0}, {0, 9, 0}, {1, 1, 0}, {90, 120, -45}, {70, 140, 101}}, 519);
      expect_same(inputs, several_splits_arrangements());
    }
  }
}

TEST_P(AttentionBackward, SeveralSplitsOfBoth) {
  if (!long_tests()) GTEST_SKIP() << "RINGATTN_TEST_LONG isn't 1";
  // Rows at the ends of splits see keys, or queries, of both sides.
  const std::int64_t keys = kBackwardKvSplit + 300;
  for (const Mask& mask : {Mask{600, 0}, Mask{400, 200}}) {
    for (const AttentionBackwardSpec& spec : usual_spec(1, 1, mask)) {
      check(random_backward_inputs(spec, {{4500, keys, keys - 4500}}, 516));
    }
  }
}

// More scores than a workspace holds: a kernel that computes them once for all gradients does so in parts. Keys of
// several KV splits, and queries of several query splits, of a sequence between others.
TEST_P(AttentionBackward, OneCallOfManyScores) {
  if (row().backend != "cuda") GTEST_SKIP() << "a CPU needs minutes for that many, and computes them twice";
  struct Case {
    Mask mask;
    Dtype dtype;
    int head_dim;
    SequenceShape shape;
  };
  for (const Case& c :
       {Case{{-1, 0}, Dtype::kBf16, 128, {9500, 9600, 33}}, Case{{-1, -1}, Dtype::kF16, 96, {2000, 20000, 0}},
        Case{{9000, 300}, Dtype::kF16, 128, {5000, 16000, -100}}}) {
    AttentionBackwardSpec spec{make_spec(c.dtype, 6, 2, c.head_dim, c.mask), Dtype::kF32};
    if (!can(spec)) continue;
    expect_same(unrelated_backward_inputs(spec, {{200, 300, 70}, c.shape, {90, 100, 10}}, 520),
                {{.separate_finish = true}});
  }
}

TEST_P(AttentionBackward, TasksCutAnywhere) {
  CaseChoice cases = choose_cases(2);  // of three dtypes
  for (const Mask& mask : kMasks) {
    for (const AttentionBackwardSpec& spec : usual_specs(4, 2, mask, false)) {
      if (!cases.take()) continue;
      expect_same(random_backward_inputs(spec, ragged(), 521), {{.tiles_per_task = 1},
                                                                {.tiles_per_task = 2, .keep_state = true},
                                                                {.cuts = 7},
                                                                {.cuts = 8, .needed_tiles = true},
                                                                {.separate_finish = true},
                                                                {.tiles_per_task = 1, .separate_finish = true}});
    }
  }
}

TEST_P(AttentionBackward, RowsDealtAnyhow) {
  for (const Mask& mask : kMasks) {
    for (AttentionBackwardSpec spec : usual_spec(6, 2, mask)) {
      spec.forward.softcap = 25.0F;
      spec.forward.sinks = true;
      if (!can(spec)) continue;
      expect_same(random_backward_inputs(spec, ragged(), 522),
                  {{.ranks = 2, .run_rows = 64},
                   {.ranks = 3, .run_rows = 1},
                   {.ranks = 5, .run_rows = 90, .deal = 31, .needed_tiles = true},
                   {.cuts = 32, .ranks = 4, .run_rows = 7, .deal = 33, .needed_tiles = true},
                   {.tiles_per_task = 2, .ranks = 8, .run_rows = 200, .deal = 34, .shuffle = 35},
                   {.ranks = 7, .run_rows = 128, .deal = 36, .strided = true, .separate_finish = true}});
    }
  }
}

TEST_P(AttentionBackward, MemoryLaidOutAnyhow) {
  for (const AttentionBackwardSpec& spec : usual_specs(4, 2, {-1, 0})) {
    expect_same(random_backward_inputs(spec, ragged(), 523),
                {{.shuffle = 41},
                 {.shuffle = 42, .sources = 1},
                 {.tiles_per_task = 3, .shuffle = 43, .sources = 40},
                 {.strided = true},
                 {.odd = true},
                 {.cuts = 44, .shuffle = 45, .strided = true, .odd = true}});
  }
}

TEST_P(AttentionBackward, AnyNumberOfThreads) {
  for (const AttentionBackwardSpec& spec : usual_spec(8, 2, {-1, 0})) {
    expect_same(random_backward_inputs(spec, ragged(), 524), {{.threads = 0},
                                                              {.threads = 2},
                                                              {.threads = 3, .tiles_per_task = 1},
                                                              {.threads = 7, .cuts = 51, .ranks = 2, .run_rows = 50},
                                                              {.threads = 16, .strided = true}});
  }
}

// The order of additions is that of a loop on the host.
TEST_P(AttentionBackward, SumsOfRowsInOrder) {
  constexpr std::int64_t kRows = 300;
  constexpr std::int64_t kHeads = 3;
  const std::vector<AttentionBackwardSpec> specs = usual_specs(kHeads, 1, {-1, 0});
  ASSERT_FALSE(specs.empty());
  const auto backend = row().make_backend({2, 0});
  const auto kernel = row().make_kernel(specs.front(), *backend);
  kernel->reserve({});
  std::mt19937 random(531);
  std::vector<float> rows;
  for (std::int64_t i = 0; i < kRows * kHeads; ++i) rows.push_back(std::ldexp(static_cast<float>(random()), -31));
  rows[0] = -0.0F;
  std::vector<std::int64_t> order(kRows);
  std::iota(order.begin(), order.end(), 0);
  const std::vector<std::int64_t> begins{0, 1, 1, 65, 66, kRows};
  const std::int64_t count = std::ssize(begins) - 1;
  const auto on_device = [&](const auto& values) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
    DeviceArray array(*backend, values.size() * sizeof(values[0]));
    array.write({bytes, bytes + values.size() * sizeof(values[0])});
    return array;
  };
  for (const bool ordered : {false, true}) {
    if (ordered) std::ranges::shuffle(order, random);
    std::vector<float> expected;
    for (std::size_t sum = 0; sum + 1 < begins.size(); ++sum) {
      for (std::int64_t head = 0; head < kHeads; ++head) {
        float value = 0.0F;
        for (std::int64_t at = begins[sum]; at < begins[sum + 1]; ++at) {
          const float term = rows[static_cast<std::size_t>(order[static_cast<std::size_t>(at)] * kHeads + head)];
          value = at == begins[sum] ? term : value + term;
        }
        expected.push_back(value);
      }
    }
    const DeviceArray on_rows = on_device(rows), on_order = on_device(order), on_begins = on_device(begins);
    const DeviceArray sums(*backend, expected.size() * sizeof(float));
    const auto table = [](const DeviceArray& a) { return reinterpret_cast<const std::int64_t*>(a.data()); };
    kernel->sum_rows({on_rows.floats(), ordered ? table(on_order) : nullptr, table(on_begins), count, sums.floats()},
                     backend->stream());
    const std::vector<float> made = sums.read_floats();
    EXPECT_EQ(std::memcmp(made.data(), expected.data(), expected.size() * sizeof(float)), 0) << ordered;
    count_check();
  }
}

// Scratch keeps what the last run left there.
TEST_P(AttentionBackward, RepetitionsAfterOtherInputs) {
  for (const AttentionBackwardSpec& spec : usual_specs(4, 2, {-1, 0}, false)) {
    const BackwardInputs clean = random_backward_inputs(spec, {{60, 90, 30}, {0, 20, 0}, {40, 30, -9}}, 525);
    BackwardInputs poison = clean;
    for (std::vector<std::byte>* tensor :
         {&poison.attention.q, &poison.attention.k, &poison.attention.v, &poison.dout}) {
      std::fill(tensor->begin(), tensor->end(), std::byte{0xff});
    }
    BackwardRunner runner(row(), spec, 2);
    const BackwardResult expected = runner.run(clean);
    runner.run(poison);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(runner.run(clean).same_bits(expected)) << describe(spec);
  }
}

// The gradients of the last sequence, in whatever it is packed with.
TEST_P(AttentionBackward, NeighborsInTheBatchMoveNoBit) {
  for (const AttentionBackwardSpec& spec : usual_specs(4, 2, {60, 0})) {
    const SequenceShape shape{100, 130, 17};
    const BackwardInputs packed = random_backward_inputs(spec, {{33, 70, 5}, {5, 0, 0}, shape}, 526);
    BackwardInputs alone = packed;
    alone.attention.sequences = {shape};
    const auto keep_last = [](auto& rows, std::int64_t of_all, std::int64_t kept) {
      const std::size_t size = rows.size() / static_cast<std::size_t>(of_all) * static_cast<std::size_t>(kept);
      rows.erase(rows.begin(), rows.end() - static_cast<std::ptrdiff_t>(size));
    };
    keep_last(alone.attention.q, 138, 100);
    keep_last(alone.out, 138, 100);
    keep_last(alone.dout, 138, 100);
    keep_last(alone.lse, 138, 100);
    keep_last(alone.dlse, 138, 100);
    keep_last(alone.attention.k, 200, 130);
    keep_last(alone.attention.v, 200, 130);
    BackwardResult expected = differentiate_with(row(), packed);
    keep_last(expected.dq, 138, 100);
    keep_last(expected.stats, 138, 100);
    keep_last(expected.dk, 200, 130);
    keep_last(expected.dv, 200, 130);
    EXPECT_TRUE(differentiate_with(row(), alone).same_bits(expected)) << describe(spec);
  }
}

// NaN and ∞ planted in one input of one sequence. What a row sees may touch it. Outside the CPU, so may values of K, Q
// and dO in its tiles that it does not see.
class AttentionBackwardNonFinite : public AttentionBackward {
 protected:
  static constexpr std::int64_t kQueries = 100;
  static constexpr std::int64_t kKeys = 200;
  static constexpr std::int64_t kOffset = 100;
  static constexpr int kHeads = 4;
  static constexpr int kKvHeads = 2;

  static int kv_head_of(int head) { return head / (kHeads / kKvHeads); }

  // touched(token, head): the row may differ from the one of inputs without the planted value. reached(token, head): it
  // is not finite.
  template <class Predicate>
  void expect_rows(const std::vector<std::byte>& planted, const std::vector<std::byte>& clean, std::int64_t heads,
                   Dtype dtype, std::int64_t tokens, const char* name, const Predicate& touched,
                   const Predicate& reached) {
    const std::size_t row_bytes = clean.size() / static_cast<std::size_t>(tokens * heads);
    for (std::int64_t i = 0; i < tokens * heads; ++i) {
      const std::byte* const row = planted.data() + static_cast<std::size_t>(i) * row_bytes;
      const std::byte* const expected = clean.data() + static_cast<std::size_t>(i) * row_bytes;
      const auto head = static_cast<int>(i % heads);
      if (!touched(i / heads, head)) {
        ASSERT_TRUE(std::equal(row, row + row_bytes, expected))
            << name << " of token " << i / heads << ", head " << head;
      }
      if (!reached(i / heads, head)) continue;
      bool finite = true;
      for (std::size_t at = 0; at < row_bytes; at += size_of(dtype)) {
        finite = finite && std::isfinite(load_element(row + at, dtype));
      }
      ASSERT_FALSE(finite) << name << " of token " << i / heads << ", head " << head << " is finite";
    }
    count_check();
  }

  using RowPredicate = std::function<bool(std::int64_t, int)>;
  struct Reach {
    RowPredicate dq_touched, dk_touched, dv_touched;
    RowPredicate dq_reached, dk_reached, dv_reached;
  };

  // plant(inputs, value) changes an input after the forward's results were computed, and may compute them again.
  template <class Plant, class ReachOf>
  void check_planted(const Plant& plant, const ReachOf& reach_of) {
    CaseChoice cases = choose_cases(2);
    for (const Mask& mask : {Mask{-1, 0}, Mask{30, 20}, Mask{-1, -1}}) {
      for (const AttentionBackwardSpec& spec : usual_specs(kHeads, kKvHeads, mask, false)) {
        const BackwardInputs clean_inputs =
            random_backward_inputs(spec, {{kQueries, kKeys, kOffset}, {20, 30, 10}}, 531);
        BackwardRunner runner(row(), spec);
        const BackwardResult clean = runner.run(clean_inputs);
        const Reach reach = reach_of(mask);
        for (const float value : {kNan, kInfinity, -kInfinity}) {
          if (!cases.take()) continue;
          SCOPED_TRACE(describe(spec) + ", planted " + std::to_string(value));
          BackwardInputs inputs = clean_inputs;
          plant(inputs, value);
          const BackwardResult planted = runner.run(inputs);
          const RowPredicate none = [](std::int64_t, int) { return false; };
          const bool nan = std::isnan(value);
          expect_rows(planted.dq, clean.dq, kHeads, spec.gradients, kQueries + 20, "dQ", reach.dq_touched,
                      nan ? reach.dq_reached : none);
          expect_rows(planted.dk, clean.dk, kKvHeads, spec.gradients, kKeys + 30, "dK", reach.dk_touched,
                      nan ? reach.dk_reached : none);
          expect_rows(planted.dv, clean.dv, kKvHeads, spec.gradients, kKeys + 30, "dV", reach.dv_touched,
                      nan ? reach.dv_reached : none);
          if (HasFatalFailure()) return;
          ASSERT_NE(planted.dq, clean.dq);
          for (const BackwardArrangement& arrangement :
               {BackwardArrangement{.tiles_per_task = 1},
                BackwardArrangement{.ranks = 2, .run_rows = 1, .needed_tiles = true},
                BackwardArrangement{.cuts = 61,
                .ranks = 3,
                .run_rows = 40,
                .deal = 62,
                .needed_tiles = true,
                .shuffle = 63,
                .strided = true}}) {
            ASSERT_TRUE(runner.run(inputs, arrangement).same_bits(planted)) << to_string(arrangement);
          }
        }
      }
    }
  }

  static bool sees(const Mask& mask, std::int64_t token, std::int64_t key) {
    return token < kQueries && key < kKeys && !Visibility(mask, kKeys).keys(kOffset + token).empty() &&
           key >= Visibility(mask, kKeys).keys(kOffset + token).begin &&
           key < Visibility(mask, kKeys).keys(kOffset + token).end;
  }
  // Whether a query or a key of the first sequence may share a tile with the other one.
  bool shares_tile(const Mask& mask, std::int64_t token, std::int64_t key, int key_tile) const {
    if (token >= kQueries || key >= kKeys) return false;
    if (row().backend == "cpu") return sees(mask, token, key);
    const std::int64_t first = floor_quotient(kOffset + token, kBackwardTile) * kBackwardTile - kOffset;
    const std::int64_t first_key = key / key_tile * key_tile;
    for (std::int64_t i = first; i < first + kBackwardTile; ++i) {
      const KeyRange keys = Visibility(mask, first_key + key_tile).keys(kOffset + i);
      if (!keys.empty() && keys.end > first_key) return true;
    }
    return false;
  }
  // Whether some query of the first sequence sees both keys.
  static bool shares_query(const Mask& mask, std::int64_t key, std::int64_t other) {
    for (std::int64_t token = 0; token < kQueries; ++token) {
      if (sees(mask, token, key) && sees(mask, token, other)) return true;
    }
    return false;
  }
  static RowPredicate nowhere() {
    return [](std::int64_t, int) { return false; };
  }
};

constexpr std::int64_t kPlantedKey = 150;   // about half of the causal rows see it
constexpr std::int64_t kPlantedQuery = 45;  // at position 145

TEST_P(AttentionBackwardNonFinite, InV) {
  check_planted([](BackwardInputs& inputs, float value) { inputs.attention.set_v(kPlantedKey, 1, 3, value); },
                [&](const Mask& mask) {
                  const RowPredicate dq = [mask](std::int64_t token, int head) {
                    return kv_head_of(head) == 1 && sees(mask, token, kPlantedKey);
                  };
                  const RowPredicate dk = [](std::int64_t key, int head) { return head == 1 && key == kPlantedKey; };
                  return Reach{dq, dk, nowhere(), dq, dk, nowhere()};
                });
}

TEST_P(AttentionBackwardNonFinite, InDout) {
  for (const AttentionBackwardSpec& spec : usual_spec(kHeads, kKvHeads, {-1, 0})) {
    const int key_tile = BackwardRunner(row(), spec).kernel().key_tile();
    check_planted([](BackwardInputs& inputs, float value) { inputs.set_dout(kPlantedQuery, 2, 3, value); },
                  [&](const Mask& mask) {
                    const RowPredicate dq = [](std::int64_t token, int head) {
                      return head == 2 && token == kPlantedQuery;
                    };
                    const RowPredicate seen = [mask](std::int64_t key, int head) {
                      return head == 1 && sees(mask, kPlantedQuery, key);
                    };
                    const RowPredicate near = [mask, key_tile, this](std::int64_t key, int head) {
                      return head == 1 && shares_tile(mask, kPlantedQuery, key, key_tile);
                    };
                    return Reach{dq, seen, near, dq, seen, seen};
                  });
  }
}

TEST_P(AttentionBackwardNonFinite, InK) {
  for (const AttentionBackwardSpec& spec : usual_spec(kHeads, kKvHeads, {-1, 0})) {
    const int key_tile = BackwardRunner(row(), spec).kernel().key_tile();
    check_planted([](BackwardInputs& inputs, float value) { inputs.attention.set_k(kPlantedKey, 0, 5, value); },
                  [&](const Mask& mask) {
                    const RowPredicate seen = [mask](std::int64_t token, int head) {
                      return kv_head_of(head) == 0 && sees(mask, token, kPlantedKey);
                    };
                    const RowPredicate near = [mask, key_tile, this](std::int64_t token, int head) {
                      return kv_head_of(head) == 0 && shares_tile(mask, token, kPlantedKey, key_tile);
                    };
                    const RowPredicate dkv = [](std::int64_t key, int head) { return head == 0 && key == kPlantedKey; };
                    return Reach{near, dkv, dkv, seen, dkv, dkv};
                  });
  }
}

TEST_P(AttentionBackwardNonFinite, InQ) {
  for (const AttentionBackwardSpec& spec : usual_spec(kHeads, kKvHeads, {-1, 0})) {
    const int key_tile = BackwardRunner(row(), spec).kernel().key_tile();
    check_planted([](BackwardInputs& inputs, float value) { inputs.attention.set_q(kPlantedQuery, 1, 5, value); },
                  [&](const Mask& mask) {
                    const RowPredicate dq = [](std::int64_t token, int head) {
                      return head == 1 && token == kPlantedQuery;
                    };
                    const RowPredicate seen = [mask](std::int64_t key, int head) {
                      return head == 0 && sees(mask, kPlantedQuery, key);
                    };
                    const RowPredicate near = [mask, key_tile, this](std::int64_t key, int head) {
                      return head == 0 && shares_tile(mask, kPlantedQuery, key, key_tile);
                    };
                    return Reach{dq, near, seen, dq, seen, seen};
                  });
  }
}

// The forward saw the planted value as well: O and LSE of the rows that see it are not finite, and reach every key that
// these rows see.
TEST_P(AttentionBackwardNonFinite, InVAndForwardResults) {
  check_planted(
      [](BackwardInputs& inputs, float value) {
        inputs.attention.set_v(kPlantedKey, 1, 3, value);
        compute_forward(inputs);
      },
      [&](const Mask& mask) {
        const RowPredicate dq = [mask](std::int64_t token, int head) {
          return kv_head_of(head) == 1 && sees(mask, token, kPlantedKey);
        };
        const RowPredicate dk = [mask](std::int64_t key, int head) {
          return head == 1 && shares_query(mask, key, kPlantedKey);
        };
        return Reach{dq, dk, nowhere(), dq, dk, nowhere()};
      });
}

TEST_P(AttentionBackwardNonFinite, InKAndForwardResults) {
  for (const AttentionBackwardSpec& spec : usual_spec(kHeads, kKvHeads, {-1, 0})) {
    const int key_tile = BackwardRunner(row(), spec).kernel().key_tile();
    check_planted(
        [](BackwardInputs& inputs, float value) {
          inputs.attention.set_k(kPlantedKey, 0, 5, value);
          compute_forward(inputs);
        },
        [&](const Mask& mask) {
          const RowPredicate seen = [mask](std::int64_t token, int head) {
            return kv_head_of(head) == 0 && sees(mask, token, kPlantedKey);
          };
          const RowPredicate near = [mask, key_tile, this](std::int64_t token, int head) {
            return kv_head_of(head) == 0 && shares_tile(mask, token, kPlantedKey, key_tile);
          };
          const RowPredicate dkv = [mask](std::int64_t key, int head) {
            return head == 0 && shares_query(mask, key, kPlantedKey);
          };
          return Reach{near, dkv, dkv, seen, dkv, dkv};
        });
  }
}

TEST_P(AttentionBackwardNonFinite, InQAndForwardResults) {
  for (const AttentionBackwardSpec& spec : usual_spec(kHeads, kKvHeads, {-1, 0})) {
    const int key_tile = BackwardRunner(row(), spec).kernel().key_tile();
    check_planted(
        [](BackwardInputs& inputs, float value) {
          inputs.attention.set_q(kPlantedQuery, 1, 5, value);
          compute_forward(inputs);
        },
        [&](const Mask& mask) {
          const RowPredicate dq = [](std::int64_t token, int head) { return head == 1 && token == kPlantedQuery; };
          const RowPredicate seen = [mask](std::int64_t key, int head) {
            return head == 0 && sees(mask, kPlantedQuery, key);
          };
          const RowPredicate near = [mask, key_tile, this](std::int64_t key, int head) {
            return head == 0 && shares_tile(mask, kPlantedQuery, key, key_tile);
          };
          return Reach{dq, near, seen, dq, seen, seen};
        });
  }
}

#define RINGATTN_FOR_EVERY_BACKWARD_KERNEL(fixture)                                                                    \
  INSTANTIATE_TEST_SUITE_P(                                                                                            \
      Kernels, fixture,                                                                                                \
      ::testing::ValuesIn(kernel_table<AttentionBackwardSpec>().begin(), kernel_table<AttentionBackwardSpec>().end()), \
      [](const auto& test) { return std::string(test.param.name); })
RINGATTN_FOR_EVERY_BACKWARD_KERNEL(AttentionBackward);
RINGATTN_FOR_EVERY_BACKWARD_KERNEL(AttentionBackwardNonFinite);

}  // namespace
}  // namespace ringattn::testing
