// SPDX-License-Identifier: Apache-2.0
// Steps over latents by the program, in a cache of pages or in rows of which one is made: on the CPU they have the bits
// of the same rows around the ring, on any number of ranks and with any pages.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/mla_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Words steps_job() {
  return {"--op",         "mla", "--synthetic", "7",  "--seq",      "700", "--batch",      "3",
          "--heads",      "4",   "--head-dim",  "16", "--rope-dim", "8",   "--latent-dim", "32",
          "--head-dim-v", "24",  "--q-len",     "2",  "--backend",  "cpu"};
}

// What makes rows around the ring of few queries.
Words as_rows() { return {"--layout", "striped"}; }

TEST(MlaSteps, HaveTheBitsOfRows) {
  const Finished rows = tool(Words{"run", "--form", "absorbed"} + as_rows() + steps_job());
  ASSERT_EQ(rows.code, 0) << rows.err;
  EXPECT_TRUE(has(rows.out, "# layout: striped")) << rows.out;
  for (const char* ranks : {"1", "2", "3", "4", "5"}) {
    const Finished steps = tool(Words{"run", "--ranks", ranks} + steps_job());
    ASSERT_EQ(steps.code, 0) << steps.err;
    EXPECT_TRUE(has(steps.out, "# cache: dense; distributed by KV splits")) << steps.out;
    EXPECT_EQ(digest_of(steps.out), digest_of(rows.out)) << ranks << " ranks";
  }
  for (const char* ranks : {"1", "2", "3"}) {
    for (const char* page : {"16", "64", "256"}) {
      const Finished steps = tool(Words{"run", "--page-size", page, "--ranks", ranks} + steps_job());
      ASSERT_EQ(steps.code, 0) << steps.err;
      EXPECT_TRUE(has(steps.out, fmt::format("pages of {} tokens; distributed by KV splits", page))) << steps.out;
      EXPECT_EQ(digest_of(steps.out), digest_of(rows.out)) << ranks << " ranks, pages of " << page;
    }
  }
  // Expanded, they are rows of a prefill, and have its bits.
  const Finished expanded = tool(Words{"run", "--page-size", "64", "--form", "expanded"} + steps_job());
  EXPECT_TRUE(has(expanded.out, "# cache: read into rows")) << expanded.out;
  EXPECT_EQ(digest_of(expanded.out), digest_of(tool(Words{"run", "--form", "expanded"} + steps_job()).out));
}

// Rows of a cache are as wide as their numbers are.
TEST(MlaSteps, OfEveryTypeHaveTheBitsOfRows) {
  for (const char* dtype : {"fp32", "fp16", "bf16"}) {
    const Words job = steps_job() + Words{"--dtype", dtype};
    const Finished rows = tool(Words{"run", "--form", "absorbed"} + as_rows() + job);
    for (const Words& pages : {Words{}, {"--page-size", "16"}}) {
      const Finished steps = tool(Words{"run"} + pages + job);
      ASSERT_EQ(steps.code, 0) << dtype << steps.err;
      EXPECT_EQ(digest_of(steps.out), digest_of(rows.out)) << dtype;
    }
  }
}

// Latents in rows make a decode step unless rows are asked for, and a kernel decodes them.
TEST(MlaSteps, AreRowsWhereTheyAreAskedFor) {
  const std::string digest = digest_of(tool(Words{"run"} + steps_job()).out);
  for (const Words& flags : {Words{"--layout", "zigzag"}, {"--block", "128"}, {"--overlap", "off"}}) {
    const Finished rows = tool(Words{"run"} + flags + steps_job());
    ASSERT_EQ(rows.code, 0) << rows.err;
    EXPECT_TRUE(has(rows.out, "# op: mla, ring attention; a decode step takes no " + flags[0].substr(2))) << rows.out;
    EXPECT_EQ(digest_of(rows.out), digest);
    const Finished plan = tool({"plan", "--op", "mla", "--seq", "300", "--q-len", "1", flags[0], flags[1]});
    EXPECT_TRUE(has(plan.out, "ring attention; a decode step takes no " + flags[0].substr(2))) << plan.out << plan.err;
  }
  const Finished folds = tool({"bench", "--op", "mla", "--seq", "100", "--q-len", "1", "--heads", "2", "--samples", "1",
                               "--against", "compute", "--backend", "cpu"});
  EXPECT_EQ(folds.code, 0) << folds.err;
  EXPECT_TRUE(has(folds.out, "a decode step takes no --against compute")) << folds.out;
  const Finished mixed = tool({"plan", "--op", "mla", "--seq", "16,300", "--backend", "cpu"});
  EXPECT_TRUE(has(mixed.out, "ring attention; another length makes no decode step")) << mixed.out;
}

