// SPDX-License-Identifier: Apache-2.0
// `ringattn verify`, `plan` and `info` end to end.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "attention/ring/machine_model.hpp"
#include "comm/world.hpp"
#include "io/safetensors_file.hpp"
#include "kernels/common/registry.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  if (at == std::string::npos) ADD_FAILURE() << from << " is not in " << text;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

TEST(Verify, ComparesShapes) {
  const Finished run = tool(Words{"verify"} + small_job());
  ASSERT_EQ(run.code, 0) << run.out << run.err;
  EXPECT_TRUE(has(run.out, "# 26 shapes, bit for bit")) << run.out;  // 2 on one rank, and 6 for each of 4 larger worlds
  EXPECT_TRUE(has(run.out, "baseline")) << run.out;
  EXPECT_TRUE(run.out.ends_with("PASS\n")) << run.out;
  for (const char* layout : {"striped", "zigzag", "contiguous"}) EXPECT_TRUE(has(run.out, layout)) << run.out;
}

TEST(Verify, HoldsFixedWhatIsGiven) {
  const Finished run = tool(Words{"verify", "--ranks", "3", "--layout", "zigzag", "--block", "64"} + small_job());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(has(run.out, "# 3 shapes")) << run.out;
  EXPECT_FALSE(has(run.out, "contiguous")) << run.out;
}

