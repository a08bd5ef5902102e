// SPDX-License-Identifier: Apache-2.0
// `ringattn bench`: what it measures, writes, compares and refuses. Figures themselves are not asserted: a machine may
// be busy.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <regex>
#include <sstream>

#include "base/error.hpp"
#include "base/json_writer.hpp"
#include "comm/self.hpp"
#include "launch/bench_points.hpp"
#include "launch/bench_quick.hpp"
#include "launch/bench_table.hpp"
#include "launch/command_line.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/scoped_environment.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Words bench(const Words& flags) {
  return Words{"bench", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--samples", "2"} + flags;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

BenchJob job_of(std::int64_t tokens, std::int64_t batch, std::int64_t heads, std::int64_t kv_heads, std::int64_t dim,
                std::int64_t dim_v, const std::string& dtype, const std::string& mask, const std::string& source) {
  return {"attention",
          BenchKind::kRing,
          tokens,
          tokens / batch,
          batch,
          {{"heads", heads},
           {"kv_heads", kv_heads},
           {"head_dim", dim},
           {"head_dim_v", dim_v},
           {"dtype", dtype},
           {"mask", mask}},
          source};
}

// A line of someone's at the job of bench({"--seq", seq}), with the given figures.
std::string line(int seq, double milliseconds, const std::string& tool, const std::string& device = "") {
  BenchPoint point;
  point.tool = tool;
  point.devices = {device};
  point.world = 1;
  point.transport = "self";
  point.kernel = tool == "ringattn" ? "cpu_attention" : "its kernel";
  point.job = job_of(seq, 1, 4, 2, 16, 16, "bf16", "causal", "");
  point.layout = "striped";
  point.samples = 10;
  point.ms = {milliseconds, milliseconds, milliseconds};
  point.tflops_per_rank = 2.0 * seq * (seq + 1) / 2 * 4 * 32 / milliseconds * 1e-9;
  JsonWriter json(false);
  write_point(json, point, {});
  return json.text() + "\n";
}

TEST(BenchPoints, ALineIsReadBackAsItWas) {
  const TemporaryFolder folder;
  BenchPoint point;
  point.git = "abc-dirty";
  point.host = "node \"1\"";
  point.devices = {"NVIDIA H200 (sm_90)", "NVIDIA H200 (sm_90)"};
  point.world = 2;
  point.transport = "p2p";
  point.kernel = "sm80_attention";
  point.mode = kComputeMode;
  point.job = job_of(8192, 2, 32, 8, 192, 128, "fp16", "window 1023,0, softcap 50", "in.safetensors");
  point.layout = "zigzag";
  point.stripe = 128;
  point.block = 4096;
  point.blocks = 2;
  point.overlap = false;
  point.samples = 12;
  point.ms = {1.5, 1.25, 2.0};
  point.tflops_per_rank = 345.5;
  JsonWriter json(false);
  write_point(json, point, {});
  const std::string path = folder.write("lines", "\n{\"what\": \"an older schema\"}\n" + json.text() + "\n");
  const std::vector<BenchPoint> read = read_points(path, "--against");
  ASSERT_EQ(read.size(), 1U);
  const BenchPoint& same = read.front();
  EXPECT_EQ(same.git, point.git);
  EXPECT_EQ(same.host, point.host);
  EXPECT_EQ(same.devices, point.devices);
  EXPECT_EQ(same.job, point.job);
  EXPECT_EQ(same.job.seq, 4096);
  EXPECT_EQ(same.ms.p10, 1.25);
  EXPECT_EQ(same.tflops_per_rank, 345.5);
  EXPECT_EQ(same.samples, 12);
  EXPECT_FALSE(same.overlap);
  EXPECT_EQ(pair_with_baseline(read, read).size(), 1U);
  EXPECT_EQ(who(same), "ringattn sm80_attention, p2p, compute only");
}

// Lines of schema 1 are read with today's names.
TEST(BenchPoints, OldLinesAreRead) {
  const TemporaryFolder folder;
  const std::string line =
      R"({"schema": "ringattn.bench/1", "tool": {"name": "ringattn"}, "git": "abc", "host": "h", "devices": ["d"], "world": 2,)"
      R"( "transport": "p2p", "kernel": "sm80_fold", "mode": "folds", "job": {"tokens": 8, "batch": 1, "heads": 4,)"  // old name
      R"( "kv_heads": 4, "head_dim": 64, "head_dim_v": 64, "dtype": "bf16",)"
      R"( "mask": "causal, lists of 128x128 blocks, one a KV head, 5e+07 pairs", "op": "convolution"},)"
      R"( "samples": 1, "ms": {"median": 1.0, "p10": 1.0, "p90": 1.0}, "tflops_per_rank": 1.0, "exposed_ms": 0.5,)"  // old name
      R"( "predicted_ms": 1.0, "memory_peak_bytes": 1, "memory_planned_bytes": 1})";  // old name
  const std::vector<BenchPoint> read = read_points(folder.write("lines", line + "\n"), "--against");
  ASSERT_EQ(read.size(), 1U);
  EXPECT_EQ(who(read.front()), "ringattn sm80_attention, p2p, compute only");
  EXPECT_EQ(read.front().job.op, "conv1d");
  EXPECT_TRUE(has(read.front().job.label(), "causal, block mask of 128x128 blocks, one per KV head, 5e+07 pairs"));
  const std::string untimed = std::regex_replace(line, std::regex("\"median\": 1.0"), "\"median\": 0.0");
  try {
    read_points(folder.write("lines", untimed + "\n"), "--against");
    ADD_FAILURE() << "accepted: " << untimed;
  } catch (const Error& error) {
    EXPECT_TRUE(has(error.what(), "is not a complete point (its median is 0 ms)")) << error.what();
  }
}

TEST(BenchPoints, WhatIsNoLineIsRefused) {
  const TemporaryFolder folder;
  const std::pair<std::string, const char*> cases[] = {
      {"", "holds no point"},
      {"{}\n{\"schema\": \"other/1\"}\n", "holds no point"},
      {"nonsense\n", "line 1 of"},
      {"{}\n[1]\n", "line 2 of"},
      {"{\"schema\": \"ringattn.bench/2\"}\n", "is not a complete point (key"},
      {"{\"schema\": \"ringattn.bench/2\", \"tool\": 7}\n", "is not a complete point"}};
  for (const auto& [text, expected] : cases) {
    const std::string path = folder.write("lines", text);
    try {
      read_points(path, "--against");
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFile);
      EXPECT_TRUE(has(error.what(), expected)) << error.what();
      EXPECT_TRUE(has(error.what(), "). Write one with `ringattn bench --jsonl FILE`.")) << error.what();
    }
  }
}

