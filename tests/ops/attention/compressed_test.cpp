// SPDX-License-Identifier: Apache-2.0
// The contract: attention over compressed keys and values has, by memcmp, the O and LSE of attention over the tensors
// that decompression gives, for any format, number of ranks, layout and blocks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/tokens/cost.hpp"
#include "comm/self.hpp"
#include "kernels/attention/block_mask_patterns.hpp"
#include "kernels/quant/low_rank.hpp"
#include "ops/attention/compressed_ring_step.hpp"
#include "tests/support/budget_refusal.hpp"
#include "tests/support/compressed_rank.hpp"
#include "tests/support/environment.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/random_positions.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

Options on_the_cpu(int threads = 1) {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = threads;
  return options;
}

JobResult run_compressed(const Job& job, const Options& options, const CompressedJobTensors& tensors, int world,
                         std::int64_t gap = 0, const ThreadsDelivery& delivery = {}) {
  JobResult result = poisoned_result(job, world);
  if (world == 1) {
    const auto transport = make_self_transport();
    run_compressed_rank(job, options, tensors, *transport, result, gap);
    return result;
  }
  run_threads_world(world, delivery,
                    [&](Transport& transport) { run_compressed_rank(job, options, tensors, transport, result, gap); });
  return result;
}

struct Case {
  std::string name;
  CacheFormat format;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const RowFormat& format : every_format()) all.push_back({test_name(format), {format, format}});
  const RowFormat channel = parse_row_format("int4_channel group 32");
  all.push_back({"kivi", {channel, parse_row_format("int4_token group 32")}});
  if (has_low_rank()) {
    const RowFormat group = parse_row_format("low_rank rank 40 heads 2");
    all.push_back({"groups_of_heads", {group, group}});
  }
  all.push_back({"keys_alone", {parse_row_format("fp8 token_head"), {}}});
  all.push_back({"values_alone", {{}, channel}});
  return all;
}

class Compressed : public ::testing::TestWithParam<Case> {
 protected:
  void prepare(Job job) {
    job_ = std::move(job);
    job_.format = GetParam().format;
    tensors_ = compressed_job_tensors(job_, 7);
    Job plain = job_;
    plain.format = {};
    reference_ = run_job(plain, on_the_cpu(), tensors_.plain, 1);
  }
  void expect_same(const Options& options, int world, const std::string& what, std::int64_t gap = 0,
                   const ThreadsDelivery& delivery = {}) {
    const JobResult result = run_compressed(job_, options, tensors_, world, gap, delivery);
    EXPECT_TRUE(result.same_bits(reference_)) << what << ", world " << world;
  }

  // Formats begin with different cases, so that each case runs with some format.
  static CaseChoice choose_cases(std::int64_t every) {
    const std::string& name = GetParam().name;
    return CaseChoice(every, std::accumulate(name.begin(), name.end(), std::int64_t{0}));
  }

  Job job_;
  CompressedJobTensors tensors_;
  JobResult reference_;
};

TEST_P(Compressed, WorldsLayoutsAndBlocks) {
  Job job{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), {}};
  job.batch = {{1, 1, 0}, {300, 300, 0}, {0, 0, 0}, {129, 129, 0}, {5, 700, 695}, {63, 63, 0}, {17, 40, -9}};
  prepare(job);
  CaseChoice choice = choose_cases(5);
  for (const int world : {1, 2, 3, 4, 5}) {
    for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
      for (const std::int64_t block : {0, 256}) {
        if (!choice.take()) continue;
        Options options = on_the_cpu();
        options.layout.kind = kind;
        options.block_tokens = block;
        expect_same(options, world, std::string(layout_name(kind)) + ", block " + std::to_string(block));
      }
    }
  }
}

