// SPDX-License-Identifier: Apache-2.0
// Steps over a cache of latents by the program: they have the bits of the same rows of a prefill, on any number of
// ranks and with any pages.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/latent_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Words steps_job() {
  return {"--op",         "mla", "--synthetic", "7",  "--seq",      "700", "--batch",      "3",
          "--heads",      "4",   "--head-dim",  "16", "--rope-dim", "8",   "--latent-dim", "32",
          "--head-dim-v", "24",  "--q-len",     "2",  "--backend",  "cpu"};
}

TEST(LatentSteps, HaveTheBitsOfRows) {
  const Finished rows = tool(Words{"run", "--form", "absorbed"} + steps_job());
  ASSERT_EQ(rows.code, 0) << rows.err;
  for (const char* ranks : {"1", "2", "3"}) {
    for (const char* page : {"16", "64", "256"}) {
      const Finished steps = tool(Words{"run", "--page-size", page, "--ranks", ranks} + steps_job());
      ASSERT_EQ(steps.code, 0) << steps.err;
      EXPECT_TRUE(has(steps.out, fmt::format("pages of {} tokens; dealt by groups", page))) << steps.out;
      EXPECT_EQ(digest_of(steps.out), digest_of(rows.out)) << ranks << " ranks, pages of " << page;
    }
  }
  // Expanded, they are rows of a prefill, and have its bits.
  const Finished expanded = tool(Words{"run", "--page-size", "64", "--form", "expanded"} + steps_job());
  EXPECT_TRUE(has(expanded.out, "# cache: read into rows")) << expanded.out;
  EXPECT_EQ(digest_of(expanded.out), digest_of(tool(Words{"run", "--form", "expanded"} + steps_job()).out));
}

// Rows of a cache are as wide as their numbers are.
TEST(LatentSteps, OfEveryTypeHaveTheBitsOfRows) {
  for (const char* dtype : {"fp32", "fp16", "bf16"}) {
    const Words job = steps_job() + Words{"--dtype", dtype};
    const Finished rows = tool(Words{"run", "--form", "absorbed"} + job);
    const Finished steps = tool(Words{"run", "--page-size", "16"} + job);
    ASSERT_EQ(steps.code, 0) << dtype << steps.err;
    EXPECT_EQ(digest_of(steps.out), digest_of(rows.out)) << dtype;
  }
}

TEST(LatentSteps, OfFilesHaveTheBitsOfRows) {
  const TemporaryFolder folder;
  LatentFile shape;
  shape.lengths = {40, 9, 17, 65};
  shape.q_lens = {2, 2, 2, 2};
  const NamedTensors tensors = latent_tensors(shape);
  const NamedTensors in_latent = with_queries_in_latent(tensors, shape);
  const auto digest = [&](const NamedTensors& written, const Words& flags) {
    const Finished run = tool(Words{"run", "--input", write_tensors(folder.file("in"), written)} + flags);
    EXPECT_EQ(run.code, 0) << run.err;
    return std::pair(digest_of(run.out), has(run.out, "# job: decode, mla, absorbed"));
  };
  const auto expect_same = [&](const NamedTensors& paged, const NamedTensors& rows) {
    const auto [expected, decoded] = digest(rows, {"--form", "absorbed"});
    EXPECT_FALSE(decoded);
    for (const char* ranks : {"1", "3"}) {
      const auto [bits, is_step] = digest(paged, {"--ranks", ranks, "--form", "absorbed"});
      EXPECT_TRUE(is_step);
      EXPECT_EQ(bits, expected) << ranks << " ranks";
    }
  };
  expect_same(with_pages(tensors, shape), tensors);
  expect_same(with_pages(in_latent, shape), in_latent);
  expect_same(with_pages(with_codes(tensors), shape), with_rounded_codes(tensors));
  const std::string codes = write_tensors(folder.file("codes"), with_pages(with_codes(tensors), shape));
  const Finished stored = tool({"run", "--input", codes, "--form", "absorbed"});
  EXPECT_TRUE(has(stored.out, "stored as latent rope 8")) << stored.out;
  const Finished planned = tool({"plan", "--input", codes, "--form", "absorbed"});
  EXPECT_TRUE(has(planned.out, "stored as latent rope 8")) << planned.out << planned.err;
  const std::string paged = write_tensors(folder.file("paged"), with_pages(tensors, shape));
  const std::string out = folder.file("out");
  ASSERT_EQ(tool({"run", "--input", paged, "--form", "absorbed", "--output", out}).code, 0);
  EXPECT_TRUE(has(read_whole(out), R"("form":"absorbed")"));
  EXPECT_EQ(tool({"verify", "--input", paged, "--form", "absorbed", "--against", out, "--ranks", "2"}).code, 0);
  EXPECT_EQ(tool({"verify", "--input", paged, "--form", "absorbed", "--against", "oracle"}).code, 0);
  EXPECT_EQ(tool({"verify", "--input", paged, "--form", "absorbed", "--ranks", "3"}).code, 0);
}

