// SPDX-License-Identifier: Apache-2.0
// --block-mask: the same bits however many ranks there are, the oracle, plans, and words that make no pattern.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Words listed_job(const std::string& lists) { return Words{"--block-mask", lists} + small_job(); }

TEST(BlockMaskCommand, EverythingIsTheJobWithoutIt) {
  const Finished dense = tool(Words{"run", "--quiet"} + small_job());
  ASSERT_EQ(dense.code, 0) << dense.err;
  const Finished all = tool(Words{"run", "--quiet", "--ranks", "2"} + listed_job("all+block:128"));
  ASSERT_EQ(all.code, 0) << all.err;
  EXPECT_EQ(digest_of(all.out), digest_of(dense.out));
}

TEST(BlockMaskCommand, VerifiesInOtherShapesAndAgainstTheOracle) {
  for (const std::string lists : {"window:16+global:8", "bigbird:8,8,1,3+heads:each", "topk:2", "strided:100"}) {
    const Finished shapes = tool(Words{"verify", "--ranks", "3"} + listed_job(lists));
    EXPECT_EQ(shapes.code, 0) << lists << shapes.out << shapes.err;
    const Finished oracle = tool(Words{"verify", "--against", "oracle", "--ranks", "2"} + listed_job(lists));
    EXPECT_EQ(oracle.code, 0) << lists << oracle.out << oracle.err;
    EXPECT_TRUE(has(oracle.out, "the block mask keeps ")) << oracle.out;
  }
}

// A step with a block mask has the digest of a prefill with the same mask, in any world and pages.
TEST(BlockMaskCommand, StepsWithABlockMaskAreThoseOfAPrefill) {
  const Words job = Words{"--synthetic", "7", "--seq", "9000", "--batch", "3", "--q-len", "1", "--heads", "4"} +
                    Words{"--kv-heads", "2", "--head-dim", "16", "--dtype", "fp32"};
  for (const std::string lists : {"topk:8", "window:300+global:128", "bigbird:100,128,3,5+heads:kv", "all"}) {
    const Finished prefill = tool(Words{"run", "--block-mask", lists} + job);
    ASSERT_EQ(prefill.code, 0) << prefill.err;
    for (const char* ranks : {"1", "2", "4", "5"}) {
      for (const char* page : {"0", "16", "256"}) {
        const Finished step =
            tool(Words{"run", "--op", "decode", "--block-mask", lists, "--ranks", ranks, "--page-size", page} + job);
        ASSERT_EQ(step.code, 0) << step.err;
        EXPECT_EQ(digest_of(step.out), digest_of(prefill.out)) << lists << ", " << ranks << ", " << page;
      }
    }
  }
  const Words step = Words{"--op", "decode", "--block-mask", "topk:8", "--page-size", "64"} + job;
  const Finished shapes = tool(Words{"verify", "--ranks", "3"} + step);
  EXPECT_EQ(shapes.code, 0) << shapes.out << shapes.err;
  EXPECT_TRUE(has(shapes.out, "dealt by ")) << shapes.out;
  const Finished oracle = tool(Words{"verify", "--against", "oracle"} + step);
  EXPECT_EQ(oracle.code, 0) << oracle.out << oracle.err;
  EXPECT_TRUE(has(oracle.out, "the block mask keeps ")) << oracle.out;
}

// What a plan says of steps with a block mask: who keeps what, how even that is, and which ranks have nothing to do.
TEST(BlockMaskCommand, PlansStepsWithABlockMask) {
  const Words step = Words{"plan", "--op", "decode", "--seq", "9000", "--q-len", "1", "--heads", "16", "--kv-heads"} +
                     Words{"8", "--head-dim", "64", "--block-mask", "window:1k+global:128", "--page-size", "64"};
  const auto planned = [&](const std::string& ranks, const std::string& sequences) {
    const Finished plan = tool(step + Words{"--world", ranks, "--batch", sequences});
    EXPECT_EQ(plan.code, 0) << plan.err;
    return plan.out;
  };
  EXPECT_TRUE(has(planned("1", "1"), "whole on one rank"));
  const std::string two = planned("2", "1");
  EXPECT_TRUE(has(two, "dealt by K/V heads")) << two;
  EXPECT_TRUE(has(two, "rank 0 holds 9000 keys of 4 K/V heads, owns 0 rows")) << two;
  EXPECT_TRUE(has(two, "rank 1 holds 9000 keys of 4 K/V heads, owns 1 rows")) << two;
  EXPECT_TRUE(has(two, "1.0000")) << two;
  const std::string many = planned("16", "1");
  EXPECT_TRUE(has(many, "dealt by sequences and K/V heads; 8 of 16 ranks without any")) << many;
  EXPECT_TRUE(has(many, "2.0000")) << many;
  const std::string three = planned("3", "300");
  EXPECT_TRUE(has(three, "dealt by sequences")) << three;
  EXPECT_TRUE(has(three, "holds 900000 keys, owns 100 rows")) << three;

  const Finished line = tool(step + Words{"--world", "2", "--batch", "3", "--json", "-"});
  ASSERT_EQ(line.code, 0) << line.err;
  EXPECT_EQ(json_at(line.out, "/rows/0/ranks/1/kv_heads"), "4") << line.out;
  EXPECT_EQ(json_at(line.out, "/rows/0/ranks/1/keys"), "27000") << line.out;
  EXPECT_EQ(json_at(line.out, "/rows/0/ranks/0/attended"), json_at(line.out, "/rows/0/ranks/1/attended")) << line.out;
  // For another rank's heads only a row's outputs, in bf16, and its LSE are received.
  EXPECT_EQ(json_at(line.out, "/rows/0/ranks/1/bytes"), "2112") << line.out;

  const Words budget{"--world", "1", "--batch", "64", "--memory", "700m"};
  EXPECT_EQ(tool(step + budget).code, 5);
  EXPECT_EQ(tool(step + Words{"--world", "2", "--batch", "64", "--memory", "700m"}).code, 0);
}