TEST_P(Compressed, StripesThatCutGroupsAndStridedRows) {
  AttentionSpec spec = make_spec(Dtype::kF16, 4, 2, 128, {200, 30}, 64);
  spec.sinks = true;
  spec.softcap = 20.0F;
  prepare({spec, uniform_batch(2, 450, 450)});
  for (const std::int64_t stripe : {1, 37, 200}) {
    Options options = on_the_cpu(2);
    options.layout.stripe = stripe;
    options.block_tokens = 384;
    expect_same(options, 3, "stripe " + std::to_string(stripe));
    expect_same(options, 2, "strided, stripe " + std::to_string(stripe), 48);
  }
  expect_same(on_the_cpu(), 1, "strided", 48);
  Options options = on_the_cpu();
  options.block_tokens = 256;
  options.checksum = true;
  expect_same(options, 5, "shuffled", 0, {Route::kChain, 1, std::chrono::microseconds(300)});
}

// A cache with evicted tokens: rows of different heads are of different tokens, and are quantized as any other.
TEST_P(Compressed, TokensThatAreLeft) {
  const Job job{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), {{170, 200, 150}, {60, 150, 40}, {9, 33, 3}}};
  for (const int heads : {1, 2}) {
    prepare(with_random_positions(job, heads, 3));
    ASSERT_NE(job_.positions, nullptr);
    for (const int world : {1, 2, 5}) expect_same(on_the_cpu(), world, std::to_string(heads) + " heads with positions");
  }
}

// Codes in the pages of a cache, side by side first: also of positions, in several blocks, and more than once.
TEST_P(Compressed, InPages) {
  Job job{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), {}};
  job.batch = {{1, 1, 0}, {300, 300, 0}, {0, 0, 0}, {129, 129, 0}, {5, 700, 695}, {63, 63, 0}, {17, 40, -9}};
  const Job evicted{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), {{170, 200, 150}, {60, 150, 40}, {9, 33, 3}}};
  CaseChoice choice = choose_cases(5);
  for (const Job& of : {job, with_random_positions(evicted, 2, 3)}) {
    prepare(of);
    for (const std::int64_t page : {16, 64, 256}) {
      job_.page_size = page;
      for (const int world : {1, 2, 3, 5}) {
        for (const std::int64_t block : {0, 256}) {
          if (!choice.take()) continue;
          Options options = on_the_cpu();
          options.block_tokens = block;
          options.checksum = world == 3;
          expect_same(options, world, "pages of " + std::to_string(page) + ", block " + std::to_string(block));
        }
      }
    }
  }
}

// KV blocks outside the block mask are neither sent nor decompressed; those in it have the bits of plain rows.
TEST_P(Compressed, WithABlockMask) {
  CaseChoice choice = choose_cases(3);
  for (const auto& [heads, mask] : {std::pair{1, Mask{-1, 0}}, {2, Mask{-1, -1}}, {4, Mask{300, 0}}}) {
    Job job{make_spec(Dtype::kBf16, 4, 2, 64, mask),
            {{300, 300, 0}, {0, 0, 0}, {5, 700, 695}, {900, 900, 0}, {17, 40, -9}}};
    const BlockMaskShape shape{64, 128, heads};
    set_block_mask(job, std::make_shared<const BlockMask>(make_block_mask(
                            shape, masked_sequences(job.batch),
                            union_of_patterns({random_blocks(shape, mask, 2, 7), window_blocks(shape, 10)}))));
    prepare(job);
    set_block_mask(job, nullptr);
    EXPECT_FALSE(reference_.same_bits(run_job(job, on_the_cpu(), tensors_.plain, 1)))
        << "all keys give the same: the test shows nothing";
    for (const int world : {1, 2, 3, 5}) {
      for (const std::int64_t block : {0, 256}) {
        if (!choice.take()) continue;
        Options options = on_the_cpu();
        options.block_tokens = block;
        options.layout.stripe = world == 3 ? 37 : 0;
        expect_same(options, world, std::to_string(heads) + " block_mask, block " + std::to_string(block));
      }
    }
  }
}