// A table has as many entries for each sequence as the longest needs.
TEST(MlaSteps, OfAllTooUnlikeLengthsAreRows) {
  const TemporaryFolder folder;
  MlaFile shape;
  shape.heads = 1;
  shape.head_dim = shape.rope_dim = shape.head_dim_v = shape.latent_dim = 8;
  shape.lengths.assign(4200, 1);
  shape.lengths.front() = 64 * 4000;
  shape.q_lens.assign(shape.lengths.size(), 1);
  const std::string input = write_tensors(folder.file("in"), mla_tensors(shape));
  const Words plan{"plan", "--input", input, "--backend", "cpu"};
  const Finished rows = tool(plan);
  EXPECT_TRUE(has(rows.out, "# op: mla, ring attention; the block table of sequences of such")) << rows.err;
}

TEST(MlaSteps, SayTheirForm) {
  for (const Words& pages : {Words{}, {"--page-size", "16"}}) {
    const Finished run = tool(Words{"run", "--json", "-"} + pages + steps_job());
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(check_report(run.out), "");
    EXPECT_EQ(json_at(run.out, "/plan/form"), "\"absorbed\"");
    EXPECT_EQ(json_at(run.out, "/plan/layout"), "\"KV splits\"");
    EXPECT_TRUE(has(run.err, "# form: absorbed (2 queries a sequence at most: absorbed up to ")) << run.err;
    const Finished plan = tool(Words{"plan", "--world", "2", "--json", "-", "--op", "mla", "--seq", "8k"} +
                               Words{"--q-len", "1", "--backend", "cpu"} + pages);
    ASSERT_EQ(plan.code, 0) << plan.err;
    EXPECT_EQ(json_at(plan.out, "/rows/0/form"), "\"absorbed\"");
    EXPECT_EQ(json_at(plan.out, "/rows/0/layout"), "\"KV splits\"");
    EXPECT_TRUE(has(plan.err, "# 8192 keys, form: absorbed (1 query a sequence at most: absorbed up to 170)"));
  }
  const Finished rows = tool({"plan", "--op", "mla", "--seq", "8k", "--world", "2", "--json", "-"});
  EXPECT_EQ(json_at(rows.out, "/rows/0/form"), "\"expanded\"");
}