TEST(Verify, ComparesWithAFile) {
  const TemporaryFolder folder;
  const std::string path = folder.file("out.safetensors");
  ASSERT_EQ(tool(Words{"run", "--output", path} + small_job()).code, 0);
  const Finished same = tool(Words{"verify", "--ranks", "3", "--against", path} + small_job());
  EXPECT_EQ(same.code, 0) << same.out << same.err;
  EXPECT_TRUE(same.out.ends_with("PASS\n")) << same.out;

  // One bit of the last element: the lse of the last token and head (fp32 tensors lie in the order out, lse or lse,
  // out).
  std::string bytes = read_whole(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  folder.write("out.safetensors", bytes);
  const TemporaryFolder reports;
  const Finished other =
      tool(Words{"verify", "--ranks", "2", "--against", path, "--json", reports.file("r")} + small_job());
  EXPECT_EQ(other.code, 1) << other.out << other.err;
  EXPECT_TRUE(has(other.out, "first difference: ")) << other.out;
  EXPECT_TRUE(has(other.out, "sequence 0, token 299, head 3")) << other.out;
  EXPECT_TRUE(has(other.out, "(0x")) << other.out;
  EXPECT_TRUE(has(other.out, "ulp apart")) << other.out;
  EXPECT_TRUE(other.out.ends_with("FAIL\n")) << other.out;
  EXPECT_EQ(count_messages(other.err), 0) << other.err;
  EXPECT_EQ(check_report(read_whole(reports.file("r"))), "");
  EXPECT_EQ(json_at(read_whole(reports.file("r")), "/verdict"), "\"fail\"");

  const Finished shape = tool(Words{"verify", "--against", path, "--synthetic", "7", "--seq", "200"});
  EXPECT_EQ(shape.code, 3) << shape.err;
  EXPECT_EQ(tool(Words{"verify", "--against", folder.file("none")} + small_job()).code, 3);
  const Finished system = tool(Words{"verify", "--against", "torch"} + small_job());
  EXPECT_EQ(system.code, 3);
  EXPECT_TRUE(has(system.err, "To check another system, save its out and use --peer FILE.")) << system.err;
  // Before anything is computed.
  EXPECT_EQ(tool(Words{"verify", "--dry-run", "--against", folder.file("none")} + small_job()).code, 3);
  const std::string input = folder.write("in.safetensors", safetensors_bytes(FileShape()));
  const Finished no_output = tool({"verify", "--input", input, "--against", input});
  EXPECT_EQ(no_output.code, 3) << no_output.out;
  EXPECT_TRUE(has(no_output.err, "has no tensor out")) << no_output.err;
}

TEST(Verify, ComparesWithTheOracle) {
  const Finished run = tool(Words{"verify", "--against", "oracle", "--ranks", "3"} + small_job());
  ASSERT_EQ(run.code, 0) << run.out << run.err;
  EXPECT_TRUE(has(run.out, "# 64 rows against the fp64 oracle")) << run.out;
  const Finished few = tool(Words{"verify", "--against", "oracle", "--rows", "5"} + small_job());
  EXPECT_TRUE(has(few.out, "# 5 rows against")) << few.out;
  const Finished all =
      tool({"verify", "--against", "oracle", "--rows", "1k", "--synthetic", "3", "--seq", "9", "--head-dim", "16"});
  EXPECT_EQ(all.code, 2) << all.err;  // a number of rows, not a size
  const Finished whole =
      tool({"verify", "--against", "oracle", "--rows", "1000", "--synthetic", "3", "--seq", "9", "--head-dim", "16"});
  EXPECT_TRUE(has(whole.out, "# 72 rows against")) << whole.out << whole.err;
}

// All rows of both, as the job is small, so that the first wrong one is found wherever it is.
TEST(Verify, ComparesAPeerWithFp64) {
  const TemporaryFolder folder;
  const std::string path = folder.file("out.safetensors");
  const Words job = small_job();
  ASSERT_EQ(tool(Words{"run", "--output", path} + job).code, 0);
  const Finished right = tool(Words{"verify", "--peer", path, "--ranks", "3"} + job);
  EXPECT_EQ(right.code, 0) << right.out << right.err;
  EXPECT_TRUE(has(right.out, "# 1200 rows of " + path + " against the fp64 oracle\n  theirs: out: greatest error"))
      << right.out;
  EXPECT_TRUE(has(right.out, "\n  ours: out: greatest error")) << right.out;
  EXPECT_FALSE(has(right.out, "wrong row")) << right.out;
  EXPECT_TRUE(right.out.ends_with("\nPASS\n")) << right.out;

  // The lse of the last token and head, in a file that ends with it, and its sign.
  std::string bytes = read_whole(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 0x80);
  folder.write("out.safetensors", bytes);
  const Finished wrong = tool(Words{"verify", "--peer", path, "--ranks", "2"} + job);
  EXPECT_EQ(wrong.code, 1) << wrong.out << wrong.err;
  EXPECT_TRUE(has(wrong.out, "the first wrong row of theirs: token 299, head 3")) << wrong.out;
  EXPECT_TRUE(wrong.out.ends_with("FAIL\n")) << wrong.out;
  const Finished sampled = tool(Words{"verify", "--peer", path, "--rows", "5"} + job);
  EXPECT_TRUE(has(sampled.out, "# 5 rows of ")) << sampled.out;

  // Longer than what takes about a second.
  const Words longer = {"--synthetic", "3", "--seq", "3000", "--head-dim", "16", "--heads", "1", "--kv-heads", "1"};
  const std::string long_path = folder.file("long.safetensors");
  ASSERT_EQ(tool(Words{"run", "--output", long_path} + longer).code, 0);
  const Finished part = tool(Words{"verify", "--peer", long_path} + longer);
  EXPECT_EQ(part.code, 0) << part.out << part.err;
  EXPECT_TRUE(has(part.out, "# 699 rows of ")) << part.out;
  EXPECT_TRUE(part.out.ends_with("\nPASS (699 of 3,000 rows sampled)\n")) << part.out;

  // Without an lse, nothing is said of one.
  const std::string no_lse = folder.file("no_lse.safetensors");
  NamedTensors out_alone;
  {
    const SafetensorsFile whole(long_path);
    const TensorSource out = whole.tensor("out");
    NamedTensor& copy = out_alone["out"];
    copy = {out.info->dtype, out.info->shape, std::vector<std::byte>(static_cast<std::size_t>(out.info->bytes()))};
    out.shard->read(*out.info, 0, copy.bytes);
  }
  write_tensors(no_lse, out_alone);
  const Finished alone = tool(Words{"verify", "--peer", no_lse, "--rows", "5"} + longer);
  EXPECT_EQ(alone.code, 0) << alone.out << alone.err;
  EXPECT_FALSE(has(alone.out, "lse: greatest")) << alone.out;
  EXPECT_TRUE(has(alone.out, "theirs has no lse: only out is compared\nPASS (5 of 3,000 rows sampled)\n")) << alone.out;

  const std::string input = folder.write("in.safetensors", safetensors_bytes(FileShape()));
  const Finished no_output = tool({"verify", "--input", input, "--peer", input});
  EXPECT_EQ(no_output.code, 3) << no_output.out;
  EXPECT_TRUE(has(no_output.err, "--peer takes a file with another system's out")) << no_output.err;
  EXPECT_EQ(tool(Words{"verify", "--peer", path, "--against", "oracle"} + small_job()).code, 2);
  const Finished scan = tool({"verify", "--op", "ssd", "--synthetic", "1", "--seq", "100", "--peer", path});
  EXPECT_EQ(scan.code, 2) << scan.out << scan.err;
  EXPECT_TRUE(has(scan.err, "--peer is not for ssd")) << scan.err;
}

TEST(Verify, ReportsTheComparisonWithTheOracle) {
  const auto report = [](const Words& flags) {
    const Finished run = tool(Words{"verify", "--against", "oracle", "--json", "-"} + flags);
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(check_report(run.out), "");
    return std::make_pair(run.out, run.err);
  };
  const auto [text, printed] = report(Words{"--rows", "40", "--ranks", "2"} + small_job());
  EXPECT_EQ(json_at(text, "/verdict"), "\"pass\"");
  EXPECT_EQ(json_at(text, "/accuracy/rows"), "40");
  EXPECT_EQ(json_at(text, "/accuracy/misplaced"), "0");
  for (const std::string tensor : {"/accuracy/out", "/accuracy/lse"}) {
    const auto number = [&, text = text](const char* member) { return std::stod(json_at(text, tensor + member)); };
    EXPECT_GT(number("/greatest_error"), 0.0) << tensor;  // of fp32
    EXPECT_LE(number("/greatest_error"), number("/allowed")) << tensor;
    EXPECT_LT(number("/token"), 300.0) << tensor;
    EXPECT_LT(number("/head"), 4.0) << tensor;
  }
  EXPECT_TRUE(has(printed, "at token " + json_at(text, "/accuracy/out/token") + ", head " +
                               json_at(text, "/accuracy/out/head") + "; allowed"))
      << printed;
  const auto [none, words] = report({"--synthetic", "7", "--seq", "0", "--head-dim", "16"});
  EXPECT_EQ(json_at(none, "/accuracy/rows"), "0");
  EXPECT_EQ(json_at(none, "/accuracy/out"), "null");
  EXPECT_TRUE(has(words, "the job has no rows: nothing is compared")) << words;
  EXPECT_FALSE(has(words, "greatest error")) << words;
  const Finished run = tool(Words{"run", "--json", "-"} + small_job());
  EXPECT_EQ(json_at(run.out, "/accuracy"), "null");
}

TEST(Verify, TheOracleFollowsMasksSinksAndNan) {
  const TemporaryFolder folder;
  FileShape shape;
  shape.integers = {{"cu_seqlens_q", {0, 7, 7, 40}}};
  shape.sinks = {0.5F, -1.0F, 2.0F, 0.0F};
  shape.plant_nan = true;
  const std::string input = folder.write("in.safetensors", safetensors_bytes(shape));
  for (const Words& flags :
       {Words{}, {"--mask", "full"}, {"--window", "5,0"}, {"--softcap", "3"}, {"--query-offset", "-4"}}) {
    const Finished run =
        tool(Words{"verify", "--against", "oracle", "--rows", "160", "--ranks", "2", "--input", input} + flags);
    EXPECT_EQ(run.code, 0) << run.out << run.err;
    EXPECT_TRUE(has(run.out, "# 160 rows")) << run.out;
  }
}

TEST(Verify, RecordsAndChecksGoldenFiles) {
  const TemporaryFolder folder;
  const std::string path = folder.file("golden.json");
  const Finished record = tool(Words{"verify", "--record", path} + small_job());
  ASSERT_EQ(record.code, 0) << record.err;
  const auto check = [&](const Words& flags = {}) {
    return tool(Words{"verify", "--golden", path} + (flags.empty() ? small_job() : flags));
  };
  EXPECT_EQ(check().code, 0) << check().err;
  EXPECT_EQ(tool(Words{"verify", "--golden", path, "--ranks", "3"} + small_job()).code, 0);
  EXPECT_EQ(tool(Words{"verify", "--record", path} + small_job()).code, 3);  // exists
  EXPECT_EQ(tool(Words{"verify", "--record", path, "--force"} + small_job()).code, 0);

  const std::string golden = read_whole(path);
  const std::string digest = json_at(golden, "/digest_out").substr(1, 32);
  folder.write("golden.json", replaced(golden, digest, std::string(32, '0')));
  const Finished changed = check();
  EXPECT_EQ(changed.code, 1) << changed.err;
  EXPECT_TRUE(has(changed.out, digest)) << changed.out;

  const std::string kernel = json_at(golden, "/kernel");
  folder.write("golden.json", replaced(golden, kernel, "\"other_kernel\""));
  EXPECT_EQ(check().code, 4) << check().err;
  const std::string build = json_at(golden, "/build_id");
  folder.write("golden.json", replaced(golden, build, "\"0123\""));
  EXPECT_EQ(check().code, 4) << check().err;

  folder.write("golden.json", golden);
  const Finished other_job = check({"--synthetic", "8", "--seq", "2m"});  // refused before it is computed
  EXPECT_EQ(other_job.code, 2) << other_job.err;

  for (const std::string& text :
       {std::string(), std::string("{}"), std::string("[]"), golden.substr(0, golden.size() / 2), golden + "x",
        replaced(golden, digest, "short"), replaced(golden, "\"schema\": 1", "\"schema\": 2"),
        replaced(golden, "\"kernel\"", "\"kernels\""), replaced(golden, kernel, "7"), replaced(golden, kernel, "[]")}) {
    folder.write("golden.json", text);
    const Finished bad = check();
    EXPECT_EQ(bad.code, 3) << text << bad.err;
    EXPECT_EQ(count_messages(bad.err), 1) << bad.err;
  }
}

TEST(Verify, RefusesContradictions) {
  EXPECT_EQ(tool(Words{"verify", "--against", "oracle", "--record", "x"} + small_job()).code, 2);
  EXPECT_EQ(tool(Words{"verify", "--rows", "5"} + small_job()).code, 2);
  EXPECT_EQ(tool({"verify"}).code, 2);
}

TEST(Plan, SpeaksOfThousandRanks) {
  const Finished run = tool({"plan", "--world", "1024", "--seq", "256k", "--json", "-"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(json_at(run.out, "/rows/0/world"), "1024");
  EXPECT_NE(json_at(run.out, "/rows/0/ranks/1023/queries"), "absent");
  EXPECT_EQ(json_at(run.out, "/rows/0/ranks/1024"), "absent");
  EXPECT_LT(std::stod(json_at(run.out, "/rows/0/balance")), 1.1);
  EXPECT_TRUE(has(run.err, "… 1024 ranks in all")) << run.err;
}

TEST(Plan, SaysWhoOwnsWhat) {
  const Finished run = tool({"plan", "--world", "4", "--seq", "16k"});
  ASSERT_EQ(run.code, 0) << run.err;
  for (const char* part : {"# rank 3 owns 4096 queries, 4096 keys", "# machine: default",
                           "# note: estimated for a default machine description", "# block", "balance", "16384"}) {
    EXPECT_TRUE(has(run.out, part)) << part << "\n" << run.out;
  }
  const Finished list = tool({"plan", "--world", "2,4", "--seq", "8k-32k*2", "--quiet"});
  EXPECT_EQ(std::count(list.out.begin(), list.out.end(), '\n'), 6) << list.out;
}

TEST(Plan, KeepsTheMemoryBudgetOrSaysWhatDoesNotFit) {
  const Finished refused = tool({"plan", "--world", "2", "--seq", "1m", "--memory", "16m"});
  EXPECT_EQ(refused.code, 5) << refused.err;
  EXPECT_EQ(count_messages(refused.err), 1) << refused.err;
  const Finished list = tool({"plan", "--world", "2,1k", "--seq", "256k", "--memory", "64m"});
  EXPECT_EQ(list.code, 0) << list.err;
  EXPECT_TRUE(has(list.out, "# world 2, 262144 tokens: ")) << list.out;
}

// More than 512 packed key tiles, of 128 KiB each, are more than CPU kernels reserve memory for: they are packed for
// some heads at a time, or in part if they are one head's.
TEST(Plan, PackedTilesBeyondTheirMemoryHaveTheSameBits) {
  for (const Words& job : {Words{"--seq", "2200", "--heads", "16", "--window", "300,0"},
                           Words{"--seq", "33000", "--heads", "1", "--window", "90,0"}}) {
    std::set<std::string> digests;
    for (const auto& [ranks, threads] : {std::pair{"1", "3"}, {"3", "1"}}) {
      const Finished run = tool(Words{"run", "--synthetic", "5", "--head-dim", "256", "--kv-heads", job[3], "--dtype",
                                      "fp32", "--ranks", ranks, "--threads", threads} +
                                job);
      ASSERT_EQ(run.code, 0) << run.err;
      digests.insert(digest_of(run.out));
    }
    EXPECT_EQ(digests.size(), 1U) << job[1];
  }
}

TEST(Plan, RefusesWhatARunRefuses) {
  const Finished self = tool({"plan", "--world", "1,4", "--transport", "self"});
  EXPECT_EQ(self.code, 2) << self.out;
  EXPECT_TRUE(has(self.err, "--transport self contradicts --world 4")) << self.err;
  EXPECT_EQ(tool({"plan", "--world", "1", "--transport", "self"}).code, 0);
  EXPECT_EQ(tool({"plan", "--checksum"}).code, 0);
  if (tool({"plan", "--backend", "cuda"}).code != 0) GTEST_SKIP() << "this build has no CUDA";
  const Finished device = tool({"plan", "--backend", "cuda", "--checksum"});
  EXPECT_EQ(device.code, 4) << device.out;
  EXPECT_TRUE(has(device.err, "checksums of device memory are not computed")) << device.err;
}

// Tables of such jobs would take minutes, or all memory, before anyone could say that they fit nowhere.
TEST(Plan, RefusesJobsBeyondAllMachinesAtOnce) {
  for (const Words& job : {Words{"--seq", "1g"}, Words{"--seq", "1024g"}, Words{"--world", "1m", "--seq", "1m"},
                           Words{"--seq", "300", "--batch", "1048576"}}) {
    const Finished run = tool(Words{"plan"} + job);
    EXPECT_EQ(run.code, 5) << run.out << run.err;
    EXPECT_TRUE(has(run.err, "a plan holds at most")) << run.err;
  }
  EXPECT_EQ(tool({"plan", "--seq", "300", "--batch", "16777216"}).code, 2);  // more sequences than any job may have
  EXPECT_EQ(tool({"run", "--seq", "1024g", "--synthetic", "1", "--ranks", "4"}).code, 5);
  EXPECT_EQ(tool({"verify", "--seq", "1024g", "--synthetic", "1"}).code, 5);
}

TEST(Plan, ReadsMachineModels) {
  const TemporaryFolder folder;
  const std::string fast = folder.write("fast.toml",
                                        "name = \"fast\"\nflops_per_second = 6e14\nlink_bytes_per_second = "
                                        "3e11\nlatency_seconds = 1e-5\n");
  const Finished run = tool({"plan", "--world", "8", "--seq", "1m", "--threads", "2", "--machine", fast});
  // The job is longer than the one that machines are measured with, so it has a little more than their rate.
  const std::string machine = "# machine: fast; ";
  ASSERT_TRUE(has(run.out, machine)) << run.out << run.err;
  EXPECT_NEAR(std::stod(run.out.substr(run.out.find(machine) + machine.size())), 6e5, 0.02 * 6e5) << run.out;
  EXPECT_TRUE(has(run.out, " GFLOP/s and 300 GB/s a rank, latency 10 us")) << run.out;
  EXPECT_FALSE(has(run.out, "default machine description")) << run.out;
  EXPECT_TRUE(has(tool({"plan", "--op", "ssd", "--seq", "1m"}).out, "# note: estimated for a default machine"));
  for (const char* text : {"", "{}", "{\"flops_per_second\": -1}", "{\"flops\": 1}"}) {
    const Finished bad = tool({"plan", "--machine", folder.write("bad.json", text)});
    EXPECT_EQ(bad.code, 3) << text << bad.err;
  }
}

TEST(Plan, RefusesATransportThatTheKernelCanNotUse) {
  EXPECT_EQ(tool({"plan", "--backend", "cpu", "--transport", "threads"}).code, 0);
  for (const TransportRow& row : transport_table()) {
    if (row.memory != "device") continue;
    const Finished run = tool({"plan", "--backend", "cpu", "--transport", std::string(row.name)});
    EXPECT_EQ(run.code, 2) << row.name;
    EXPECT_TRUE(has(run.err, "contradicts kernel cpu_attention (one moves device memory")) << run.err;
    EXPECT_EQ(tool({"plan", "--backend", "cuda", "--transport", std::string(row.name)}).code, 0) << row.name;
    EXPECT_EQ(tool({"plan", "--backend", "cuda", "--transport", "threads"}).code, 2);
  }
}

TEST(Plan, PlansAFile) {
  const TemporaryFolder folder;
  const std::string input = folder.write("in.safetensors", safetensors_bytes({}));
  const Finished run = tool({"plan", "--world", "3", "--input", input});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(has(run.out, "fp32, heads 4/2")) << run.out;
}

TEST(Info, ShowsTablesAndReasons) {
  const Finished run = tool({"info"}, {{"RINGATTN_PACE", "100m"}});
  ASSERT_EQ(run.code, 0) << run.err;
  for (const char* part : {"kernels of each op in order of preference; mla uses those of batched_gemm", "cpu_attention",
                           "vector, FP8 latent caches", "transports", "threads",
                           "RINGATTN_PACE = \"100m\" (environment)", "RINGATTN_TEST_LONG is not set"}) {
    EXPECT_TRUE(has(run.out, part)) << part << "\n" << run.out;
  }
  EXPECT_TRUE(has(tool({"info", "--verbose"}).out, "RINGATTN_SOFTMAX_SCALE is not set"));
  const Finished json = tool({"info", "--json", "-", "--quiet"});
  EXPECT_NE(json_at(json.out, "/kernels/0/name"), "absent");
  EXPECT_NE(json_at(json.out, "/transports/0/name"), "absent");
  EXPECT_NE(json_at(json.out, "/variables/0/name"), "absent");
  EXPECT_EQ(json_at(json.out, "/machine"), "null");
}

// `info` names the op of every kernel, also of those that decode.
TEST(Info, SaysTheOpOfEveryKernel) {
  const Finished info = tool({"info", "--json", "-"});
  ASSERT_EQ(info.code, 0) << info.err;
  std::set<std::string> ops;
  for (int i = 0; json_at(info.out, fmt::format("/kernels/{}/name", i)) != "absent"; ++i) {
    ops.insert(json_at(info.out, fmt::format("/kernels/{}/op", i)));
  }
  EXPECT_EQ(ops, (std::set<std::string>{"\"attention\"", "\"attention_backward\"", "\"batched_gemm\"", "\"conv1d\"",
                                        "\"decode\"", "\"gated_delta\"", "\"linear\"", "\"rope\"", "\"ssd_backward\"",
                                        "\"ssm\"", "\"weight_gradient\""}));
  const Finished shown = tool({"info"});
  // In columns, whose widths are those of the longest names of this build.
  std::string words = shown.out;
  words.erase(std::ranges::unique(words, [](char a, char b) { return a == ' ' && b == ' '; }).begin(), words.end());
  for (const char* op : {"attention", "decode"}) {
    EXPECT_TRUE(has(words, fmt::format(" cpu_attention {} cpu runs here: yes", op))) << shown.out;
  }
}

TEST(Info, ReportsFailures) {
  const TemporaryFolder folder;
  const Finished run = tool({"info", "--measure", "--machine", folder.file("none/m.json"), "--json", "-"});
  EXPECT_EQ(run.code, 3);
  EXPECT_EQ(json_at(run.out, "/error/code"), "3") << run.out;
}

TEST(Info, RefusesAReportThatExistsBeforeItPrints) {
  const TemporaryFolder folder;
  const Finished run = tool({"info", "--json", folder.write("r.json", "mine")});
  EXPECT_EQ(run.code, 3);
  EXPECT_EQ(run.out, "");
  EXPECT_TRUE(has(run.err, "exists (it is not overwritten). Use --force to replace it.")) << run.err;
}

TEST(Info, OneRankMeasuresNoLink) {
  const TemporaryFolder folder;
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    if (!row.unavailable().empty()) continue;
    const std::string path = folder.file(std::string(row.name) + ".json");
    ASSERT_EQ(tool({"info", "--measure", "--kernel", std::string(row.name), "--machine", path}).code, 0) << row.name;
    const double link = default_machine(row, *row.make_backend({1, kNoDevice})).link_bytes_per_second;
    EXPECT_DOUBLE_EQ(std::stod(json_at(read_whole(path), "/link_bytes_per_second")), link) << row.name;
  }
}

TEST(Info, MeasuresAMachineModelThatPlanReads) {
  const TemporaryFolder folder;
  const std::string path = folder.file("machine.json");
  const Finished run = tool({"info", "--measure", "--ranks", "2", "--machine", path});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_GT(std::stod(json_at(read_whole(path), "/flops_per_second")), 1e6);
  EXPECT_GT(std::stod(json_at(read_whole(path), "/link_bytes_per_second")), 1e6);
  EXPECT_LT(std::stod(json_at(read_whole(path), "/latency_seconds")), 1.0);
  EXPECT_GT(std::stod(json_at(read_whole(path), "/fp32_flops_per_second")), 1e6);
  if (json_at(read_whole(path), "/kernel") == "\"cpu_attention\"") {
    EXPECT_GT(std::stod(json_at(read_whole(path), "/memory_bytes_per_second")), 1e6);
  }
  EXPECT_EQ(tool({"plan", "--world", "4", "--machine", path}).code, 0);
  EXPECT_EQ(tool({"info", "--measure", "--machine", path}).code, 3);  // exists
  const Finished csv = tool({"info", "--measure", "--machine", folder.file("machine.csv")});
  EXPECT_EQ(csv.code, 2) << csv.out;
  EXPECT_TRUE(has(csv.err, "End it with .json or .toml.")) << csv.err;
  EXPECT_EQ(tool({"info", "--ranks", "2"}).code, 2);  // nothing to do with ranks
}

}  // namespace
}  // namespace ringattn::testing
