// SPDX-License-Identifier: Apache-2.0
// Decoding by the program: caches in files and from seeds, as `run`, `verify`, `bench` and `plan` take them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Words step_words() { return Words{"--op", "decode", "--page-size", "16", "--q-len", "3"} + small_job(); }

// A cache of more than one KV split, in pages and as rows.
CacheShape several_groups() {
  CacheShape shape;
  shape.lengths = {9000, 1, 8193, 40};
  shape.q_lens = {2, 2, 2, 2};
  shape.head_dim = shape.head_dim_v = 8;
  shape.dtype = Dtype::kF32;
  return shape;
}

TEST(DecodeFile, GivesTheBytesOfAttentionOverTheSameTokens) {
  const TemporaryFolder folder;
  for (const bool head_major : {false, true}) {
    CacheShape shape = several_groups();
    shape.head_major = head_major;
    shape.sinks = head_major;
    const std::string cache = write_cache(folder.file("cache"), shape);
    const std::string rows = write_tensors(folder.file("rows"), row_tensors(shape));
    const std::string expected = digest_of(tool({"run", "--input", rows}).out);
    for (const char* ranks : {"1", "2", "3", "5"}) {
      const std::string path = folder.file(std::string("out") + ranks);
      const Finished run = tool({"run", "--input", cache, "--ranks", ranks, "--output", path, "--force"});
      ASSERT_EQ(run.code, 0) << run.err;
      EXPECT_TRUE(has(run.out, "# cache: 1083 pages of 16 tokens")) << run.out;
      EXPECT_EQ(digest_of(run.out), expected) << run.out;
      EXPECT_TRUE(read_whole(path) == read_whole(folder.file("out1"))) << "the files of two worlds differ";
    }
    EXPECT_TRUE(has(read_whole(folder.file("out1")), R"("shape":[4, 8])"));  // lse
  }
}

TEST(DecodeFile, OfManyRowsOrUnequallyManyIsReadIntoRows) {
  const TemporaryFolder folder;
  for (const std::vector<std::int64_t>& q_lens : {std::vector<std::int64_t>{1, 0, 17, 3}, {20, 20, 20, 20}}) {
    CacheShape shape;
    shape.q_lens = q_lens;
    const std::string cache = write_cache(folder.file("cache"), shape);
    const std::string rows = write_tensors(folder.file("rows"), row_tensors(shape));
    const Finished run = tool({"run", "--input", cache, "--ranks", "2"});
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_TRUE(has(run.out, "# cache: read into rows")) << run.out;
    EXPECT_EQ(digest_of(run.out), digest_of(tool({"run", "--input", rows}).out));
  }
}

// The kernel that is chosen for a file is there by its name, too, though it decodes nothing.
TEST(DecodeFile, IsReadIntoRowsForANamedKernel) {
  const TemporaryFolder folder;
  CacheShape shape;
  shape.dtype = Dtype::kF32;
  const std::string cache = write_cache(folder.file("cache"), shape);
  const Finished chosen = tool({"plan", "--input", cache, "--backend", "cuda"});
  if (chosen.code == 4) GTEST_SKIP() << "this build has no cuda kernels";
  const std::string rows = "# cache: read into rows; no kernel decodes it with the bits of sm80_simt";
  EXPECT_TRUE(has(chosen.out, rows)) << chosen.out << chosen.err;
  const Finished named = tool({"plan", "--input", cache, "--kernel", "sm80_simt"});
  ASSERT_EQ(named.code, 0) << named.err;
  EXPECT_TRUE(has(named.out, rows)) << named.out;
  EXPECT_TRUE(has(named.out, "# kernel: forced: sm80_simt (fp32")) << named.out;
}

