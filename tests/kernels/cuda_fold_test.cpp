// SPDX-License-Identifier: Apache-2.0
// What the tests of every kernel don't ask of kernels on a GPU: several key runs in a task, views that no vector load
// can read, positions past 2³², many tasks in flight, neighbours on the device, exported states.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/kernels/cuda_sequence.hpp"
#include "tests/kernels/kernel_row_test.hpp"
#include "tests/support/accuracy.hpp"

namespace ringattn::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Dims {
  Dtype dtype;
  int head_dim;
  int head_dim_v;
};
constexpr Dims kDims[] = {{Dtype::kBf16, 64, 64},   {Dtype::kBf16, 96, 96},   {Dtype::kBf16, 128, 128},
                          {Dtype::kBf16, 192, 128}, {Dtype::kBf16, 256, 256}, {Dtype::kF16, 64, 64},
                          {Dtype::kF16, 96, 96},    {Dtype::kF16, 128, 128},  {Dtype::kF16, 192, 128},
                          {Dtype::kF16, 256, 256},  {Dtype::kF32, 72, 40}};

std::vector<KernelRow> cuda_rows() {
  std::vector<KernelRow> rows;
  for (const KernelRow& row : kernel_table()) {
    if (row.backend == "cuda") rows.push_back(row);
  }
  return rows;
}

// Whether no element is as it was before the fold: NaN, which finite inputs don't give.
bool all_written(const FoldResult& result, Dtype dtype) {
  const auto nan = [](float x) { return std::isnan(x); };
  for (std::size_t at = 0; at < result.out.size(); at += size_of(dtype)) {
    if (nan(load_element(result.out.data() + at, dtype))) return false;
  }
  return std::ranges::none_of(result.lse, nan);
}

class CudaFoldTest : public KernelRowTest {
 protected:
  // Calls check(spec) for all dims that the row can do.
  template <typename Check>
  void for_all_dims(const Mask& mask, Check check) {
    for (const Dims& dims : kDims) {
      FoldSpec spec = make_spec(dims.dtype, 4, 2, dims.head_dim, mask, dims.head_dim_v);
      if (!cannot_run(row(), spec).empty()) continue;
      SCOPED_TRACE(describe(spec));
      check(spec);
    }
  }
};

// Every compiled configuration against the oracle, and cut into tasks; the tables of other tests know head_dim 64 best.
TEST_P(CudaFoldTest, EveryConfiguration) {
  struct Heads {
    int heads, kv_heads;
    float softcap;
  };
  for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{90, 30}}) {
    for_all_dims(mask, [&](FoldSpec spec) {
      for (const Heads& of : {Heads{4, 2, 0.0F}, Heads{4, 2, 15.0F}, Heads{3, 3, 0.0F}, Heads{5, 1, 0.0F}}) {
        spec.heads = of.heads;
        spec.kv_heads = of.kv_heads;
        spec.softcap = of.softcap;
        spec.sinks = of.softcap > 0.0F;
        const FoldInputs inputs = random_inputs(spec, {{70, 330, 200}, {33, 5, -20}, {1, 64, 63}, {20, 0, 0}}, 81);
        const FoldResult whole = fold_with(row(), inputs);
        ASSERT_EQ(check_accuracy(inputs, whole.out, whole.lse), "");
        for (const Arrangement& arrangement :
             {Arrangement{.tiles_per_task = 1}, Arrangement{.run_rows = 37, .shuffle = 5},
              Arrangement{
                  .tiles_per_task = 2, .run_rows = 64, .shuffle = 6, .strided = true, .separate_finish = true}}) {
          ASSERT_TRUE(fold_with(row(), inputs, arrangement).same_bits(whole));
        }
      }
    });
  }
}