TEST(BenchPoints, PairsAreOfTheSameJobAndWorld) {
  const TemporaryFolder folder;
  const std::vector<BenchPoint> ours = read_points(folder.write("ours", line(64, 2.0, "ringattn")), "");
  std::vector<BenchPoint> theirs =
      read_points(folder.write("theirs", line(64, 4.0, "peer") + line(64, 1.0, "peer") + line(65, 1.0, "peer")), "");
  const std::vector<PointPair> pairs = pair_points(ours, theirs);
  ASSERT_EQ(pairs.size(), 1U) << "the last line of a peer counts";
  EXPECT_DOUBLE_EQ(pairs.front().speed(), 0.5);
  for (BenchPoint& point : theirs) point.world = 8;
  EXPECT_TRUE(pair_points(ours, theirs).empty());
  for (BenchPoint& point : theirs) point = {ours.front()};
  theirs.front().error = "no kernel";
  EXPECT_EQ(pair_points(ours, std::span(theirs).first(1)).size(), 0U);
}

TEST(Bench, EveryPointOfTheListsIsALine) {
  const Finished run = tool(bench({"--seq", "40,300", "--block", "128,256", "--ranks", "2", "--jsonl", "-"}));
  ASSERT_EQ(run.code, 0) << run.err;
  const std::vector<std::string> lines = lines_of(run.out);
  ASSERT_EQ(lines.size(), 4U) << run.out;
  EXPECT_EQ(json_at(lines[0], "/job/tokens"), "40");
  EXPECT_EQ(json_at(lines[3], "/job/tokens"), "300");
  EXPECT_EQ(json_at(lines[2], "/block"), "128");
  EXPECT_EQ(json_at(lines[2], "/blocks"), "3");
  EXPECT_EQ(json_at(lines[3], "/blocks"), "2");
  for (const std::string& text : lines) {
    EXPECT_EQ(json_at(text, "/schema"), "\"ringattn.bench/2\"");
    EXPECT_EQ(json_at(text, "/world"), "2");
    EXPECT_EQ(json_at(text, "/transport"), "\"threads\"");
    EXPECT_EQ(json_at(text, "/mode"), "\"whole\"");
    EXPECT_EQ(json_at(text, "/job/mask"), "\"causal\"");
    EXPECT_EQ(json_at(text, "/samples"), "2");
    EXPECT_EQ(json_at(text, "/argv/1"), "\"bench\"");
    const double median = std::stod(json_at(text, "/ms/median"));
    const double tokens = std::stod(json_at(text, "/job/tokens"));
    const double flops = 2.0 * tokens * (tokens + 1) / 2 * 4 * (16 + 16);
    EXPECT_GT(median, 0.0);
    EXPECT_LE(std::stod(json_at(text, "/ms/p10")), median);
    EXPECT_GE(std::stod(json_at(text, "/ms/p90")), median);
    EXPECT_NEAR(std::stod(json_at(text, "/tflops_per_rank")) * median * 2 / (flops * 1e-9), 1.0, 1e-6);
    for (const char* member :
         {"/exposed_comm_ms", "/estimated_ms", "/memory_peak_bytes", "/git", "/host", "/devices/1"}) {
      EXPECT_NE(json_at(text, member), "absent") << member;
    }
  }
  EXPECT_TRUE(has(run.err, "GFLOP/s")) << "the table goes to stderr: " << run.err;
}

