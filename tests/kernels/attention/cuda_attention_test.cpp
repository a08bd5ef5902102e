// SPDX-License-Identifier: Apache-2.0
// What the tests of every kernel don't ask of kernels on a GPU: several key runs in a task, views that no vector load
// can read, positions past 2³², many tasks in flight, neighbours on the device, exported states.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/kernels/attention/cuda_attention_fixture.hpp"
#include "tests/kernels/attention/cuda_sequence.hpp"
#include "tests/support/accuracy.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

// Every compiled configuration against the oracle, and cut into tasks; the tables of other tests know head_dim 64 best.
TEST_P(CudaAttentionTest, EveryConfiguration) {
  struct Heads {
    int heads, kv_heads;
    float softcap;
  };
  for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{90, 30}}) {
    for_all_dims(mask, [&](AttentionSpec spec) {
      for (const Heads& of : {Heads{4, 2, 0.0F}, Heads{4, 2, 15.0F}, Heads{3, 3, 0.0F}, Heads{5, 1, 0.0F}}) {
        spec.heads = of.heads;
        spec.kv_heads = of.kv_heads;
        spec.softcap = of.softcap;
        spec.sinks = of.softcap > 0.0F;
        const AttentionInputs inputs = random_inputs(spec, {{70, 330, 200}, {33, 5, -20}, {1, 64, 63}, {20, 0, 0}}, 81);
        const AttentionResult whole = attend_with(row(), inputs);
        ASSERT_EQ(check_accuracy(inputs, whole.out, whole.lse), "");
        for (const Arrangement& arrangement :
             {Arrangement{.tiles_per_task = 1}, Arrangement{.run_rows = 37, .shuffle = 5},
              Arrangement{
                  .tiles_per_task = 2, .run_rows = 64, .shuffle = 6, .strided = true, .separate_finish = true}}) {
          ASSERT_TRUE(attend_with(row(), inputs, arrangement).same_bits(whole));
        }
      }
    });
  }
}

// A sequence whose tiles come as several runs in one task, with holes that later tasks don't fill.
TEST_P(CudaAttentionTest, SeveralKeyRunsOfASequence) {
  for_all_dims({-1, -1}, [&](const AttentionSpec& spec) {
    const AttentionInputs inputs = random_inputs(spec, {{150, 5000, 0}}, 82);
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
    // Tiles with a hole: tiles 1 and 3 must not be treated as tiles 1 … 3.
    sequence.enqueue({{1, 1}, {3, 1}}, false, 1);
    sequence.enqueue({{1, 1}}, false, -1);
    sequence.enqueue({{3, 1}}, true, 2);
    sequence.wait();
    EXPECT_EQ(sequence.result(1), sequence.result(2));
    EXPECT_NE(sequence.result(1), sequence.result(0));
  });
}