// A sequence whose tiles come as several runs in one task, with holes that later tasks don't fill.
TEST_P(CudaFoldTest, SeveralKeyRunsOfASequence) {
  for_all_dims({-1, -1}, [&](const FoldSpec& spec) {
    const FoldInputs inputs = random_inputs(spec, {{150, 5000, 0}}, 82);
    CudaSequence sequence(row(), inputs);
    sequence.make_results(3);
    const std::int64_t tiles = sequence.tiles();
    sequence.enqueue_all(0);
    std::vector<CudaSequence::Tiles> ones;
    for (std::int64_t i = 0; i < tiles; ++i) ones.push_back({i, 1});
    sequence.enqueue(ones, false, 1);
    std::vector<CudaSequence::Tiles> front, back;
    for (std::int64_t i = 0; i < tiles;) {
      const std::int64_t count = std::min(1 + i % 5, tiles - i);
      (i < tiles / 2 ? front : back).push_back({i, count});
      i += count;
    }
    sequence.enqueue(front, false, -1);
    sequence.enqueue(back, true, 2);
    sequence.wait();
    EXPECT_EQ(sequence.result(1), sequence.result(0));
    EXPECT_EQ(sequence.result(2), sequence.result(0));
    // With holes: tile 1 and tile 3 alone are not tiles 1 … 3.
    sequence.enqueue({{1, 1}, {3, 1}}, false, 1);
    sequence.enqueue({{1, 1}}, false, -1);
    sequence.enqueue({{3, 1}}, true, 2);
    sequence.wait();
    EXPECT_EQ(sequence.result(1), sequence.result(2));
    EXPECT_NE(sequence.result(1), sequence.result(0));
  });
}

TEST_P(CudaFoldTest, AnyNumberOfSources) {
  for_all_dims({-1, 0}, [&](const FoldSpec& spec) {
    const FoldInputs inputs = random_inputs(spec, {{140, 900, 760}}, 91);
    CudaSequence one(row(), inputs);
    one.enqueue_all(0);
    one.wait();
    for (const std::int64_t sources : {2, 4, 5, 13}) {
      CudaSequence many(row(), inputs, {.sources = sources});
      many.enqueue_all(0);
      many.wait();
      EXPECT_EQ(many.result(0), one.result(0)) << sources;
    }
  });
}

TEST_P(CudaFoldTest, ViewsOfAnyAlignment) {
  for_all_dims({-1, 0}, [&](const FoldSpec& spec) {
    const FoldInputs inputs = random_inputs(spec, {{140, 300, 160}}, 83);
    CudaSequence aligned(row(), inputs);
    aligned.enqueue_all(0);
    aligned.wait();
    for (const CudaPlacement& placement :
         {CudaPlacement{.shift = 1}, CudaPlacement{.shift = 4, .extra = 8}, CudaPlacement{.extra = 3},
          CudaPlacement{.shift = 8, .extra = 16}, CudaPlacement{.heads_outside = true},
          CudaPlacement{.extra = 8, .heads_outside = true}, CudaPlacement{.extra = 3, .heads_outside = true}}) {
      CudaSequence moved(row(), inputs, placement);
      moved.enqueue({{0, 1}}, false, -1);
      moved.enqueue({{1, moved.tiles() - 1}}, true, 0);
      moved.wait();
      EXPECT_EQ(moved.result(0), aligned.result(0))
          << placement.shift << ", " << placement.extra << ", " << placement.heads_outside;
    }
  });
}

// A window sees the same keys wherever it stands, so moving everything by a common multiple of the tiles moves no bit.
TEST_P(CudaFoldTest, PositionsPastTwoToThe32) {
  for_all_dims({100, 0}, [&](const FoldSpec& spec) {
    const FoldInputs inputs = random_inputs(spec, {{300, 500, 200}}, 84);
    CudaSequence near(row(), inputs, {.first_tile = 256});
    near.enqueue_all(0);
    near.wait();
    for (const std::int64_t tiles : {std::int64_t{1} << 25, std::int64_t{1} << 33}) {
      CudaSequence far(row(), inputs, {.first_tile = tiles});
      far.enqueue_all(0);
      far.wait();
      EXPECT_EQ(far.result(0), near.result(0)) << tiles;
    }
  });
}