TEST(Bench, TakesTenSamplesAndMoreWhereRunsAreShort) {
  const Finished run =
      tool({"bench", "--seq", "64", "--heads", "1", "--kv-heads", "1", "--head-dim", "8", "--jsonl", "-"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_GE(std::stoi(json_at(run.out, "/samples")), 10);
}

TEST(Bench, ShortSequencesAreBatched) {
  const Finished run = tool(bench({"--seq", "30,50,200", "--total-tokens", "100", "--jsonl", "-"}));
  ASSERT_EQ(run.code, 0) << run.err;
  const std::vector<std::string> lines = lines_of(run.out);
  ASSERT_EQ(lines.size(), 3U);
  const char* expected[] = {"3", "2", "1"};
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(json_at(lines[i], "/job/batch"), expected[i]);
  EXPECT_EQ(json_at(lines[0], "/job/tokens"), "90");
  EXPECT_EQ(json_at(lines[0], "/job/seq"), "30");
}

TEST(Bench, ComputeOnlyWaitsForNothing) {
  const Finished run =
      tool(bench({"--seq", "500", "--block", "128", "--ranks", "3", "--against", "compute", "--jsonl", "-"}));
  ASSERT_EQ(run.code, 0) << run.err;
  const std::vector<std::string> lines = lines_of(run.out);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(json_at(lines[0], "/mode"), "\"whole\"");
  EXPECT_EQ(json_at(lines[1], "/mode"), "\"compute\"");
  EXPECT_TRUE(has(run.err, "compute")) << run.err;
  // On a link of 1 MB/s the whole runs wait for 64 KB and more, and compute-only runs don't use it.
  const Variables slow{{"RINGATTN_PACE", "1m"}};
  const auto exposed = [&](const Words& flags) {
    const Finished paced = tool(bench({"--seq", "500", "--ranks", "2", "--jsonl", "-"}) + flags, slow);
    EXPECT_EQ(paced.code, 0) << paced.err;
    return std::stod(json_at(paced.out, "/exposed_comm_ms"));
  };
  EXPECT_GT(exposed({}), 10.0);
  EXPECT_LT(exposed({"--compute-only"}), 10.0);
}

TEST(Bench, LinesOfOthersStandBeside) {
  const TemporaryFolder folder;
  const std::string peers = folder.write("peers", line(64, 1e9, "slow peer") + line(64, 1e-6, "fast peer"));
  const Finished run = tool(bench({"--seq", "64", "--against", peers, "--json", "-"}));
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(json_at(run.out, "/against/0/they"), "\"fast peer its kernel\"");
  EXPECT_LT(std::stod(json_at(run.out, "/against/0/ratio")), 1.0);
  EXPECT_EQ(json_at(run.out, "/against/1/they"), "\"slow peer its kernel\"");
  EXPECT_GT(std::stod(json_at(run.out, "/against/1/ratio")), 1.0);
  EXPECT_EQ(json_at(run.out, "/points/0/job/tokens"), "64");
  EXPECT_TRUE(has(run.err, "ours/theirs")) << run.err;

  const Finished other = tool(bench({"--seq", "65", "--against", peers}));
  EXPECT_EQ(other.code, 3);
  EXPECT_TRUE(has(other.err, "has no point to compare with")) << other.err;
}

TEST(Bench, TheBaselineIsAGate) {
  const TemporaryFolder folder;
  const Finished here = tool(bench({"--seq", "64", "--jsonl", "-"}));
  const std::string named = json_at(here.out, "/devices/0");
  const std::string device = named.substr(1, named.size() - 2);
  const std::string fast = folder.write("fast", line(64, 1e-6, "ringattn", device));
  const std::string slow = folder.write("slow", line(64, 1e9, "ringattn", device));
  const Finished slower = tool(bench({"--seq", "64", "--baseline", fast}));
  EXPECT_EQ(slower.code, 1) << slower.err;
  EXPECT_TRUE(has(slower.out, "slower: 64 tokens")) << slower.out;
  EXPECT_TRUE(has(slower.out, "FAIL")) << slower.out;
  const Finished faster = tool(bench({"--seq", "64", "--baseline", slow, "--fail-above", "0"}));
  EXPECT_EQ(faster.code, 0) << faster.err;
  EXPECT_TRUE(has(faster.out, "PASS: 1 point,")) << faster.out;
  const std::string elsewhere = folder.write("elsewhere", line(64, 1e9, "ringattn", "another machine"));
  const Finished refused = tool(bench({"--seq", "64", "--baseline", elsewhere}));
  EXPECT_EQ(refused.code, 4);
  EXPECT_TRUE(has(refused.err, "was measured on another machine")) << refused.err;
  EXPECT_EQ(tool(bench({"--seq", "64", "--baseline", slow, "--block", "128"})).code, 3) << "another block size";
  EXPECT_EQ(tool(bench({"--seq", "64", "--baseline", slow, "--cache-format", "fp8"})).code, 3) << "keys of 8 bits";

  // A point that no longer fits doesn't slip through.
  constexpr std::int64_t kMany = std::int64_t{64} << 20;
  const std::string both =
      folder.write("both", line(64, 1e9, "ringattn", device) + line(kMany, 1e9, "ringattn", device));
  const Words sweep = bench({"--seq", "64,64m", "--memory", "50m"});
  const Finished missing = tool(sweep + Words{"--baseline", both});
  EXPECT_EQ(missing.code, 1) << missing.err;
  EXPECT_TRUE(has(missing.out, "not measured: 67108864 tokens")) << missing.out;
  EXPECT_TRUE(has(missing.out, "FAIL: 0 of 1 point slower")) << missing.out;
  EXPECT_EQ(tool(sweep + Words{"--baseline", slow}).code, 0) << "the baseline doesn't have it either";
}

TEST(Bench, AJobThatDoesNotFitIsAnAnswerInASweepAndAFailureAlone) {
  const Words sweep = bench({"--seq", "64,64m", "--memory", "50m", "--jsonl", "-"});
  const Finished run = tool(sweep);
  ASSERT_EQ(run.code, 0) << run.err;
  const std::vector<std::string> lines = lines_of(run.out);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(json_at(lines[0], "/error"), "absent");
  EXPECT_EQ(json_at(lines[1], "/ms"), "null");
  EXPECT_TRUE(has(json_at(lines[1], "/error"), "memory budget")) << lines[1];
  EXPECT_EQ(tool(bench({"--seq", "64m", "--memory", "50m"})).code, 5);
  EXPECT_EQ(tool(bench({"--seq", "64m,32m", "--memory", "50m"})).code, 5);
}

TEST(Bench, ContradictionsAreUsageErrors) {
  const std::pair<Words, const char*> cases[] = {
      {{"--batch", "2", "--total-tokens", "100"}, "each says how many sequences there are"},
      {{"--input", "a", "--total-tokens", "100"}, "the file's header gives the shape"},
      {{"--compute-only", "--against", "compute"}, "no whole run to compare with"},
      {{"--json", "-", "--jsonl", "-"}, "both go to stdout"},
      {{"--seq", "8k-2m"}, "--seq is"},
      {{"--fail-above", "-1"}, "percent such as 5%"},
      {{"--fail-above", "5"}, "--fail-above needs --baseline"},
      {{"--quiet", "--verbose"}, "--quiet contradicts --verbose"},
      {{"--samples", "0"}, "--samples is"},
      {{"--output", "x"}, "--output is \"x\" (it takes table, md, csv or jsonl)"},
      {{"--output", "csv", "--jsonl", "-"}, "--jsonl and --output both go to stdout"}};
  for (const auto& [words, expected] : cases) {
    const Finished run = tool(Words{"bench"} + words);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
    EXPECT_TRUE(has(run.err, expected)) << run.err;
  }
}

TEST(Tables, CellsOfAnyTextAreQuoted) {
  Table table({{"name"}, {"time", "(ms)"}});
  table.add({"a,b", "1.5"});
  table.add({"a \"b\"\nc|d", std::string(Table::kNoValue)});
  EXPECT_EQ(table.csv(), "name,time (ms)\r\n\"a,b\",1.5\r\n\"a \"\"b\"\"\nc|d\",\r\n");
  EXPECT_TRUE(table.markdown().starts_with("|")) << table.markdown();
  EXPECT_TRUE(has(table.markdown(), "c\\|d |         - |\n")) << table.markdown();
}

TEST(Bench, StdoutHasThePointsAsAskedFor) {
  const Words sweep = bench({"--seq", "40,64m", "--memory", "50m", "--output"});
  const Finished csv = tool(sweep + Words{"csv"});
  ASSERT_EQ(csv.code, 0) << csv.err;
  const std::vector<std::string> rows = lines_of(csv.out);
  ASSERT_EQ(rows.size(), 3U) << csv.out;
  EXPECT_TRUE(rows[0].starts_with("tokens,seqs,block,mode,samples,median (ms),p10 (ms),p90 (ms),GFLOP/s per rank,"));
  EXPECT_TRUE(rows[1].starts_with("40,1,auto,whole,2,")) << rows[1];
  EXPECT_EQ(rows[2], "67108864,1,auto,whole,0,,,,,,,\r");
  EXPECT_TRUE(has(csv.err, "# kernel: cpu_attention")) << csv.err;
  EXPECT_TRUE(has(csv.err, "memory budget")) << csv.err;

  const std::vector<std::string> lines = lines_of(tool(sweep + Words{"jsonl"}).out);
  ASSERT_EQ(lines.size(), 2U);
  for (const std::string& line : lines) EXPECT_EQ(json_at(line, "/schema"), "\"ringattn.bench/2\"");

  // Each kind of job has its columns.
  for (const char* op : {"attention", "decode", "rope"}) {
    const Words job{"bench", "--op", op, "--seq", "32", "--heads", "4", "--samples", "1", "--quiet"};
    const Finished table = tool(job + Words{"--output", "md"});
    ASSERT_EQ(table.code, 0) << table.err;
    const std::vector<std::string> all = lines_of(table.out);
    ASSERT_EQ(all.size(), 3U) << table.out;
    for (const std::string& line : all) {
      EXPECT_TRUE(line.starts_with("| ") && line.ends_with(" |")) << line;
      EXPECT_EQ(std::count(line.begin(), line.end(), '|'), std::count(all[0].begin(), all[0].end(), '|')) << line;
    }
    EXPECT_EQ(all[1].find_first_not_of("|-: "), std::string::npos) << all[1];
  }

  const TemporaryFolder folder;
  const std::string kept = folder.file("lines");
  EXPECT_EQ(lines_of(tool(bench({"--seq", "40", "--output", "csv", "--jsonl", kept})).out).size(), 2U);
  EXPECT_EQ(lines_of(read_whole(kept)).size(), 1U);
  EXPECT_EQ(tool(bench({"--seq", "64m", "--memory", "50m", "--output", "csv"})).out, "") << "nothing is half written";
}

// `bench --quick` in this process, with less time.
std::string quick(const Words& flags) {
  Invocation invocation;
  invocation.arguments = {"ringattn", "bench", "--quick"};
  invocation.config = load_config(kBench, split_command_line(kBench, "bench", Words{"--quick"} + flags).flags);
  ReportFile report(invocation.config.options);
  invocation.report_file = &report;
  const std::unique_ptr<Transport> world = make_self_transport();
  ::testing::internal::CaptureStdout();
  try {
    EXPECT_EQ(bench_quick(invocation, *world, 0.01), 0);
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();
  }
  return ::testing::internal::GetCapturedStdout();
}

// A python3 that says `about`, and answers each job with `answer`.
std::string path_with_python(const TemporaryFolder& folder, const std::string& about, const std::string& answer) {
  const std::string script =
      folder.write("python3", "#!/bin/sh\necho '" + about + "'\nwhile read -r job; do echo '" + answer + "'; done\n");
  EXPECT_EQ(::chmod(script.c_str(), 0700), 0);
  return folder.path();
}

TEST(Bench, QuickHasPyTorchBeside) {
  const TemporaryFolder folder;
  const std::string answer = R"({"tool":"pytorch sdpa","samples":3,"ms":{"median":1e6,"p10":9e5,"p90":2e6}})";
  {
    const ScopedEnvironment path("PATH", path_with_python(folder, R"({"version":"9.9"})", answer));
    const std::vector<std::string> rows = lines_of(quick({"--output", "csv"}));
    ASSERT_EQ(rows.size(), 2U);
    EXPECT_EQ(rows[0],
              "op,job,tokens,seqs,ringattn (ms),PyTorch (ms),ringattn (rate),PyTorch (rate),rate,"
              "ours/theirs (speed)\r");
    EXPECT_TRUE(rows[1].starts_with("attention,d128-h32/8-causal,256,1,")) << rows[1];
    EXPECT_TRUE(has(rows[1], ",1000000.000,")) << rows[1];

    const std::vector<std::string> lines = lines_of(quick({"--output", "jsonl"}));
    ASSERT_EQ(lines.size(), 2U);
    EXPECT_EQ(json_at(lines[0], "/argv/2"), "\"--heads\"") << "the job's own command";
    EXPECT_EQ(json_at(lines[1], "/tool/name"), "\"pytorch sdpa\"");
    EXPECT_EQ(json_at(lines[1], "/tool/version"), "\"9.9\"");
    EXPECT_EQ(json_at(lines[1], "/job"), json_at(lines[0], "/job"));
    EXPECT_EQ(json_at(lines[1], "/memory_peak_bytes"), "null");
    const auto product = [](const std::string& line) {
      return std::stod(json_at(line, "/ms/median")) * std::stod(json_at(line, "/tflops_per_rank"));
    };
    EXPECT_NEAR(product(lines[1]) / product(lines[0]), 1.0, 1e-6);
  }
  const ScopedEnvironment path("PATH", path_with_python(folder, R"({"error":"no torch"})", answer));
  const std::string text = quick({});
  EXPECT_TRUE(has(text, "# PyTorch is not measured (no torch)\n")) << text;
  EXPECT_TRUE(has(text, "(ms)  (no torch)")) << text;
  const ScopedEnvironment other("PATH", path_with_python(folder, R"({"version":9})", answer));
  const std::string number = quick({});
  EXPECT_TRUE(has(number, "# PyTorch is not measured (python3 printed something else)\n")) << number;
}

TEST(Bench, QuickChoosesItsJobs) {
  const std::pair<Words, const char*> cases[] = {
      {{"--seq", "4k"}, "--seq contradicts --quick (--quick chooses the jobs"},
      {{"--ranks", "2"}, "--ranks contradicts --quick"},
      {{"--json", "-", "--output", "md"}, "both go to stdout"}};
  for (const auto& [words, expected] : cases) {
    const Finished run = tool(Words{"bench", "--quick"} + words);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_TRUE(has(run.err, expected)) << run.err;
  }
}

TEST(Bench, FilesAreNotReplacedUnasked) {
  const TemporaryFolder folder;
  const std::string kept = folder.write("kept", line(64, 1.0, "ringattn"));
  const std::string before = read_whole(kept);
  EXPECT_EQ(tool(bench({"--seq", "64", "--jsonl", kept})).code, 3);
  EXPECT_EQ(tool(bench({"--seq", "64", "--jsonl", kept, "--baseline", kept, "--force"})).code, 2) << "read and written";
  EXPECT_EQ(read_whole(kept), before);
  EXPECT_EQ(tool(bench({"--seq", "64", "--jsonl", kept, "--force"})).code, 0);
  EXPECT_EQ(lines_of(read_whole(kept)).size(), 1U);
  EXPECT_NE(read_whole(kept), before);
  EXPECT_EQ(tool(bench({"--seq", "64", "--jsonl", folder.file("none"), "--dry-run"})).code, 0);
  EXPECT_EQ(folder.entries().size(), 1U) << "a dry run writes nothing";
}

TEST(Bench, SgemmIsMeasuredOrSaysWhyNot) {
  const Finished run = tool(bench({"--seq", "64", "--against", "sgemm", "--threads", "1"}));
  if (run.code == 4) {
    EXPECT_TRUE(has(run.err, "SGEMM can't be measured (no BLAS is installed")) << run.err;
  } else {
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_TRUE(has(run.out, "of SGEMM")) << run.out;
  }
}

}  // namespace
}  // namespace ringattn::testing