TEST(BlockMaskCommand, ReplaysRowsWithTheirBlockMask) {
  const Words job = Words{"--synthetic", "3", "--seq", "600", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"};
  for (const std::string lists : {"topk:3", "window:100+global:64+block:128"}) {
    for (const char* ranks : {"1", "2"}) {
      const Finished replay =
          tool(Words{"verify", "--decode", "--rows", "40", "--ranks", ranks, "--block-mask", lists} + job);
      EXPECT_EQ(replay.code, 0) << replay.out << replay.err;
    }
  }
}

TEST(BlockMaskCommand, StepsThatBlockMasksDontFit) {
  const Words job = Words{"run", "--op", "decode", "--seq", "900", "--heads", "4", "--kv-heads", "2", "--head-dim"} +
                    Words{"16", "--page-size", "64", "--synthetic", "7"};
  const auto refused = [&](const Words& lists, int code, const std::string& part) {
    const Finished run = tool(job + lists);
    EXPECT_EQ(run.code, code) << run.err;
    EXPECT_TRUE(has(run.err, part)) << run.err;
  };
  refused({"--block-mask", "global:128"}, 2, "leaves out block 7");
  refused({"--block-mask", "topk:2+heads:each"}, 4, "each query head");
  refused({"--block-mask", "topk:2+block:64"}, 4, "multiples of");
  refused({"--block-mask", "topk:2", "--window", "300,0"}, 4, "sliding window");
}

// A file's tensors make it a step; where no kernel decodes with such a mask its rows are computed as a prefill's.
TEST(BlockMaskCommand, CachesThatNoKernelDecodesAreReadIntoRows) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.lengths = {700, 3, 513, 130};
  shape.q_lens = {2, 2, 2, 2};  // the third sequence's in two blocks
  const std::string cache = write_cache(folder.file("cache"), shape);
  const std::string rows = write_tensors(folder.file("rows"), row_tensors(shape));
  struct Case {
    Words flags;
    const char* why;
  };
  const Case cases[] = {{{"--window", "100,0", "--block-mask", "topk:3"},
                         " (missing: decoding with a block mask under a sliding window (supported: without one))"},
                        {{"--block-mask", "topk:2+heads:each"},
                         " (missing: decoding with a mask row for each query head (supported: each KV head))"},
                        {{"--block-mask", "global:128"},
                         "sequence 0 can't be decoded with its mask row 0 (the mask row leaves out block 5, which "
                         "contains its rows, and a step "
                         "always reads that)"},
                        {{"--block-mask", "bigbird:1,0,1,3"}, "which have different mask rows)"}};
  for (const auto& [flags, why] : cases) {
    const std::string expected = folder.file("expected");
    const Finished prefill = tool(Words{"run", "--input", rows, "--output", expected, "--force"} + flags);
    ASSERT_EQ(prefill.code, 0) << prefill.err;
    for (const char* ranks : {"1", "3"}) {
      const Finished run = tool(Words{"run", "--input", cache, "--ranks", ranks} + flags);
      ASSERT_EQ(run.code, 0) << run.err;
      EXPECT_TRUE(has(run.out, "# cache: read into rows; ")) << run.out;
      EXPECT_TRUE(has(run.out, why)) << run.out;
      EXPECT_EQ(digest_of(run.out), digest_of(prefill.out)) << run.out;
      const Finished same = tool(Words{"verify", "--input", cache, "--ranks", ranks, "--against", expected} + flags);
      EXPECT_EQ(same.code, 0) << same.out << same.err;
    }
    for (const char* command : {"verify", "bench", "plan"}) {
      const Finished other = tool(Words{command, "--input", cache} + flags);
      EXPECT_EQ(other.code, 0) << command << other.err;
      EXPECT_TRUE(has(other.out, why)) << command << other.out;
    }
  }
  const Finished line = tool(Words{"bench", "--input", cache, "--samples", "2", "--jsonl", "-"} + cases[0].flags);
  EXPECT_EQ(json_at(line.out, "/job/op"), "absent") << line.out;
  const Finished forced = tool(Words{"run", "--input", cache, "--kernel", "cpu_attention"} + cases[0].flags);
  EXPECT_EQ(forced.code, 4) << forced.out;
  EXPECT_TRUE(has(forced.err, "sliding window")) << forced.err;
  shape.lengths = {700, 3, 520, 130};  // each sequence's rows stand in one block
  const std::string step = write_cache(folder.file("step"), shape);
  const Finished decoded = tool({"run", "--input", step, "--block-mask", "topk:3"});
  EXPECT_TRUE(has(decoded.out, "# job: decode")) << decoded.out << decoded.err;
}