// More tasks in flight, and more different ones, than the ring of tables has slots, in rounds; every result is the
// first one's.
TEST_P(CudaFoldTest, AThousandRepeats) {
  const FoldSpec spec = make_spec(Dtype::kBf16, 4, 2, 128, {-1, 0});
  CudaSequence sequence(row(), random_inputs(spec, {{500, 700, 200}}, 85));
  constexpr int kInFlight = 25;
  sequence.make_results(kInFlight + 1);
  sequence.enqueue_all(kInFlight);
  sequence.wait();
  const CudaSequence::Result expected = sequence.result(kInFlight);
  for (int round = 0; round < 1000 / kInFlight; ++round) {
    sequence.clear_results();
    for (int i = 0; i < kInFlight; ++i) {
      if (i % 3 == 0) {
        sequence.enqueue_all(i);
      } else {
        const std::int64_t first = 1 + i % 4;
        sequence.enqueue({{0, first}}, false, -1);
        sequence.enqueue({{first, sequence.tiles() - first}}, true, i);
      }
    }
    sequence.wait();
    for (int i = 0; i < kInFlight; ++i) ASSERT_EQ(sequence.result(i), expected) << "round " << round << ", " << i;
  }
}

// Tables that are used again are as good as new: more work than a device has multiprocessors, taken from a counter, and
// walks that are long enough for keeping pace.
TEST_P(CudaFoldTest, TheSameTaskAgain) {
  if (row().name == "sm80_plain") GTEST_SKIP() << "too slow, and its tables hold no counters";
  const auto repeat = [this](int heads, const SequenceShape& shape) {
    FoldSpec spec = make_spec(Dtype::kBf16, heads, 1, 64, {-1, 0});
    CudaSequence sequence(row(), random_inputs(spec, {shape}, 92));
    constexpr int kTimes = 6;
    sequence.make_results(kTimes);
    sequence.enqueue_all(0);
    sequence.wait();
    const CudaSequence::Result expected = sequence.result(0);
    sequence.clear_results();
    for (int i = 0; i < kTimes; ++i) sequence.enqueue_all(i);
    sequence.wait();
    for (int i = 0; i < kTimes; ++i) ASSERT_EQ(sequence.result(i), expected) << i;
  };
  repeat(48, {1500, 1700, 200});
  repeat(600, {64, 600'000, 599'936});  // 154 MB of K and V, one head
}

TEST_P(CudaFoldTest, EqualBesideABusyNeighbour) {
  for_all_dims({-1, 0}, [&](const FoldSpec& spec) {
    CudaSequence sequence(row(), random_inputs(spec, {{400, 900, 500}}, 86));
    sequence.make_results(9);
    sequence.enqueue_all(8);
    sequence.wait();
    // Another kernel on a stream of its own.
    const FoldSpec other = make_spec(Dtype::kF16, 16, 16, 64, {-1, -1});
    CudaSequence neighbour(row(), random_inputs(other, {{1000, 3000, 0}}, 87));
    for (int i = 0; i < 8; ++i) {
      neighbour.enqueue_all(0);
      sequence.enqueue({{0, 2}}, false, -1);
      sequence.enqueue({{2, sequence.tiles() - 2}}, true, i);
    }
    sequence.wait();
    neighbour.wait();
    for (int i = 0; i < 8; ++i) EXPECT_EQ(sequence.result(i), sequence.result(8)) << i;
  });
}