TEST(MlaSteps, OfFilesHaveTheBitsOfRows) {
  const TemporaryFolder folder;
  MlaFile shape;
  shape.lengths = {40, 9, 17, 65};
  shape.q_lens = {2, 2, 2, 2};
  const NamedTensors tensors = mla_tensors(shape);
  const NamedTensors in_latent = with_queries_in_latent(tensors, shape);
  const auto digest = [&](const NamedTensors& written, const Words& flags) {
    const Finished run = tool(Words{"run", "--input", write_tensors(folder.file("in"), written)} + flags);
    EXPECT_EQ(run.code, 0) << run.err;
    return std::pair(digest_of(run.out), has(run.out, "# job: decode, mla, absorbed"));
  };
  const auto expect_same = [&](const NamedTensors& paged, const NamedTensors& rows) {
    const auto [expected, decoded] = digest(rows, as_rows() + Words{"--form", "absorbed"});
    EXPECT_FALSE(decoded);
    for (const char* ranks : {"1", "3"}) {
      for (const NamedTensors* const step : {&paged, &rows}) {
        const auto [bits, is_step] = digest(*step, {"--ranks", ranks, "--form", "absorbed"});
        EXPECT_TRUE(is_step);
        EXPECT_EQ(bits, expected) << ranks << " ranks";
      }
    }
  };
  expect_same(with_pages(tensors, shape), tensors);
  expect_same(with_pages(in_latent, shape), in_latent);
  expect_same(with_pages(with_fp8_latent(tensors), shape), with_fp8_rounded_latent(tensors));
  const std::string in_rows = write_tensors(folder.file("rows"), with_fp8_latent(tensors));
  const Finished unlike = tool({"run", "--input", in_rows, "--form", "absorbed"});
  EXPECT_TRUE(has(unlike.out, "# cache: 5 pages of 64 tokens, stored as latent rope 8")) << unlike.out;
  EXPECT_EQ(digest_of(unlike.out), digest(with_fp8_rounded_latent(tensors), {"--form", "absorbed"}).first);
  const Finished unlike_rows = tool({"run", "--input", in_rows, "--layout", "striped"});
  EXPECT_TRUE(has(unlike_rows.out, "# op: mla, ring attention; a decode step takes no layout")) << unlike_rows.out;
  EXPECT_FALSE(has(unlike_rows.out, "# cache:")) << unlike_rows.out;
  const std::string codes = write_tensors(folder.file("codes"), with_pages(with_fp8_latent(tensors), shape));
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

TEST(MlaSteps, AreVerifiedMeasuredAndPlanned) {
  const Finished dense = tool(Words{"verify", "--ranks", "3"} + steps_job());
  EXPECT_EQ(dense.code, 0) << dense.out << dense.err;
  EXPECT_TRUE(has(dense.out, "dense") && has(dense.out, "mla, over rows")) << dense.out;
  EXPECT_EQ(tool(Words{"verify", "--against", "oracle", "--ranks", "2"} + steps_job()).code, 0);
  const Words paged{"--page-size", "64"};
  const Finished shapes = tool(Words{"verify", "--ranks", "2"} + paged + steps_job());
  EXPECT_EQ(shapes.code, 0) << shapes.out << shapes.err;
  EXPECT_TRUE(has(shapes.out, "mla, over rows")) << shapes.out;
  const Finished oracle = tool(Words{"verify", "--against", "oracle", "--ranks", "2"} + paged + steps_job());
  EXPECT_EQ(oracle.code, 0) << oracle.out << oracle.err;
  const Finished report = tool(Words{"run", "--json", "-"} + paged + steps_job());
  EXPECT_EQ(check_report(report.out), "");
  EXPECT_EQ(json_at(report.out, "/op"), "\"mla\"");
  EXPECT_EQ(json_at(report.out, "/plan/layout"), "\"KV splits\"");
  const Finished bench = tool({"bench", "--op",      "mla", "--seq",      "300", "--q-len",    "1", "--page-size",
                               "64",    "--heads",   "2",   "--head-dim", "16",  "--rope-dim", "8", "--latent-dim",
                               "32",    "--samples", "2",   "--backend",  "cpu", "--jsonl",    "-"});
  ASSERT_EQ(bench.code, 0) << bench.err;
  EXPECT_TRUE(has(bench.out, R"("op":"mla")") && has(bench.out, R"("keys":300,"page_size":64,"form":"absorbed")"))
      << bench.out;
  const Finished plan = tool({"plan", "--op", "mla", "--seq", "8k,64k", "--q-len", "1", "--page-size", "64", "--world",
                              "2", "--backend", "cpu", "--json", "-"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_EQ(json_at(plan.out, "/op"), "\"mla\"");
  EXPECT_EQ(json_at(plan.out, "/rows/1/bytes_read"), "75497472");  // each latent once
}

// What a refusal names is enough, is what is planned, and is no more than is needed.
TEST(MlaSteps, NeedTheMemoryThatARefusalNames) {
  for (const char* ranks : {"1", "2"}) {
    for (const char* threads : {"1", "3"}) {
      SCOPED_TRACE(fmt::format("{} ranks, {} threads", ranks, threads));
      const auto with = [&](const std::string& memory) { return Words{"--threads", threads, "--memory", memory}; };
      const auto run = [&](const std::string& memory) {
        return tool(Words{"run", "--ranks", ranks, "--json", "-"} + steps_job() + with(memory));
      };
      const Finished refused = run("1");
      ASSERT_EQ(refused.code, 5) << refused.err;
      EXPECT_EQ(tool(Words{"plan", "--world", ranks} + steps_job() + with("1")).err, refused.err);
      const std::size_t at = refused.err.find('(') + 1;
      const std::string needed = refused.err.substr(at, refused.err.find(' ', at) - at);
      const Finished enough = run(needed);
      ASSERT_EQ(enough.code, 0) << enough.err;
      EXPECT_EQ(json_at(enough.out, "/plan/memory_per_rank"), needed);
      EXPECT_EQ(run(std::to_string(std::stoll(needed) - 1)).code, 5);
      const Finished plan = tool(Words{"plan", "--world", ranks, "--json", "-"} + steps_job() + with(needed));
      EXPECT_EQ(json_at(plan.out, "/rows/0/memory_per_rank"), needed) << plan.err;
    }
  }
}

// Kernels that only decode are known where latents are rows, and refused for what they are.
TEST(MlaSteps, AreWhatKernelsThatOnlyDecodeAreFor) {
  for (const std::string kernel : {"sm90_mla", "sm90_mla_split1k"}) {
    const Words job{"plan", "--op", "mla", "--seq", "4k", "--heads", "16", "--dtype", "bf16", "--kernel", kernel};
    if (tool(job + Words{"--q-len", "1"}).code != 0) GTEST_SKIP() << "this build has no kernels for Hopper";
    for (const Words& rows :
         {Words{"--q-len", "1", "--layout", "zigzag"}, {"--q-len", "1", "--form", "expanded"}, {"--q-len", "17"}}) {
      const Finished refused = tool(job + rows);
      EXPECT_EQ(refused.code, 4) << refused.err;
      EXPECT_TRUE(has(refused.err, "kernel " + kernel + " can't do this job (it is only for decode")) << refused.err;
    }
    // More sequences than a launch takes.
    const Finished large = tool(job + Words{"--q-len", "1", "--batch", "3000"});
    EXPECT_EQ(large.code, 0) << large.err;
  }
}

// Ranks deal the kernel's KV splits, and splits of a quarter of the keys leave four times as many partial results.
TEST(MlaSteps, InKvSplitsOfFewerKeys) {
  const Words job{"plan", "--op",    "mla",  "--seq",       "16k", "--batch", "2",   "--heads", "128", "--q-len",
                  "1",    "--dtype", "bf16", "--page-size", "64",  "--world", "1,2", "--json",  "-"};
  const auto plan = [&](const char* kernel) { return tool(job + Words{"--kernel", kernel}); };
  const Finished usual = plan("sm90_mla"), few = plan("sm90_mla_split1k");
  if (usual.code != 0) GTEST_SKIP() << "this build has no kernels for Hopper";
  ASSERT_EQ(few.code, 0) << few.err;
  EXPECT_TRUE(has(few.err, "sm90_mla_split1k")) << few.err;
  for (const auto& [row, parts] : {std::pair{"/rows/0", 1}, {"/rows/1", 2}}) {
    const auto number = [&](const Finished& of, const char* name) {
      return std::stoll(json_at(of.out, std::string(row) + name));
    };
    EXPECT_EQ(number(usual, "/stripe"), 4096);
    EXPECT_EQ(number(few, "/stripe"), 1024);
    EXPECT_EQ(number(usual, "/kv_splits"), 4);
    EXPECT_EQ(number(few, "/kv_splits"), 16);
    EXPECT_EQ(number(few, "/memory/partials"), 4 * number(usual, "/memory/partials"));
    EXPECT_EQ(number(few, "/bytes_moved"), 4 * number(usual, "/bytes_moved"));
    EXPECT_EQ(number(few, "/ranks/0/keys"), 2 * 16384 / parts);
    // Partials of a row of a head in a KV split: 512 numbers, and four of which two are used.
    EXPECT_EQ(number(few, "/memory/scratch") - number(usual, "/memory/scratch"), 2 * 12 * 128 * 516 * 4);
  }
}

// Partials are sent between ranks, and not the latents.
TEST(MlaSteps, InRowsAreMeasuredAndPlannedAsSteps) {
  const Words shape{"--op",       "mla", "--seq",      "300", "--q-len",      "1",  "--heads",   "2",
                    "--head-dim", "16",  "--rope-dim", "8",   "--latent-dim", "32", "--samples", "2",
                    "--backend",  "cpu", "--jsonl",    "-"};
  const Finished bench = tool(Words{"bench"} + shape);
  ASSERT_EQ(bench.code, 0) << bench.err;
  EXPECT_TRUE(has(bench.out, R"("op":"mla")") && has(bench.out, R"("keys":300,"page_size":0,"form":"absorbed")"))
      << bench.out;
  EXPECT_TRUE(has(bench.err, "# op: mla, a decode step, as --q-len 1 makes one")) << bench.err;
  const Finished rows = tool(Words{"bench"} + as_rows() + shape);
  EXPECT_TRUE(has(rows.out, R"("op":"mla")") && has(rows.out, R"("keys":300,"form":"absorbed")"))
      << rows.out << rows.err;
  const Words job{"--op", "mla", "--seq", "128k", "--batch", "16", "--heads", "128", "--q-len", "1", "--dtype", "bf16"};
  const auto moved = [&](const Words& flags) {
    const Finished plan = tool(Words{"plan", "--world", "2", "--json", "-"} + job + flags);
    if (plan.code == 4) return std::string();  // this build has no cuda kernels
    EXPECT_EQ(plan.code, 0) << plan.err;
    return json_at(plan.out, "/kernel") + " " + json_at(plan.out, "/rows/0/bytes_per_rank");
  };
  EXPECT_NE(moved({"--backend", "cpu"}), "");
  EXPECT_EQ(moved({"--backend", "cpu"}), moved({"--backend", "cpu", "--page-size", "64"}));
  EXPECT_EQ(moved({"--backend", "cuda"}), moved({"--backend", "cuda", "--page-size", "64"}));
}

// verify --decode: rows of the absorbed form, decoded one by one from a cache that takes up each row's latent.
TEST(MlaSteps, OneByOneHaveThePrefillsBits) {
  const TemporaryFolder folder;
  const Words made{"--op",         "mla", "--synthetic", "7",  "--seq",      "4200", "--batch",      "2",
                   "--heads",      "4",   "--head-dim",  "16", "--rope-dim", "8",    "--latent-dim", "32",
                   "--head-dim-v", "24",  "--backend",   "cpu"};
  MlaFile shape;
  const NamedTensors tensors = mla_tensors(shape);
  const NamedTensors in_latent = with_queries_in_latent(tensors, shape);
  const std::pair<Words, const char*> jobs[] = {
      {made, " 14     PASS"},
      {made + Words{"--window", "100,0", "--dtype", "fp32"}, " 14     PASS"},
      {{"--input", write_tensors(folder.file("rows"), tensors)}, " 11     PASS"},  // 7, 0, 3 and 1
      {{"--input", write_tensors(folder.file("latent"), in_latent)}, " 11     PASS"},
      {{"--input", write_tensors(folder.file("pages"), with_pages(with_fp8_latent(tensors), shape))}, " 11     PASS"}};
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

TEST(MlaSteps, RefuseWhatStepsDontHave) {
  const Finished layout = tool(Words{"run", "--page-size", "64", "--layout", "zigzag"} + steps_job());
  EXPECT_EQ(layout.code, 2);
  EXPECT_TRUE(has(layout.err, "--layout contradicts an MLA decode step")) << layout.err;
  const Finished rows =
      tool({"run", "--op", "mla", "--synthetic", "7", "--seq", "700", "--page-size", "64", "--q-len", "17"});
  EXPECT_EQ(rows.code, 2);
  EXPECT_TRUE(has(rows.err, "--q-len 17 with --page-size 64")) << rows.err;
  const Finished pages = tool(Words{"run", "--page-size", "48"} + steps_job());
  EXPECT_EQ(pages.code, 2) << pages.err;
}

}  // namespace
}  // namespace ringattn::testing