TEST_P(CudaAttentionTest, AnyNumberOfSources) {
  for_all_dims({-1, 0}, [&](const AttentionSpec& spec) {
    const AttentionInputs inputs = random_inputs(spec, {{140, 900, 760}}, 91);
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

TEST_P(CudaAttentionTest, ViewsOfAnyAlignment) {
  for_all_dims({-1, 0}, [&](const AttentionSpec& spec) {
    const AttentionInputs inputs = random_inputs(spec, {{140, 300, 160}}, 83);
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
TEST_P(CudaAttentionTest, PositionsPastTwoToThe32) {
  for_all_dims({100, 0}, [&](const AttentionSpec& spec) {
    const AttentionInputs inputs = random_inputs(spec, {{300, 500, 200}}, 84);
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

// More tasks in flight, and more different ones, than the ring of tables has slots, in q_stages; every result is the
// first one's.
TEST_P(CudaAttentionTest, AThousandRepeats) {
  const AttentionSpec spec = make_spec(usual_dims(row()).front(), 4, 2, {-1, 0});
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

// Tables that are used again are as good as new: more work than a device has SMs, taken from a counter, and
// KV loops that are long enough for keeping pace.
TEST_P(CudaAttentionTest, TheSameTaskAgain) {
  if (row().name == "sm80_simt") GTEST_SKIP() << "too slow, and its tables hold no counters";
  const auto repeat = [this](int heads, const SequenceShape& shape) {
    const AttentionSpec spec = make_spec(usual_dims(row()).front(), heads, 1, {-1, 0});
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
  repeat(600, {64, 600'000, 599'936});  // 154 MB of K and V at 64 columns, one head
}

TEST_P(CudaAttentionTest, EqualBesideABusyNeighbour) {
  for_all_dims({-1, 0}, [&](const AttentionSpec& spec) {
    CudaSequence sequence(row(), random_inputs(spec, {{400, 900, 500}}, 86));
    sequence.make_results(9);
    sequence.enqueue_all(8);
    sequence.wait();
    // Another kernel on a stream of its own.
    const AttentionSpec other = make_spec(usual_dims(row()).back(), 16, 16, {-1, -1});
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
TEST_P(CudaAttentionTest, ExportsNumbers) {
  for_all_dims({-1, 0}, [&](AttentionSpec spec) {
    for (const float softcap : {0.0F, 30.0F}) {
      spec.softcap = softcap;
      constexpr std::int64_t kRows = 150;
      const AttentionInputs inputs = random_inputs(spec, {{kRows, kRows, -20}}, 88);
      const AttentionResult expected = attend_with(row(), inputs);
      CudaSequence sequence(row(), inputs);
      sequence.enqueue({{0, sequence.tiles()}}, false, -1);
      const auto rows = static_cast<std::size_t>(kRows * spec.heads);
      const auto dims = static_cast<std::size_t>(spec.head_dim_v);
      Backend& backend = sequence.backend();
      DeviceArray m(backend, rows * sizeof(float)), l(backend, rows * sizeof(float));
      DeviceArray o(backend, rows * dims * sizeof(float));
      // m head by head, l row by row.
      const AttentionStateView view{
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
      count_check();
    }
  });
}

// A value that is not finite makes the column not finite in every row that uses its tile (where query_tile is 1: that
// sees it), and moves no other bit.
TEST_P(CudaAttentionTest, NanInAValueStaysInItsTile) {
  for_all_dims({-1, 0}, [&](const AttentionSpec& spec) {
    AttentionInputs inputs = random_inputs(spec, {{600, 600, 0}}, 89);
    const AttentionResult clean = attend_with(row(), inputs);
    constexpr std::int64_t kKey = 330;
    const int planted_dim = 37 % spec.head_dim_v;
    inputs.set_v(kKey, 1, planted_dim, kNan);
    AttentionRunner runner(row(), spec);
    const AttentionResult planted = runner.run(inputs, {.run_rows = 50});
    const int query_tile = runner.kernel().query_tile();
    const int key_tile = runner.kernel().key_tile();
    const auto dims = static_cast<std::size_t>(spec.head_dim_v);
    const std::size_t size = size_of(spec.dtype);
    for (std::size_t token = 0; token < 600; ++token) {
      const auto position = static_cast<std::int64_t>(token);
      const TileRange folded = Visibility(spec.mask, 600).tiles(position, {query_tile, key_tile});
      const bool tainted =
          query_tile == 1 ? position >= kKey : folded.begin <= kKey / key_tile && kKey / key_tile < folded.end;
      for (std::size_t head = 0; head < 4; ++head) {
        for (std::size_t d = 0; d < dims; ++d) {
          const std::size_t at = ((token * 4 + head) * dims + d) * size;
          if (tainted && head >= 2 && d == static_cast<std::size_t>(planted_dim)) {
            ASSERT_TRUE(std::isnan(load_element(planted.out.data() + at, spec.dtype))) << token;
          } else {
            ASSERT_EQ(std::memcmp(planted.out.data() + at, clean.out.data() + at, size), 0) << token << ", " << d;
          }
        }
      }
    }
    EXPECT_EQ(std::memcmp(planted.lse.data(), clean.lse.data(), clean.lse.size() * sizeof(float)), 0);
    count_check();
  });
}

// Zero and negative scales take another way through the scores.
TEST_P(CudaAttentionTest, ScalesOfZeroAndBelow) {
  for_all_dims({-1, 0}, [&](AttentionSpec spec) {
    for (const float scale : {0.0F, -0.1F}) {
      spec.softmax_scale = scale;
      const AttentionInputs inputs = random_inputs(spec, {{100, 200, 100}}, 90);
      const AttentionResult result = attend_with(row(), inputs);
      EXPECT_EQ(check_accuracy(inputs, result.out, result.lse), "") << scale;
      EXPECT_TRUE(attend_with(row(), inputs, {.tiles_per_task = 1}).same_bits(result));
    }
  });
}

RINGATTN_FOR_EVERY_CUDA_KERNEL(CudaAttentionTest);

}  // namespace
}  // namespace ringattn::testing