// m, l and O, exported after a task, give the finished row: O / l and m + log l.
TEST_P(CudaFoldTest, ExportsNumbers) {
  for_all_dims({-1, 0}, [&](FoldSpec spec) {
    for (const float softcap : {0.0F, 30.0F}) {
      spec.softcap = softcap;
      constexpr std::int64_t kRows = 150;
      const FoldInputs inputs = random_inputs(spec, {{kRows, kRows, -20}}, 88);
      const FoldResult expected = fold_with(row(), inputs);
      CudaSequence sequence(row(), inputs);
      sequence.enqueue({{0, sequence.tiles()}}, false, -1);
      const auto rows = static_cast<std::size_t>(kRows * spec.heads);
      const auto dims = static_cast<std::size_t>(spec.head_dim_v);
      Backend& backend = sequence.backend();
      DeviceArray m(backend, rows * sizeof(float)), l(backend, rows * sizeof(float));
      DeviceArray o(backend, rows * dims * sizeof(float));
      // m head by head, l row by row.
      const FoldStateView view{
          {m.floats(), 1, kRows},
          {l.floats(), spec.heads, 1},
          dense_view(static_cast<void*>(o.data()), Dtype::kF32, kRows, spec.heads, spec.head_dim_v)};
      sequence.kernel().export_state(sequence.state(), kRows, view, backend.stream());
      const std::vector<float> ms = m.read_floats(), ls = l.read_floats(), os = o.read_floats();
      for (std::size_t row = 0; row < kRows; ++row) {
        for (std::size_t head = 0; head < static_cast<std::size_t>(spec.heads); ++head) {
          const std::size_t i = row * static_cast<std::size_t>(spec.heads) + head;
          const float reference = ms[head * kRows + row];
          if (row < 20) {
            ASSERT_EQ(reference, -std::numeric_limits<float>::infinity());
            ASSERT_EQ(ls[i], 0.0F);
            continue;
          }
          ASSERT_NEAR(static_cast<double>(reference) + std::log(static_cast<double>(ls[i])), expected.lse[i], 1e-5);
          for (std::size_t d = 0; d < dims; ++d) {
            const float out = load_element(expected.out.data() + (i * dims + d) * size_of(spec.dtype), spec.dtype);
            const float ulp = spec.dtype == Dtype::kF32 ? 0x1p-22F : spec.dtype == Dtype::kF16 ? 0x1p-10F : 0x1p-7F;
            ASSERT_NEAR(os[i * dims + d] / ls[i], out, ulp * std::max(std::abs(out), 0x1p-12F)) << row << ", " << d;
          }
        }
      }
    }
  });
}

// A value that is not finite makes the column not finite in every row that folds its tile (where query_tile is 1: that
// sees it), and moves no other bit.
TEST_P(CudaFoldTest, NanInAValueStaysInItsTile) {
  for_all_dims({-1, 0}, [&](const FoldSpec& spec) {
    FoldInputs inputs = random_inputs(spec, {{600, 600, 0}}, 89);
    const FoldResult clean = fold_with(row(), inputs);
    constexpr std::int64_t kKey = 330;
    constexpr int kDim = 37;
    inputs.set_v(kKey, 1, kDim, kNan);
    FoldRunner runner(row(), spec);
    const FoldResult planted = runner.run(inputs, {.run_rows = 50});
    const int query_tile = runner.kernel().query_tile();
    const int key_tile = runner.kernel().key_tile();
    const auto dims = static_cast<std::size_t>(spec.head_dim_v);
    const std::size_t size = size_of(spec.dtype);
    for (std::size_t token = 0; token < 600; ++token) {
      const auto position = static_cast<std::int64_t>(token);
      const TileRange folded = folded_tiles(spec.mask, position, 600, query_tile, key_tile);
      const bool tainted =
          query_tile == 1 ? position >= kKey : folded.begin <= kKey / key_tile && kKey / key_tile < folded.end;
      for (std::size_t head = 0; head < 4; ++head) {
        for (std::size_t d = 0; d < dims; ++d) {
          const std::size_t at = ((token * 4 + head) * dims + d) * size;
          if (tainted && head >= 2 && d == kDim) {
            ASSERT_TRUE(std::isnan(load_element(planted.out.data() + at, spec.dtype))) << token;
          } else {
            ASSERT_EQ(std::memcmp(planted.out.data() + at, clean.out.data() + at, size), 0) << token << ", " << d;
          }
        }
      }
    }
    EXPECT_EQ(std::memcmp(planted.lse.data(), clean.lse.data(), clean.lse.size() * sizeof(float)), 0);
  });
}