// Over the edge of a KV split: the prefix's tiles are computed once for all sequences, where a kernel can.
TEST(DecodeSteps, OfSharedPrefixesAreThoseOfAPrefill) {
  const Words step = Words{"--synthetic", "7", "--seq", "8300", "--batch", "3", "--op", "decode"} +
                     Words{"--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--dtype", "fp32", "--q-len", "2"};
  std::string expected;
  for (const char* page : {"16", "256"}) {
    for (const char* ranks : {"1", "2", "3"}) {
      const Finished run = tool(Words{"run", "--prefix", "8250", "--page-size", page, "--ranks", ranks} + step);
      ASSERT_EQ(run.code, 0) << run.err;
      if (expected.empty()) expected = digest_of(run.out);
      EXPECT_EQ(digest_of(run.out), expected) << page << ", " << ranks;
    }
  }
  const Finished verified = tool(Words{"verify", "--prefix", "8250", "--page-size", "64"} + step);
  EXPECT_EQ(verified.code, 0) << verified.out << verified.err;
  for (const auto& [flags, part] : {std::pair{Words{"--prefix", "8299", "--page-size", "64"}, "queries are its own"},
                                    {Words{"--prefix", "64", "--page-size", "0"}, "a dense cache has none"}}) {
    const Finished refused = tool(Words{"run"} + step + flags);
    EXPECT_EQ(refused.code, 2);
    EXPECT_TRUE(has(refused.err, part)) << refused.err;
  }
  const Finished shorter = tool({"run", "--synthetic", "7", "--seq", "1", "--op", "decode", "--q-len", "2"});
  EXPECT_EQ(shorter.code, 2);
  EXPECT_TRUE(has(shorter.err, "queries are those of a sequence's last tokens")) << shorter.err;
}

