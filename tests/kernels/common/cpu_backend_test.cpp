// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/cpu/cpu_backend.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/attention/cpu/attention_state.hpp"
#include "kernels/attention/cpu/cpu_attention.hpp"
#include "kernels/attention/cpu/work_tile.hpp"
#include "kernels/common/platform.hpp"
#include "tests/support/attention_inputs.hpp"

namespace ringattn::cpu {
namespace {

TEST(CpuBackend, CopiesStridedRows) {
  CpuBackend backend(1);
  const std::vector<char> source = {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i'};
  std::vector<char> target(8, '.');
  backend.copy_rows(target.data(), 3, source.data(), 4, 2, 2, {});  // ab, ef
  EXPECT_EQ(std::string(target.begin(), target.end()), "ab.ef...");
  backend.copy_rows(target.data(), 2, source.data(), 2, 2, 3, {});
  EXPECT_EQ(std::string(target.begin(), target.end()), "abcdef..");
  backend.copy_rows(target.data(), 2, nullptr, 2, 2, 0, {});
  backend.fill_bytes(target.data() + 1, std::byte{'x'}, 3, {});
  backend.fill_bytes(nullptr, std::byte{'x'}, 0, {});
  EXPECT_EQ(std::string(target.begin(), target.end()), "axxxef..");
  EXPECT_EQ(backend.allocate(100).kind(), MemoryKind::kHost);
  EXPECT_FALSE(backend.identity().empty());
}

// A mark means its last recording.
TEST(CpuBackend, MarksAreRecordedAgain) {
  CpuBackend backend(1);
  const auto marks = backend.make_events(2, true);
  const auto pass_time = [] {
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(2)) continue;
  };
  marks->record(0, {});
  pass_time();
  marks->record(1, {});
  EXPECT_GE(marks->elapsed(0, 1), 2e-3);
  marks->synchronize(1, Deadline::after(0.0), {});  // host work is done when it has been marked
  pass_time();
  marks->record(0, {});
  EXPECT_LE(marks->elapsed(0, 1), -2e-3);
  EXPECT_FALSE(backend.enqueues());
  EXPECT_FALSE(backend.is_capturing({}));
}

TEST(CpuAttention, RefusesTasksOfAnotherShape) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0});
  const auto backend = make_cpu_backend({1, 0});
  const auto kernel = make_cpu_attention(spec, *backend);
  kernel->reserve({});
  const auto code_of = [&](const AttentionTask& task) {
    try {
      kernel->attend(task, {}, {});
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kWrongResult;
  };
  AttentionTask task;
  task.save = false;
  task.q = dense_view(static_cast<const void*>(nullptr), Dtype::kF32, 0, 4, 64);
  EXPECT_EQ(code_of(task), ErrorCode::kInternal);  // dtype
  task.q = dense_view(static_cast<const void*>(nullptr), Dtype::kBf16, 0, 2, 64);
  EXPECT_EQ(code_of(task), ErrorCode::kInternal);  // heads
  task.q = dense_view(static_cast<const void*>(nullptr), Dtype::kBf16, 0, 4, 64);
  task.save = true;
  task.q.tokens = 1;
  EXPECT_EQ(code_of(task), ErrorCode::kInternal);  // no state
  task.q.tokens = 0;
  task.save = false;
  const float sink = 0.0F;
  const AttentionOutput output{dense_view(static_cast<void*>(nullptr), Dtype::kBf16, 0, 4, 64), {}, &sink};
  task.finish = &output;
  EXPECT_EQ(code_of(task), ErrorCode::kInternal);  // sinks that the spec doesn't have
  task.finish = nullptr;
  EXPECT_NO_THROW(kernel->attend(task, {}, {}));
}

TEST(RowGroups, CoverEveryRowOnceInOneSequence) {
  const QueryRun runs[] = {{0, 0, 0, 5}, {0, 9, 5, 1}, {0, 20, 6, 17}, {1, 0, 23, 4}, {2, 0, 27, 0}, {2, 0, 27, 3}};
  for (const std::int64_t most : {1, 3, 6, 100}) {
    std::vector<int> covered(30, 0);
    for (const WorkTile& group : make_work_tiles(runs, most, {})) {
      ASSERT_LE(group.rows, most);
      ASSERT_GE(group.rows, 1);
      std::int64_t offset = group.offset;
      std::int64_t left = group.rows;
      for (auto run = static_cast<std::size_t>(group.run); left > 0; ++run, offset = 0) {
        ASSERT_EQ(runs[run].sequence, runs[static_cast<std::size_t>(group.run)].sequence);
        for (; offset < runs[run].rows && left > 0; ++offset, --left) {
          ++covered[static_cast<std::size_t>(runs[run].row + offset)];
        }
      }
    }
    EXPECT_EQ(covered, std::vector<int>(30, 1)) << most;
  }
}

TEST(FinishRow, SinkJoinsTheDenominator) {
  AttentionSpec spec = make_spec(Dtype::kF32, 1, 1, 8, {-1, 0});
  spec.sinks = true;
  float o[8] = {3.0F, -6.0F};
  float out[8];
  const float sink = std::log(3.0F);
  // One score of 0 with weight 3 in all, and a sink that weighs 3: half of it is left.
  const float lse = finish_row(spec, {0.0F, 3.0F, o}, &sink, reinterpret_cast<std::byte*>(out));
  EXPECT_FLOAT_EQ(out[0], 0.5F);
  EXPECT_FLOAT_EQ(out[1], -1.0F);
  EXPECT_FLOAT_EQ(lse, std::log(6.0F));
}

TEST(FinishRow, EveryNanIsTheSame) {
  const AttentionSpec spec = make_spec(Dtype::kF32, 1, 1, 8, {-1, 0});
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float o[8] = {nan, -nan, std::bit_cast<float>(0x7fc01234U), std::bit_cast<float>(0xffc00001U)};
  float out[8];
  const float lse = finish_row(spec, {0.0F, -nan, o}, nullptr, reinterpret_cast<std::byte*>(out));
  for (int i = 0; i < 8; ++i) EXPECT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::bit_cast<std::uint32_t>(nan));
  EXPECT_EQ(std::bit_cast<std::uint32_t>(lse), std::bit_cast<std::uint32_t>(nan));
}

}  // namespace
}  // namespace ringattn::cpu