// The streams are sent: the bytes per token of all of them.
TEST_P(Compressed, BlocksTravelCompressed) {
  Job job{make_spec(Dtype::kBf16, 4, 2, 64, {-1, -1}), uniform_batch(1, 1024, 1024)};
  job.format = GetParam().format;
  const auto bytes_of = [](const Job& of) {
    std::array<std::int64_t, 2> bytes{};
    run_threads_world(2, {}, [&](Transport& transport) {
      const Attention attention(of, transport, on_the_cpu());
      bytes[static_cast<std::size_t>(transport.rank())] = attention.plan().bytes_received();
    });
    return bytes[0] + bytes[1];
  };
  Job plain = job;
  plain.format = {};
  const std::int64_t all = bytes_of(plain);
  EXPECT_EQ(all, 1024 * kv_token_bytes(job.spec));
  EXPECT_EQ(bytes_of(job),
            1024 * (token_bytes(job.format.k, k_shape(job.spec)) + token_bytes(job.format.v, v_shape(job.spec))));
  EXPECT_LT(bytes_of(job), all);
}

INSTANTIATE_TEST_SUITE_P(Formats, Compressed, ::testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name; });

// A scale of K and a code of V that no compressed tensor may hold, the 11th and 12th key of the second sequence.
CompressedJobTensors broken_tensors(const Job& job, bool keys) {
  CompressedJobTensors tensors = compressed_job_tensors(job, 3);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (keys) std::memcpy(tensors.k.streams[1].data() + (310 * job.spec.kv_heads + 1) * 4, &nan, 4);
  tensors.v.streams[0][static_cast<std::size_t>((311 * job.spec.kv_heads + 1) * job.spec.head_dim_v + 7)] =
      std::byte{0x80};
  return tensors;
}

Job job_of_two() {
  Job job{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), {}};
  job.batch = {{300, 300, 0}, {129, 129, 0}};
  job.format = {parse_row_format("int8"), parse_row_format("int8")};
  return job;
}

TEST(CompressedInvalidEntries, AreNamedOnAnyNumberOfRanks) {
  Job job = job_of_two();
  for (const int world : {1, 2, 3}) {
    for (const std::int64_t block : {0, 128}) {
      job.page_size = block;  // in rows, or in pages
      Options options = on_the_cpu();
      options.block_tokens = block;
      const auto text_of = [&](bool keys) {
        const Error error = error_of([&] { run_compressed(job, options, broken_tensors(job, keys), world); });
        EXPECT_EQ(error.code(), ErrorCode::kUsage);
        return std::string(error.what());
      };
      EXPECT_NE(text_of(true).find("k_scales[310, 1, 0] is nan"), std::string::npos) << text_of(true);
      EXPECT_NE(text_of(false).find("v_codes[311, 1, 7] is -128"), std::string::npos) << text_of(false);
    }
  }
}

TEST(CompressedInvalidEntries, AreToldOnceByTheNextWait) {
  const Job job = job_of_two();
  const auto transport = make_self_transport();
  Attention attention(job, *transport, on_the_cpu());
  std::vector<std::byte> out(static_cast<std::size_t>(attention.q_rows() * out_token_bytes(job.spec)));
  std::vector<std::byte> workspace(attention.workspace_bytes() + 256);
  std::byte* const aligned = workspace.data() + (256 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 256) % 256;
  const auto enqueue = [&](CompressedJobTensors& tensors) {
    Inputs inputs;
    inputs.q = view_of(tensors.plain.q, {job.spec.dtype, job.spec.heads, job.spec.head_dim}, attention.q_rows());
    inputs.quantized_k = tensors.k.rows();
    inputs.quantized_v = tensors.v.rows();
    Outputs outputs;
    outputs.out = dense_view(static_cast<void*>(out.data()), job.spec.dtype, attention.q_rows(), job.spec.heads,
                             job.spec.head_dim_v);
    attention.enqueue(inputs, outputs, {aligned, attention.workspace_bytes()}, {});
  };
  CompressedJobTensors broken = broken_tensors(job, true), good = compressed_job_tensors(job, 3);
  enqueue(good);
  enqueue(broken);
  enqueue(good);
  EXPECT_NE(std::string(error_of([&] { attention.wait(); }).what()).find("k_scales[310, 1, 0]"), std::string::npos);
  EXPECT_NO_THROW(attention.wait());
  enqueue(good);
  EXPECT_NO_THROW(attention.wait());
}