TEST(DecodeFile, CountsWhatIsNanInSlotsThatHoldTokensAlone) {
  const TemporaryFolder folder;
  NamedTensors tensors = cache_tensors(CacheShape());  // its empty slots are NaN
  const std::string clean = write_tensors(folder.file("clean"), tensors);
  const Finished run = tool({"run", "--input", clean, "--json", "-"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(json_at(run.out, "/non_finite_inputs/k"), "0");
  EXPECT_EQ(json_at(run.out, "/non_finite_inputs/v"), "0");
}

TEST(DecodeFile, IsRefusedWithSequencePageAndLimit) {
  const TemporaryFolder folder;
  NamedTensors tensors = cache_tensors(CacheShape());
  const std::int32_t page = 99;
  std::memcpy(tensors["block_table"].bytes.data() + 4, &page, sizeof page);
  const std::string bad = write_tensors(folder.file("bad"), tensors);
  for (const char* command : {"run", "verify", "bench", "plan"}) {
    const Finished refused = tool({command, "--input", bad});
    EXPECT_EQ(refused.code, 3) << refused.err;
    EXPECT_TRUE(has(refused.err, "sequence 0, entry 1 of `block_table`")) << refused.err;
    EXPECT_TRUE(has(refused.err, "is page 99 (the pool has pages 0 to 12)")) << refused.err;
  }
  const std::string good = write_cache(folder.file("good"), CacheShape());
  for (const Words& flags :
       {Words{"--query-offset", "3"}, {"--layout", "zigzag"}, {"--block", "64"}, {"--trace", "t"}}) {
    const Finished refused = tool(Words{"run", "--input", good} + flags);
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_TRUE(has(refused.err, flags[0] + " contradicts a file with a cache")) << refused.err;
  }
  EXPECT_EQ(tool({"run", "--input", good, "--op", "mla"}).code, 2);
  EXPECT_EQ(tool({"run", "--input", good, "--memory", "4k"}).code, 5);
}

TEST(Decode, HasTheBitsOfAPrefillsLastRows) {
  const TemporaryFolder folder;
  const std::string last = folder.file("last");
  ASSERT_EQ(tool(Words{"run", "--q-len", "3", "--output", last} + small_job()).code, 0);
  for (const Words& shape : {Words{"--page-size", "0"}, {"--page-size", "64"}, {"--page-size", "16", "--ranks", "3"}}) {
    const std::string path = folder.file("step");
    const Finished run =
        tool(Words{"run", "--op", "decode", "--q-len", "3", "--output", path, "--force"} + small_job() + shape);
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_TRUE(read_whole(path) == read_whole(last)) << run.out;
  }
}

TEST(Decode, ReportsItsOp) {
  const Finished run = tool(Words{"run", "--json", "-", "--ranks", "2"} + step_words());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(check_report(run.out), "");
  EXPECT_EQ(json_at(run.out, "/op"), "\"decode\"");
  EXPECT_EQ(json_at(run.out, "/job/q_tokens"), "3");
  EXPECT_EQ(json_at(run.out, "/plan/layout"), "\"KV splits\"");
  EXPECT_NE(json_at(run.out, "/plan/memory/cache"), "absent");
  EXPECT_EQ(json_at(run.out, "/exposed_comm_ms"), "null");
  const Finished attention = tool(Words{"run", "--json", "-"} + small_job());
  EXPECT_EQ(json_at(attention.out, "/op"), "\"attention\"");
  const Finished dry = tool(Words{"run", "--dry-run"} + step_words());
  EXPECT_TRUE(has(dry.out, "nothing is computed")) << dry.out;
}

TEST(Decode, IsVerified) {
  const Finished shapes = tool(Words{"verify"} + step_words());
  ASSERT_EQ(shapes.code, 0) << shapes.out << shapes.err;
  EXPECT_TRUE(has(shapes.out, "# 7 shapes")) << shapes.out;  // the page size is held
  const TemporaryFolder folder;
  const std::string cache = write_cache(folder.file("cache"), several_groups());
  const Finished file = tool({"verify", "--input", cache});
  ASSERT_EQ(file.code, 0) << file.out << file.err;
  EXPECT_TRUE(has(file.out, "# 13 shapes")) << file.out;
  for (const char* part : {"dense", "attention", " 256 "}) EXPECT_TRUE(has(file.out, part)) << part << file.out;
  EXPECT_TRUE(has(tool({"verify", "--input", cache, "--against", "oracle"}).out, "PASS"));

  const std::string golden = folder.file("golden");
  EXPECT_EQ(tool({"verify", "--input", cache, "--record", golden}).code, 0);
  EXPECT_EQ(tool({"verify", "--input", cache, "--golden", golden, "--ranks", "2"}).code, 0);
}

TEST(VerifyDecode, ComparesThePrefillsLastRows) {
  const TemporaryFolder folder;
  CacheShape shape = several_groups();
  shape.lengths = {8200, 3, 0, 100};
  shape.q_lens = {70, 3, 0, 66};  // shorter ones are decoded whole
  const std::string rows = write_tensors(folder.file("rows"), row_tensors(shape));
  for (const char* ranks : {"1", "3"}) {
    const Finished run =
        tool({"verify", "--decode", "--input", rows, "--ranks", ranks, "--json", folder.file("r"), "--force"});
    ASSERT_EQ(run.code, 0) << run.out << run.err;
    EXPECT_TRUE(has(run.out, "paged        16   131     PASS")) << run.out;
    EXPECT_EQ(check_report(read_whole(folder.file("r"))), "");
  }
  CacheShape step = several_groups();
  step.lengths = {9000, 2, 8193, 40};
  const std::string cache = write_cache(folder.file("cache"), step);
  const Finished steps = tool({"verify", "--decode", "--input", cache});
  EXPECT_EQ(steps.code, 0) << steps.out << steps.err;
  EXPECT_TRUE(has(steps.out, "# cache: read into rows; steps are compared with a prefill of its rows")) << steps.out;
  const Finished windowed = tool(Words{"verify", "--decode", "--window", "20,-1", "--softcap", "3"} + small_job());
  EXPECT_EQ(windowed.code, 0) << windowed.out << windowed.err;
  const Finished full = tool(Words{"verify", "--decode", "--mask", "full"} + small_job());
  EXPECT_EQ(full.code, 2) << full.out;
  EXPECT_TRUE(has(full.err, "are not there yet when a row is decoded")) << full.err;
  EXPECT_EQ(tool(Words{"verify", "--decode", "--query-offset", "7"} + small_job()).code, 2);
  EXPECT_EQ(tool(Words{"verify", "--decode", "--against", "oracle"} + small_job()).code, 2);
}

TEST(PlanDecode, SaysMemoryAndBytes) {
  const Finished plan = tool({"plan", "--op", "decode", "--seq", "64k", "--batch", "4", "--page-size", "64", "--world",
                              "1,2,8", "--json", "-"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_EQ(json_at(plan.out, "/op"), "\"decode\"");
  EXPECT_EQ(json_at(plan.out, "/rows/0/bytes_moved"), "0");
  EXPECT_EQ(json_at(plan.out, "/rows/0/memory/cache"), std::to_string(4 * 65536 * 2 * 2 * 128 * 2));
  EXPECT_EQ(json_at(plan.out, "/rows/2/memory/cache"), std::to_string(4 * 65536 * 2 * 2 * 128 * 2 / 8));
  EXPECT_EQ(tool({"plan", "--op", "decode", "--memory", "1m"}).code, 5);
  for (const char* threads : {"1", "3"}) {  // with which scratch grows
    const Words refused = step_words() + Words{"--backend", "cpu", "--threads", threads, "--memory", "1"};
    const Finished run = tool(Words{"run", "--ranks", "2"} + refused);
    EXPECT_EQ(run.code, 5) << run.err;
    EXPECT_EQ(tool(Words{"plan", "--world", "2"} + refused).err, run.err);
  }
  EXPECT_EQ(tool({"plan", "--op", "decode", "--layout", "zigzag"}).code, 2);
}

// A step on a CPU takes as long as its cache is read, if the machine computes fast enough.
TEST(PlanDecode, EstimatesCpuStepsByTheMemoryRate) {
  const TemporaryFolder folder;
  const std::string reader = folder.write("reader.json",
                                          R"({"flops_per_second": 1e18, "link_bytes_per_second": 1e9,
                                              "latency_seconds": 0, "memory_bytes_per_second": 1e9})");
  const Words job{"plan", "--op", "decode", "--seq", "64k", "--backend", "cpu", "--world", "1,2", "--json", "-"};
  const Finished read = tool(job + Words{"--machine", reader});
  ASSERT_EQ(read.code, 0) << read.err;
  const auto number = [](const Finished& plan, const char* name) { return std::stod(json_at(plan.out, name)); };
  const double milliseconds = number(read, "/rows/0/bytes_read") / 1e9 * 1e3;
  EXPECT_NEAR(number(read, "/rows/0/estimated_ms"), milliseconds, 1e-3 * milliseconds);
  EXPECT_NEAR(number(read, "/rows/1/estimated_ms"), milliseconds / 2, 1e-3 * milliseconds);
  const Finished text = tool({"plan", "--op", "decode", "--seq", "64k", "--backend", "cpu", "--machine", reader});
  EXPECT_TRUE(has(text.out, "# machine: " + reader + "; reads 1 GB/s of memory a rank\n")) << text.out;
  // By default it takes longer to pack a cache of few rows, and less with more threads.
  const Finished one = tool(job + Words{"--threads", "1"});
  EXPECT_GT(number(one, "/rows/0/estimated_ms"), number(tool(job + Words{"--threads", "4"}), "/rows/0/estimated_ms"));
  // The busiest rank has the work tiles of its KV split, however many ranks have none.
  const Finished many = tool({"plan", "--op", "decode", "--seq", "64k", "--backend", "cpu", "--threads", "4", "--world",
                              "8,64", "--json", "-"});
  EXPECT_EQ(number(many, "/rows/0/estimated_ms"), number(many, "/rows/1/estimated_ms"));
}

TEST(BenchDecode, MeasuresLengthsAndBatches) {
  const TemporaryFolder folder;
  const std::string lines = folder.file("lines");
  // One thread: with several, one might wait for another that a busy machine doesn't schedule, 10,000 times as long as
  // a step.
  const Words words{"bench",      "--op", "decode",     "--seq", "50,70",     "--batch", "1,3",       "--heads", "2",
                    "--kv-heads", "1",    "--head-dim", "8",     "--samples", "5",       "--threads", "1"};
  const Finished run = tool(words + Words{"--jsonl", lines});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(has(run.out, "GB/s")) << run.out;
  const std::string text = read_whole(lines);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4) << text;
  const std::string last = text.substr(text.rfind('\n', text.size() - 2) + 1);
  EXPECT_EQ(json_at(last, "/job/op"), "\"decode\"");
  EXPECT_EQ(json_at(last, "/job/seq"), "70");
  EXPECT_EQ(json_at(last, "/job/keys"), "210");
  EXPECT_EQ(json_at(last, "/job/tokens"), "3");
  EXPECT_NE(json_at(last, "/us"), "absent");
  EXPECT_NE(json_at(last, "/gb_per_s"), "absent");
  EXPECT_EQ(json_at(last, "/digest").size(), 34U);
  const Finished again = tool(words + Words{"--baseline", lines, "--fail-above", "1000000%"});
  EXPECT_EQ(again.code, 0) << again.out << again.err;
  EXPECT_TRUE(has(again.out, "4 points")) << again.out;
  EXPECT_EQ(tool(words + Words{"--against", "compute"}).code, 2);
  EXPECT_EQ(tool(words + Words{"--compute-only"}).code, 2);
}

// Without --op, few rows after many keys are decode steps, and flags of the ring mean that ring attention is measured.
TEST(BenchDecode, FewQueriesAreStepsUnlessAFlagSaysOtherwise) {
  const Words words{"bench",      "--q-len", "1",          "--seq", "50,70",     "--batch", "1,3",       "--heads", "2",
                    "--kv-heads", "1",       "--head-dim", "8",     "--samples", "2",       "--threads", "1"};
  const auto ops_of = [](const std::string& lines) {
    std::string ops;
    for (std::size_t at = 0; at < lines.size(); at = lines.find('\n', at) + 1) {
      ops += json_at(lines.substr(at, lines.find('\n', at) - at), "/job/op") + " ";
    }
    return ops;
  };
  const std::string all_steps = "\"decode\" \"decode\" \"decode\" \"decode\" ";
  const std::string all_rows = "absent absent absent absent ";
  const Finished steps = tool(words + Words{"--jsonl", "-"});
  ASSERT_EQ(steps.code, 0) << steps.err;
  EXPECT_EQ(ops_of(steps.out), all_steps);
  EXPECT_TRUE(has(steps.err, "# op: decode, as --q-len 1 makes steps; --op attention measures")) << steps.err;
  const Finished paged = tool(words + Words{"--jsonl", "-", "--page-size", "16", "--prefix", "20"});
  EXPECT_EQ(ops_of(paged.out), all_steps) << paged.err;
  const Finished named = tool(words + Words{"--op", "decode"});
  EXPECT_FALSE(has(named.out, "# op:")) << named.out;
  for (const Words& flags :
       {Words{"--op", "attention"}, {"--layout", "zigzag"}, {"--block", "64"}, {"--compute-only"}}) {
    const Finished rows = tool(words + Words{"--jsonl", "-"} + flags);
    ASSERT_EQ(rows.code, 0) << rows.err;
    EXPECT_EQ(ops_of(rows.out), all_rows) << flags[0];
    EXPECT_TRUE(has(rows.err, "# op: attention, ring attention; --op decode measures decode steps")) << rows.err;
  }
  EXPECT_EQ(tool(words + Words{"--against", "compute"}).code, 0);
  const Finished unserved = tool(words + Words{"--jsonl", "-", "--block-mask", "topk:2+heads:each"});
  ASSERT_EQ(unserved.code, 0) << unserved.err;
  EXPECT_EQ(ops_of(unserved.out), all_rows);
  EXPECT_TRUE(has(unserved.err, "# cache: read into rows; no kernel decodes it")) << unserved.err;
}

TEST(BenchDecode, IsTheDefaultOfBenchAlone) {
  EXPECT_TRUE(has(tool({"bench", "--q-len", "16", "--print-config"}).out, "op = \"decode\"  # default"));
  EXPECT_TRUE(has(tool({"bench", "--q-len", "17", "--print-config"}).out, "op = \"attention\"  # default"));
  EXPECT_TRUE(has(tool({"bench", "--print-config"}).out, "op = \"attention\"  # default"));
  EXPECT_TRUE(has(tool({"run", "--q-len", "1", "--print-config"}).out, "op = \"attention\"  # default"));
  const Words latents{"bench", "--op", "mla", "--q-len", "1", "--seq", "100", "--samples", "1"};
  const Finished steps = tool(latents);
  EXPECT_TRUE(has(steps.out, "# op: mla, a decode step, as --q-len 1 makes one")) << steps.out << steps.err;
  const Finished rows = tool(latents + Words{"--form", "expanded"});
  EXPECT_TRUE(has(rows.out, "# op: mla, ring attention; --form absorbed measures decode steps")) << rows.err;
}

// On any machine, with a GPU or without.
TEST(PlanDecode, ByEveryKernelOfGpus) {
  const Words steps{"plan", "--seq", "16k", "--dtype", "bf16", "--json", "-"};
  if (tool(steps + Words{"--backend", "cuda"}).code != 0) GTEST_SKIP() << "this build has no cuda kernels";
  for (const Words& job : {Words{"--op", "decode", "--kernel", "sm80_attention"},
                           {"--op", "mla", "--page-size", "64", "--q-len", "1", "--kernel", "sm80_attention"},
                           {"--op", "decode", "--backend", "cuda", "--head-dim", "256", "--block-mask", "window:1k"}}) {
    const Finished plan = tool(steps + job);
    EXPECT_EQ(plan.code, 0) << plan.err;
    EXPECT_NE(json_at(plan.out, "/rows/0/memory/scratch"), "absent") << plan.out;
  }
}

// Tiles of a prefix that sm90_attention computes once for all sequences are read once.
TEST(PlanDecode, CountsSharedTilesOnce) {
  const Words job{"plan", "--op", "decode", "--seq", "64k", "--batch", "32", "--page-size", "16", "--json", "-"};
  const Words shares = job + Words{"--kernel", "sm90_attention"};
  if (tool(shares).code != 0) GTEST_SKIP() << "this build has no kernels for Hopper";
  const auto read = [](const Words& words, const char* prefix) {
    const Finished plan = tool(words + Words{"--prefix", prefix});
    EXPECT_EQ(plan.code, 0) << plan.err;
    return json_at(plan.out, "/rows/0/bytes_read");
  };
  constexpr std::int64_t kKeyBytes = 2 * 2 * 128 * 2;
  EXPECT_EQ(read(shares, "127"), std::to_string(32 * 65536 * kKeyBytes));
  EXPECT_EQ(read(shares, "4k"), std::to_string((32 * 65536 - 31 * 4096) * kKeyBytes));
  EXPECT_EQ(read(shares, "48k"), std::to_string((32 * 65536 - 31 * 49152) * kKeyBytes));
  EXPECT_EQ(read(job + Words{"--kernel", "sm80_attention"}, "48k"), std::to_string(32 * 65536 * kKeyBytes));
}

// The GPUs' kernels merge the results of this many ranks; a plan says it, on any machine.
TEST(PlanDecode, RefusesMoreRanksThanAKernelMerges) {
  const Words job{"plan", "--op", "decode", "--seq", "1m", "--heads", "8", "--kv-heads", "2", "--dtype", "bf16"};
  const Finished known = tool(job + Words{"--backend", "cuda", "--world", "2"});
  if (known.code == 4) GTEST_SKIP() << "this build has no cuda kernels";
  ASSERT_EQ(known.code, 0) << known.err;
  const Finished refused = tool(job + Words{"--backend", "cuda", "--world", "300"});
  EXPECT_EQ(refused.code, 4) << refused.out;
  EXPECT_TRUE(has(refused.err, "a decode step whose keys are dealt to 300 ranks")) << refused.err;
}

}  // namespace
}  // namespace ringattn::testing
