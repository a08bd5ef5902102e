// SPDX-License-Identifier: Apache-2.0
// Attention over keys in the pages of a cache: the bits of the same keys in rows, on any number of ranks, and tables
// that name what is not there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "comm/self.hpp"
#include "ops/attention/paged_keys.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/paged_rank.hpp"
#include "tests/support/random_positions.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kPageSizes[] = {16, 32, 64, 128, 256};

Options on_cpu(std::int64_t block_tokens = 0) {
  Options options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  options.block_tokens = block_tokens;
  return options;
}

JobResult run_paged(const Job& job, const Options& options, const JobTensors& tensors, int world,
                    const PageLayout& pages) {
  JobResult result = poisoned_result(job, world);
  const auto rank = [&](Transport& transport) { run_paged_rank(job, options, tensors, transport, pages, result); };
  if (world == 1) {
    rank(*make_self_transport());
  } else {
    run_threads_world(world, {}, rank);
  }
  return result;
}

std::vector<Job> jobs() {
  AttentionSpec everything = make_spec(Dtype::kBf16, 4, 2, 64, {150, 33}, 32);
  everything.softcap = 20.0F;
  everything.sinks = true;
  const std::vector<Sequence> ragged = {{1, 1, 0},     {300, 300, 0}, {0, 0, 0},     {129, 129, 0}, {5, 700, 695},
                                        {257, 90, 11}, {64, 0, 0},    {900, 900, 0}, {17, 40, -9},  {128, 128, 0}};
  return {{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), uniform_batch(1, 1531, 1531)},
          {make_spec(Dtype::kF32, 2, 1, 16, {-1, -1}, 24), ragged},
          {everything, ragged},
          {make_spec(Dtype::kBf16, 2, 2, 32, {-1, 0}), uniform_batch(2, 33, 1400)},  // after a cached prefix
          with_random_positions({everything, ragged}, 2, 5)};
}

TEST(PagedAttention, HasTheBitsOfRowsOnAnyNumberOfRanks) {
  for (const Job& job : jobs()) {
    const JobTensors tensors = random_tensors(job, 17);
    const JobResult rows = run_job(job, on_cpu(), tensors, 1);
    for (const std::int64_t page_size : kPageSizes) {
      for (const int world : {1, 2, 3, 5}) {
        const bool head_major = world % 2 == 0 || page_size == 64;
        const PageLayout pages{page_size, head_major, 3, 0, page_size == 32 ? 8 : 0};
        EXPECT_TRUE(run_paged(job, on_cpu(world == 3 ? 512 : 0), tensors, world, pages).same_bits(rows))
            << describe(job) << "; pages of " << page_size << ", world " << world;
      }
    }
  }
}

TEST(PagedAttention, InSeveralBlocksOnOneRank) {
  const Job job = jobs()[1];
  const JobTensors tensors = random_tensors(job, 18);
  const JobResult rows = run_job(job, on_cpu(), tensors, 1);
  for (const std::int64_t block : {128, 384}) {
    EXPECT_TRUE(run_paged(job, on_cpu(block), tensors, 1, {16, false, 4}).same_bits(rows)) << block;
  }
}

// A prompt in chunks: each is a job whose queries follow those of the chunks before, over one growing cache.
TEST(PagedAttention, ChunkAfterChunkOverOneCache) {
  constexpr std::int64_t kTokens = 700;
  const Job whole{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), uniform_batch(1, kTokens, kTokens)};
  const JobTensors tensors = random_tensors(whole, 19);
  const JobResult expected = run_job(whole, on_cpu(), tensors, 1);
  const auto rows_of = [](const std::vector<std::byte>& packed, std::int64_t begin, std::int64_t end) {
    const auto token = static_cast<std::int64_t>(packed.size()) / kTokens;
    return std::vector<std::byte>(packed.begin() + begin * token, packed.begin() + end * token);
  };
  JobResult joined;
  for (std::int64_t begin = 0; begin < kTokens; begin += 230) {
    const std::int64_t end = std::min(begin + 230, kTokens);
    const Job chunk{whole.spec, uniform_batch(1, end - begin, end)};
    const JobTensors part{rows_of(tensors.q, begin, end), rows_of(tensors.k, 0, end), rows_of(tensors.v, 0, end), {}};
    const JobResult result = run_paged(chunk, on_cpu(), part, 1, {32, false, 5});
    joined.out.insert(joined.out.end(), result.out.begin(), result.out.end());
    joined.lse.insert(joined.lse.end(), result.lse.begin(), result.lse.end());
  }
  EXPECT_TRUE(joined.same_bits(expected));
}