TEST(CompressedPlan, ABudgetHoldsTheRowsOfABlock) {
  Job job{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), uniform_batch(1, 1, 100'000)};
  job.format = {parse_row_format("int8"), parse_row_format("int8")};
  const auto transport = make_self_transport();
  Options options = on_the_cpu();
  const Attention free(job, *transport, options);
  EXPECT_EQ(free.plan().blocks.size(), 4U);
  // Rows of 32,768 keys and a tile, K and V, stand in the plan and in the workspace.
  EXPECT_GE(free.workspace_bytes(), (std::size_t{1} << 15) * 512);
  // 27 MB of quantized values and scales; rows of this many keys are 17 MB, of half as many 8 MB.
  for (const auto& [budget, blocks] : {std::pair{50'000'000U, 4U}, {40'000'000U, 7U}}) {
    options.memory_budget = budget;
    const Attention tight(job, *transport, options);
    EXPECT_LE(tight.plan().memory_bytes, options.memory_budget);
    EXPECT_EQ(tight.plan().blocks.size(), blocks);
  }
}

// A budget that a refusal names is enough, and gives the bits of a job with unlimited memory.
TEST(CompressedPlan, WhatARefusalNamesIsEnough) {
  for (const int world : {1, 3}) {
    for (const std::int64_t block : {0, 1024}) {
      for (const std::string_view format : {"int8", "int4_token group 32"}) {
        SCOPED_TRACE(fmt::format("{} ranks, blocks of {}, {}", world, block, format));
        Job job{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), uniform_batch(1, 5'000, 20'000)};
        job.page_size = format == "int8" ? 0 : 64;
        job.format = {parse_row_format(format), parse_row_format(format)};
        const auto prepare = [&](std::size_t budget) {
          std::mutex mutex;
          run_threads_world(world, {}, [&](Transport& transport) {
            Options options = on_the_cpu();
            options.block_tokens = block;
            options.memory_budget = budget;
            const Attention attention(job, transport, options);
            const std::lock_guard lock(mutex);
            EXPECT_LE(attention.plan().memory_bytes, budget);
          });
        };
        const Refusal refused = refusal_of(error_of([&] { prepare(1); }));
        EXPECT_NO_THROW(prepare(refused.counted)) << refused.text;
        EXPECT_NO_THROW(prepare(refused.named)) << refused.text;
        EXPECT_EQ(error_of([&] { prepare(refused.counted - 1); }).code(), ErrorCode::kMemory);
      }
    }
  }
}

TEST(CompressedRefusals, WhatDoesNotFitIsNamed) {
  const auto transport = make_self_transport();
  const auto refused = [&](const Job& job, const Options& options) {
    return std::string(error_of([&] { Attention(job, *transport, options); }).what());
  };
  Job job{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), uniform_batch(1, 256, 256)};
  job.format.k = parse_row_format("low_rank rank 64");
  EXPECT_NE(refused(job, on_the_cpu()).find("k of 2 heads of 64 can't be stored as low_rank rank 64"),
            std::string::npos);
  job.format.k = parse_row_format("int8");
  Options shorter = on_the_cpu();
  shorter.shorter_lengths = true;
  EXPECT_NE(refused(job, shorter).find("shorter lengths are wanted of compressed keys"), std::string::npos);
  Job paged = job;
  paged.page_size = 64;
  EXPECT_NE(refused(paged, shorter).find("shorter lengths are wanted of compressed keys"), std::string::npos);

  Attention attention(job, *transport, on_the_cpu());
  CompressedJobTensors tensors = compressed_job_tensors(job, 3);
  std::vector<std::byte> out(256 * 512), workspace(attention.workspace_bytes() + 256);
  const auto run = [&](const Inputs& inputs) {
    Outputs outputs;
    outputs.out = dense_view(static_cast<void*>(out.data()), Dtype::kBf16, 256, 4, 64);
    return std::string(error_of([&] { attention.run(inputs, outputs, workspace); }).what());
  };
  Inputs inputs;
  inputs.q = dense_view(static_cast<const void*>(tensors.plain.q.data()), Dtype::kBf16, 256, 4, 64);
  inputs.v = dense_view(static_cast<const void*>(tensors.plain.v.data()), Dtype::kBf16, 256, 2, 64);
  EXPECT_NE(run(inputs).find("parts of k are missing (the job stores it as int8)"), std::string::npos) << run(inputs);
  inputs.quantized_k = tensors.k.rows();
  inputs.k = inputs.v;
  EXPECT_NE(run(inputs).find("k is given uncompressed (the job stores it as int8)"), std::string::npos) << run(inputs);
}