// Zero and negative scales take another way through the scores.
TEST_P(CudaFoldTest, ScalesOfZeroAndBelow) {
  for_all_dims({-1, 0}, [&](FoldSpec spec) {
    for (const float scale : {0.0F, -0.1F}) {
      spec.softmax_scale = scale;
      const FoldInputs inputs = random_inputs(spec, {{100, 200, 100}}, 90);
      const FoldResult result = fold_with(row(), inputs);
      EXPECT_EQ(check_accuracy(inputs, result.out, result.lse), "") << scale;
      EXPECT_TRUE(fold_with(row(), inputs, {.tiles_per_task = 1}).same_bits(result));
    }
  });
}

// More work than the device does at a time: one query tile is begun while the one before it is finished, which a job in
// several tasks never does. Logits of 1e9 leave exponents that are wrong by dozens, whatever the reference.
TEST_P(CudaFoldTest, TilesInARow) {
  constexpr std::int64_t kLengths[] = {64, 128, 200, 64, 320, 1, 256, 77, 640, 0, 64, 129};
  std::vector<SequenceShape> sequences;
  std::int64_t query_tiles = 0;
  for (std::size_t i = 0; i < 80; ++i) {
    const std::int64_t n = kLengths[i % std::size(kLengths)];
    query_tiles += (n + 63) / 64;
    sequences.push_back(i % 7 == 3 ? SequenceShape{n, n + 150, 150} : SequenceShape{n, n, 0});
  }
  // Of four heads, three at a time, on 132 multiprocessors.
  ASSERT_GT(query_tiles * 4 / 3, 2 * 132);
  const auto check = [&](const FoldInputs& inputs) {
    const FoldResult in_a_row = fold_with(row(), inputs);
    return fold_with(row(), inputs, {.tiles_per_task = 1000, .separate_finish = true}).same_bits(in_a_row);
  };
  for_all_dims({-1, 0}, [&](const FoldSpec& spec) {
    FoldInputs inputs = random_inputs(spec, sequences, 93);
    EXPECT_TRUE(check(inputs));
    const Arrangement fetched_by_threads{.shuffle = 7, .sources = 5, .odd_keys = true};
    EXPECT_TRUE(fold_with(row(), inputs, fetched_by_threads).same_bits(fold_with(row(), inputs)));
    inputs.spec.mask = {-1, -1};
    EXPECT_TRUE(check(inputs)) << "full";
    inputs.spec.mask = {100, 20};
    inputs.spec.sinks = true;
    inputs.sinks = {0.5F, -1.0F, 2.0F, 0.0F};
    EXPECT_TRUE(check(inputs)) << "window and sinks";
    inputs.spec.mask = {-1, 0};
    for (std::vector<std::byte>* tensor : {&inputs.q, &inputs.k}) {
      for (std::size_t at = 0; at < tensor->size(); at += size_of(spec.dtype)) {
        const float large = 3e4F * load_element(tensor->data() + at, spec.dtype);
        store_element(tensor->data() + at, spec.dtype, std::clamp(large, -6e4F, 6e4F));  // fp16 ends at 65,504
      }
    }
    EXPECT_TRUE(check(inputs)) << "logits of 1e9";
  });
}

// A query tile of few key tiles, and, begun while that one is finished, one of so many that their sums close groups.
TEST_P(CudaFoldTest, LongBehindShortTiles) {
  if (row().name == "sm80_plain") GTEST_SKIP() << "too slow, and begins nothing early";
  for_all_dims({-1, -1}, [&](FoldSpec spec) {
    spec.heads = 16;
    spec.kv_heads = 8;
    // The short sequence comes first: it is not that short, and both together are more than the cache holds.
    const FoldInputs inputs = random_inputs(spec, {{1280, 2560, 0}, {1280, 9000, 0}}, 94);
    const FoldResult in_a_row = fold_with(row(), inputs);
    EXPECT_TRUE(all_written(in_a_row, spec.dtype));
    EXPECT_TRUE(fold_with(row(), inputs, {.tiles_per_task = 50}).same_bits(in_a_row));
  });
}