// Each rank reads only its own heads, or sequences.
TEST(BlockMaskCommand, CountsNanOfACacheOnceOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  CacheShape shape;
  NamedTensors tensors = cache_tensors(shape);
  std::int32_t page = 0;  // the last sequence's first, which is full
  const auto columns = static_cast<std::size_t>(tensors.at("block_table").shape[1]);
  std::memcpy(&page, tensors.at("block_table").bytes.data() + 3 * columns * sizeof page, sizeof page);
  std::vector<std::byte>& k = tensors.at("k_pages").bytes;
  const std::size_t page_bytes = static_cast<std::size_t>(shape.page_size * shape.kv_heads * shape.head_dim) * 2;
  std::memset(k.data() + static_cast<std::size_t>(page) * page_bytes, 0xff, 3 * 2);
  const std::string cache = write_tensors(folder.file("cache"), tensors);
  for (const char* ranks : {"1", "2", "3", "5"}) {
    const Finished run = tool({"run", "--input", cache, "--block-mask", "topk:3", "--ranks", ranks, "--json", "-"});
    ASSERT_EQ(run.code, 0) << run.err;
    const std::string deal = ranks == std::string("1")   ? "whole on one rank"
                             : ranks == std::string("2") ? "dealt by K/V heads"
                                                         : "dealt by sequences";
    EXPECT_TRUE(has(run.err, deal)) << run.err;
    EXPECT_EQ(json_at(run.out, "/non_finite_inputs/k"), "3") << ranks;
    EXPECT_EQ(json_at(run.out, "/non_finite_inputs/v"), "0") << ranks;
  }
}

// Several ranks decode them over plain rows, because each rank would need the tables of only its own heads or
// sequences.
TEST(BlockMaskCommand, CompressedCachesAreDecodedBySeveralRanks) {
  const Words job = Words{"run", "--op", "decode", "--synthetic", "7", "--seq", "900", "--batch", "3", "--q-len", "2"} +
                    Words{"--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--page-size", "64"} +
                    Words{"--block-mask", "topk:3", "--cache-format", "int8"};
  const Finished alone = tool(job);
  ASSERT_EQ(alone.code, 0) << alone.err;
  EXPECT_TRUE(has(alone.out, "stored as")) << alone.out;
  for (const char* ranks : {"2", "3"}) {
    const Finished several = tool(job + Words{"--ranks", ranks});
    ASSERT_EQ(several.code, 0) << several.err;
    EXPECT_TRUE(has(several.out, "decompressed from")) << several.out;
    EXPECT_EQ(digest_of(several.out), digest_of(alone.out));
  }
  const Finished plan = tool(Words{"plan", "--world", "1,2"} + Words(job.begin() + 1, job.end()));
  EXPECT_EQ(plan.code, 0) << plan.err;
}

TEST(BlockMaskCommand, ShowsInPlansAndJobs) {
  const Finished plan = tool({"plan", "--seq", "64k", "--world", "4", "--block-mask", "window:1k+global:128"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_TRUE(has(plan.out + plan.err, "block mask of 128x128 blocks")) << plan.out << plan.err;
  EXPECT_TRUE(has(plan.out + plan.err, "% of the pairs")) << plan.out << plan.err;
  const Finished top = tool({"plan", "--seq", "1k", "--block-mask", "topk:2"});
  EXPECT_EQ(top.code, 2) << top.out;  // rows are needed
}

TEST(BlockMaskCommand, WordsThatMakeNoPattern) {
  const Finished run = tool(Words{"run"} + listed_job("windw:16"));
  EXPECT_EQ(run.code, 2);
  EXPECT_TRUE(has(run.err, "did you mean window?")) << run.err;
  EXPECT_EQ(tool(Words{"run"} + listed_job("none.safetensors")).code, 3);
}

}  // namespace
}  // namespace ringattn::testing