TEST(CompressedRefusals, PagesThatDoNotFitAreNamed) {
  const auto transport = make_self_transport();
  Job job{make_spec(Dtype::kBf16, 4, 2, 24, {-1, 0}), uniform_batch(1, 256, 256)};
  job.page_size = 64;
  const RowFormat int8 = parse_row_format("int8"), vector = parse_row_format("vector width 8");
  const auto refused = [&](const RowFormat& format, const auto& spoil) {
    job.format = {format, format};
    const CompressedJobTensors tensors = compressed_job_tensors(job, 3);
    const PageOrder order = shuffled_pages(tensors.k.lengths, 64, 1);
    CompressedPool k(format, tensors.k.shape, order, 1), v(format, tensors.v.shape, order, 1);
    k.fill(tensors.k);
    v.fill(tensors.v);
    Attention attention(job, *transport, on_the_cpu());
    std::vector<std::byte> out(256 * 4 * 24 * 2), workspace(attention.workspace_bytes() + 256);
    Inputs inputs;
    inputs.q = dense_view(static_cast<const void*>(tensors.plain.q.data()), Dtype::kBf16, 256, 4, 24);
    inputs.pages.block_table = order.table;
    inputs.pages.max_pages = order.columns;
    inputs.pages.quantized_k = k.view();
    inputs.pages.quantized_v = v.view();
    std::vector<std::int32_t> table = order.table;
    spoil(inputs, table);
    if (table != order.table) inputs.pages.block_table = table;
    Outputs outputs;
    outputs.out = dense_view(static_cast<void*>(out.data()), Dtype::kBf16, 256, 4, 24);
    const Error error = error_of([&] { attention.run(inputs, outputs, workspace); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    return std::string(error.what());
  };
  const auto expect = [&](const RowFormat& format, std::string_view text, const auto& spoil) {
    const std::string found = refused(format, spoil);
    EXPECT_NE(found.find(text), std::string::npos) << found;
  };
  using Table = std::vector<std::int32_t>;
  expect(int8, "the pool of k is fp8 token_head of bf16 [pages, 64, 2, 24] (the job's is int8 of bf16",
         [](Inputs& inputs, Table&) { inputs.pages.quantized_k.format = parse_row_format("fp8 token_head"); });
  expect(int8, "the pool of v is int8 of bf16 [pages, 32, 2, 24]",
         [](Inputs& inputs, Table&) { inputs.pages.quantized_v.page_size = 32; });
  expect(int8, "the job's is int8 of bf16 [pages, 64, 2, 24], with all its parts",
         [](Inputs& inputs, Table&) { inputs.pages.quantized_v.streams[1].data = nullptr; });
  expect(int8, "the pool of k has 7 pages, that of v 6",
         [](Inputs& inputs, Table&) { --inputs.pages.quantized_v.pages; });
  expect(int8, "entry 2 of sequence 0 in the block table is page 7 (the pool has 7 pages)",
         [](Inputs&, Table& table) { table[2] = 7; });
  expect(int8, "k is given (the job's keys lie in pages of 64 tokens)",
         [](Inputs& inputs, Table&) { inputs.quantized_k.streams[0].data = inputs.pages.quantized_k.streams[0].data; });
  expect(int8, "the pool of k is uncompressed (the job stores it as int8)",
         [](Inputs& inputs, Table&) { inputs.pages.k.data = inputs.pages.quantized_k.streams[0].data; });
  // Three bytes a row of a head.
  expect(vector, "k_codes in pages has an odd number of bytes in a row or a stride", [](Inputs&, Table&) {});
}

}  // namespace
}  // namespace ringattn::testing