// Sections of heads, as all K and V are more than the cache holds, and query tiles that are left for last.
TEST_P(CudaFoldTest, SectionsOfHeads) {
  if (row().name == "sm80_plain") GTEST_SKIP() << "too slow, and has no sections";
  for_all_dims({-1, 0}, [&](FoldSpec spec) {
    spec.heads = 16;
    spec.kv_heads = 8;
    const FoldInputs inputs = random_inputs(spec, {{7000, 7000, 0}}, 98);
    const FoldResult whole = fold_with(row(), inputs);
    EXPECT_TRUE(all_written(whole, spec.dtype));
    EXPECT_TRUE(fold_with(row(), inputs, {.tiles_per_task = 30}).same_bits(whole));
  });
}

// Sixteen heads of the same keys, of many sequences: more work than the device does at a time, cut and brought any way.
TEST_P(CudaFoldTest, ManyHeadsOfTheSameKeys) {
  if (row().name == "sm80_plain") GTEST_SKIP() << "too slow";
  const SequenceShape shapes[] = {{1, 1, 0},   {200, 350, 150}, {64, 64, 0},    {0, 90, 0},
                                  {77, 77, 0}, {640, 641, 1},   {3, 1000, 997}, {129, 129, -40}};
  std::vector<SequenceShape> sequences;
  for (int i = 0; i < 3; ++i) sequences.insert(sequences.end(), std::begin(shapes), std::end(shapes));
  for_all_dims({-1, 0}, [&](FoldSpec spec) {
    spec.heads = 16;
    spec.kv_heads = 1;
    FoldInputs inputs = random_inputs(spec, sequences, 96);
    const FoldInputs few = random_inputs(spec, {{77, 77, 0}, {150, 250, 100}}, 97);
    const FoldResult result = fold_with(row(), few);
    EXPECT_EQ(check_accuracy(few, result.out, result.lse), "");
    for (const Mask& mask : {Mask{-1, 0}, Mask{-1, -1}, Mask{100, 20}}) {
      inputs.spec.mask = mask;
      SCOPED_TRACE(describe(inputs.spec));
      const FoldResult whole = fold_with(row(), inputs);
      EXPECT_TRUE(all_written(whole, spec.dtype));
      EXPECT_TRUE(fold_with(row(), inputs, {.tiles_per_task = 1000, .separate_finish = true}).same_bits(whole));
      EXPECT_TRUE(fold_with(row(), inputs, {.tiles_per_task = 3, .run_rows = 100, .shuffle = 8}).same_bits(whole));
      const Arrangement fetched_by_threads{.shuffle = 7, .sources = 5, .odd_keys = true};
      EXPECT_TRUE(fold_with(row(), inputs, fetched_by_threads).same_bits(whole));
    }
  });
}

// Query tiles in a row whose key tiles come as several runs.
TEST_P(CudaFoldTest, SeveralKeyRunsInARow) {
  if (row().name == "sm80_plain") GTEST_SKIP() << "too slow, and begins nothing early";
  for_all_dims({-1, -1}, [&](FoldSpec spec) {
    spec.heads = 48;
    spec.kv_heads = 1;
    CudaSequence sequence(row(), random_inputs(spec, {{1500, 1000, 0}}, 95));
    sequence.make_results(3);
    sequence.enqueue_all(0);
    std::vector<CudaSequence::Tiles> ones;
    for (std::int64_t i = 0; i < sequence.tiles(); ++i) ones.push_back({i, 1});
    sequence.enqueue(ones, false, 1);
    sequence.enqueue({{0, 3}}, false, -1);
    sequence.enqueue({{3, sequence.tiles() - 3}}, true, 2);
    sequence.wait();
    EXPECT_EQ(sequence.result(1), sequence.result(0));
    EXPECT_EQ(sequence.result(2), sequence.result(0));
  });
}

INSTANTIATE_TEST_SUITE_P(Kernels, CudaFoldTest, ::testing::ValuesIn(cuda_rows()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ringattn::testing