TEST(LatentSteps, AreVerifiedMeasuredAndPlanned) {
  const Words paged{"--page-size", "64"};
  const Finished shapes = tool(Words{"verify", "--ranks", "2"} + paged + steps_job());
  EXPECT_EQ(shapes.code, 0) << shapes.out << shapes.err;
  EXPECT_TRUE(has(shapes.out, "mla, over rows")) << shapes.out;
  const Finished oracle = tool(Words{"verify", "--against", "oracle", "--ranks", "2"} + paged + steps_job());
  EXPECT_EQ(oracle.code, 0) << oracle.out << oracle.err;
  const Finished report = tool(Words{"run", "--json", "-"} + paged + steps_job());
  EXPECT_EQ(check_report(report.out), "");
  EXPECT_EQ(json_at(report.out, "/op"), "\"mla\"");
  EXPECT_EQ(json_at(report.out, "/plan/layout"), "\"groups\"");
  const Finished bench = tool({"bench", "--op",      "mla", "--seq",      "300", "--q-len",    "1", "--page-size",
                               "64",    "--heads",   "2",   "--head-dim", "16",  "--rope-dim", "8", "--latent-dim",
                               "32",    "--samples", "2",   "--backend",  "cpu", "--jsonl",    "-"});
  ASSERT_EQ(bench.code, 0) << bench.err;
  EXPECT_TRUE(has(bench.out, R"("op":"mla","keys":300,"page_size":64,"form":"absorbed")")) << bench.out;
  const Finished plan = tool({"plan", "--op", "mla", "--seq", "8k,64k", "--q-len", "1", "--page-size", "64", "--world",
                              "2", "--backend", "cpu", "--json", "-"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_EQ(json_at(plan.out, "/op"), "\"mla\"");
  EXPECT_EQ(json_at(plan.out, "/rows/1/bytes_read"), "75497472");  // each latent once
}

// verify --decode: rows of the absorbed form, decoded one by one from a cache that takes up each row's latent.
TEST(LatentSteps, OneByOneHaveThePrefillsBits) {
  const TemporaryFolder folder;
  const Words made{"--op",         "mla", "--synthetic", "7",  "--seq",      "4200", "--batch",      "2",
                   "--heads",      "4",   "--head-dim",  "16", "--rope-dim", "8",    "--latent-dim", "32",
                   "--head-dim-v", "24",  "--backend",   "cpu"};
  LatentFile shape;
  const NamedTensors tensors = latent_tensors(shape);
  const NamedTensors in_latent = with_queries_in_latent(tensors, shape);
  const std::pair<Words, const char*> jobs[] = {
      {made, " 14     PASS"},
      {made + Words{"--window", "100,0", "--dtype", "fp32"}, " 14     PASS"},
      {{"--input", write_tensors(folder.file("rows"), tensors)}, " 11     PASS"},  // 7, 0, 3 and 1
      {{"--input", write_tensors(folder.file("latent"), in_latent)}, " 11     PASS"},
      {{"--input", write_tensors(folder.file("pages"), with_pages(with_codes(tensors), shape))}, " 11     PASS"}};
  for (const auto& [job, rows] : jobs) {
    for (const char* ranks : {"1", "3"}) {
      const Finished run = tool(Words{"verify", "--decode", "--rows", "7", "--form", "absorbed", "--ranks", ranks,
                                      "--json", folder.file("report"), "--force"} +
                                job);
      ASSERT_EQ(run.code, 0) << run.out << run.err;
      for (const char* page : {"dense         -   ", "paged        16   "}) {
        EXPECT_TRUE(has(run.out, std::string(page) + rows)) << run.out;
      }
      EXPECT_EQ(check_report(read_whole(folder.file("report"))), "");
    }
  }
  const Finished expanded = tool(Words{"verify", "--decode"} + made);
  EXPECT_EQ(expanded.code, 2) << expanded.out;
  EXPECT_TRUE(has(expanded.err, "rows of the expanded form have other bits). Use --form absorbed.")) << expanded.err;
}

TEST(LatentSteps, RefuseWhatStepsDontHave) {
  const Finished layout = tool(Words{"run", "--page-size", "64", "--layout", "zigzag"} + steps_job());
  EXPECT_EQ(layout.code, 2);
  EXPECT_TRUE(has(layout.err, "--layout contradicts a cache of latents that is decoded")) << layout.err;
  const Finished rows =
      tool({"run", "--op", "mla", "--synthetic", "7", "--seq", "700", "--page-size", "64", "--q-len", "17"});
  EXPECT_EQ(rows.code, 2);
  EXPECT_TRUE(has(rows.err, "--q-len 17 with --page-size 64")) << rows.err;
  const Finished pages = tool(Words{"run", "--page-size", "48"} + steps_job());
  EXPECT_EQ(pages.code, 2) << pages.err;
}

}  // namespace
}  // namespace ringattn::testing