TEST(PagedAttention, ShorterLengthsOverTheSamePool) {
  Job job = jobs()[0];
  job.page_size = 16;
  Options options = on_cpu();
  options.shorter_lengths = true;
  const auto self = make_self_transport();
  Attention attention(job, *self, options);
  Job shorter = jobs()[0];
  shorter.batch = uniform_batch(1, 400, 777);
  const JobTensors tensors = random_tensors(shorter, 20);
  attention.set_lengths(shorter.batch);
  PagedRank memory(attention, 0, tensors, {16, true, 6});
  attention.run(memory.inputs(), memory.outputs(), memory.workspace());
  JobResult result = poisoned_result(shorter, 1);
  memory.collect(result);
  EXPECT_TRUE(result.same_bits(run_job(shorter, on_cpu(), tensors, 1)));
}

class BadTables : public ::testing::Test {
 protected:
  BadTables() : self_(make_self_transport()) {
    Job job{make_spec(Dtype::kBf16, 4, 2, 64, {-1, 0}), {{10, 100, 90}, {20, 200, 180}}};
    tensors_ = random_tensors(job, 21);
    job.page_size = 16;
    attention_.emplace(job, *self_, on_cpu());
    memory_.emplace(*attention_, 0, tensors_, PageLayout{16, false, 7});
  }

  // The message with which a run over these inputs is refused.
  std::string refused(const Inputs& inputs) {
    std::string message = "nothing";
    try {
      attention_->run(inputs, memory_->outputs(), memory_->workspace());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      message = error.what();
    }
    return message;
  }
  void expect_refused(const Inputs& inputs, const std::vector<std::string>& words) {
    const std::string message = refused(inputs);
    for (const std::string& word : words) EXPECT_NE(message.find(word), std::string::npos) << word << ": " << message;
  }
  std::int32_t& entry(std::int64_t sequence, std::int64_t i) {
    return memory_->table()[static_cast<std::size_t>(sequence * memory_->pool().table_width() + i)];
  }

  std::unique_ptr<Transport> self_;
  JobTensors tensors_;
  std::optional<Attention> attention_;
  std::optional<PagedRank> memory_;
};

TEST_F(BadTables, PagesOutsideOfThePool) {
  const auto pages = static_cast<std::int32_t>(memory_->pool().pages());
  for (const std::int32_t page : {pages, -1, kNoPage}) {
    const std::int32_t before = entry(1, 12);
    entry(1, 12) = page;  // the last one, which holds 8 keys
    expect_refused(memory_->inputs(),
                   {"sequence 1", "entry 12", "page " + std::to_string(page), std::to_string(pages) + " pages"});
    entry(1, 12) = before;
  }
  EXPECT_EQ(refused(memory_->inputs()), "nothing");
}

TEST_F(BadTables, MissingPages) {
  Inputs narrow = memory_->inputs();
  narrow.pages.max_pages = 12;
  expect_refused(narrow, {"sequence 1", "200 keys", "13 pages", "12"});
  Inputs cut = memory_->inputs();
  cut.pages.block_table = cut.pages.block_table.first(cut.pages.block_table.size() - 1);
  expect_refused(cut, {"block table", std::to_string(cut.pages.block_table.size()) + " entries"});
}

TEST_F(BadTables, PoolsThatDoNotFit) {
  Inputs inputs = memory_->inputs();
  inputs.pages.v.pages -= 1;
  expect_refused(inputs, {"pool of k has " + std::to_string(memory_->pool().pages()), "that of v"});
  inputs = memory_->inputs();
  inputs.pages.k.page_size = 32;
  expect_refused(inputs, {"pool of k", "[pages, 32, 2, 64]", "[pages, 16, 2, 64]"});
  inputs = memory_->inputs();
  inputs.pages.v.heads = 1;
  expect_refused(inputs, {"pool of v", "[pages, 16, 1, 64]"});
}

TEST_F(BadTables, RowsWherePagesAreMeantAndPagesWhereRowsAre) {
  Inputs inputs = memory_->inputs();
  inputs.k = inputs.q;
  expect_refused(inputs, {"k is given", "pages of 16"});
  Job job = attention_->job();
  job.page_size = 0;
  memory_.reset();
  attention_.reset();
  attention_.emplace(job, *self_, on_cpu());
  memory_.emplace(*attention_, 0, tensors_, PageLayout{16, false, 7});
  inputs = memory_->inputs();
  inputs.k = dense_view(static_cast<const void*>(tensors_.k.data()), Dtype::kBf16, 300, 2, 64);
  inputs.v = dense_view(static_cast<const void*>(tensors_.v.data()), Dtype::kBf16, 300, 2, 64);
  expect_refused(inputs, {"pages are given", "no page size"});
}

TEST(PagedJob, PageSizesThatTilesCanNotBeCutFor) {
  for (const std::int64_t page_size : {1, 8, 15, 24, 48, 96, 512, -16}) {
    Job job = jobs()[0];
    job.page_size = page_size;
    EXPECT_EQ(error_of([&] { check_job(job); }).code(), ErrorCode::kUsage) << page_size;
  }
  for (const std::int64_t page_size : kPageSizes) {
    Job job = jobs()[0];
    job.page_size = page_size;
    EXPECT_NO_THROW(check_job(job));
  }
}

}  // namespace
}  // namespace ringattn::testing
