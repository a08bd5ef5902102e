// SPDX-License-Identifier: Apache-2.0
// `ringattn run` end to end, as a user starts it.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/cache_files.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

TEST(Run, PrintsATableAndContextLines) {
  const Finished run = tool(Words{"run"} + small_job());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.err, "");
  EXPECT_EQ(digest_of(run.out).size(), 32U) << run.out;
  for (const char* part : {"# world: 1 rank", "# input: synthetic input, seed 7",
                           "# job: fp32, heads 4/2 (GQA 2:1), head_dim 16, causal, scale 0.25;",
                           "# kernel: ", "# layout: striped", "digest of out", "300"}) {
    EXPECT_TRUE(has(run.out, part)) << part << "\n" << run.out;
  }
  const Finished quiet = tool(Words{"run", "-q"} + small_job());
  EXPECT_EQ(quiet.out.find('#'), std::string::npos) << quiet.out;
  EXPECT_EQ(digest_of(quiet.out), digest_of(run.out));
  const Finished verbose = tool(Words{"run", "-v", "--ranks", "2"} + small_job());
  EXPECT_TRUE(has(verbose.out, "# rank 1 on ")) << verbose.out;
  EXPECT_TRUE(has(verbose.out, "# block 0: ")) << verbose.out;
}

TEST(Run, ListsWhatItDoesNotRead) {
  const TemporaryFolder folder;
  NamedTensors tensors = row_tensors({});
  tensors["other"] = tensors["a,b\xc3\xa9"] = int_list({1});
  const std::string path = write_tensors(folder.file("rows.safetensors"), tensors);
  for (const Words& command : {Words{"run"}, Words{"run", "--ranks", "2"}, Words{"plan"},
                               Words{"bench", "--samples", "1"}, Words{"verify", "--against", "oracle"},
                               Words{"compress", "--method", "fp8", "--output", folder.file("small"), "--force"}}) {
    const Finished done = tool(command + Words{"--input", path});
    EXPECT_EQ(done.code, 0) << done.err;
    EXPECT_TRUE(has(done.out, "# not read: `a,b\\xc3\\xa9`, `other`\n")) << done.out;
    EXPECT_EQ(done.out.find("# not read"), done.out.rfind("# not read")) << done.out;
  }
  const Finished named = tool({"run", "--input", path, "--tensors", "q=q"});
  EXPECT_TRUE(has(named.out, "# not read: 2 tensors\n")) << named.out << named.err;
  const Finished quiet = tool({"run", "-q", "--input", path});
  EXPECT_FALSE(has(quiet.out, "not read")) << quiet.out;
  tensors.erase("other");
  tensors.erase("a,b\xc3\xa9");
  tensors["sink"] = float_list({1, 2, 3, 4});
  write_tensors(path, tensors);
  const Finished sinks = tool({"run", "--input", path});
  EXPECT_FALSE(has(sinks.out, "not read")) << sinks.out << sinks.err;
  tensors["sinks"] = tensors.extract("sink").mapped();
  write_tensors(path, tensors);
  EXPECT_EQ(digest_of(tool({"run", "--input", path}).out), digest_of(sinks.out));
}

// However long what a file says is.
TEST(Run, RefusesInShortMessages) {
  const TemporaryFolder folder;
  const std::string path = folder.file("rows.safetensors");
  for (const char* key : {"k_format", "query_block", "page_order"}) {
    const bool pages = std::string_view(key) == "page_order";
    NamedTensors tensors = pages ? cache_tensors({}) : row_tensors({});
    tensors["block_mask"] = int_list({1});
    write_tensors(path, tensors, {{key, std::string(1 << 20, 'x')}});
    Words command{"run", "--input", path};
    if (std::string_view(key) == "query_block") command = command + Words{"--block-mask", path};
    const Finished done = tool(command);
    EXPECT_EQ(done.code, 3) << key << done.err.substr(0, 1000);
    EXPECT_TRUE(has(done.err, key)) << done.err.substr(0, 1000);
    EXPECT_LT(done.err.size(), 1000U) << key;
  }
}

TEST(Run, WritesTheSameBytesInEveryWorld) {
  const TemporaryFolder folder;
  const std::string expected = folder.file("one");
  ASSERT_EQ(tool(Words{"run", "--output", expected} + small_job()).code, 0);
  const std::string bytes = read_whole(expected);
  ASSERT_GT(bytes.size(), 300U * 4U * 16U * 4U);
  const Words worlds[] = {{"--ranks", "2"},
                          {"--ranks", "3", "--layout", "zigzag"},
                          {"--ranks", "4", "--layout", "contiguous", "--block", "64"},
                          {"--ranks", "7", "--threads", "2", "--checksum"},
                          {"--ranks", "5", "--overlap", "off", "--stripe", "16"},
                          {"--transport", "self", "--block", "16"}};
  for (const Words& world : worlds) {
    const std::string path = folder.file("many");
    const Finished run = tool(Words{"run", "--force", "--output", path} + small_job() + world);
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_TRUE(read_whole(path) == bytes) << run.out;
  }
}

TEST(Run, ReadsFilesInEveryOrderAndWritesThatOrder) {
  const TemporaryFolder folder;
  FileShape shape;
  const std::string thd = folder.write("thd.safetensors", safetensors_bytes(shape));
  ASSERT_EQ(tool({"run", "--input", thd, "--output", folder.file("a")}).code, 0);
  shape.q = {4, 40, 16};
  shape.k = shape.v = {2, 40, 16};
  const std::string htd = folder.write("htd.safetensors", safetensors_bytes(shape));
  const Finished run = tool({"run", "--input", htd, "--order", "htd", "--ranks", "3", "--output", folder.file("b")});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(has(read_whole(folder.file("a")), R"("shape":[40, 4, 16])"));
  EXPECT_TRUE(has(read_whole(folder.file("b")), R"("shape":[4, 40, 16])"));
  shape.q = {2, 20, 4, 16};
  shape.k = shape.v = {2, 20, 2, 16};
  const std::string bthd = folder.write("bthd.safetensors", safetensors_bytes(shape));
  const Finished batch = tool({"run", "--input", bthd, "--output", folder.file("c"), "--json", "-"});
  ASSERT_EQ(batch.code, 0) << batch.err;
  EXPECT_TRUE(has(batch.err, "2 sequences, 40 tokens")) << batch.err;
  EXPECT_TRUE(has(read_whole(folder.file("c")), R"("shape":[2, 4, 20])"));  // lse
}

TEST(Run, TakesPackedSequencesOffsetsAndSinks) {
  const TemporaryFolder folder;
  FileShape shape;
  shape.integers = {{"cu_seqlens_q", {0, 7, 7, 40}}};
  const std::string packed = folder.write("packed.safetensors", safetensors_bytes(shape));
  const Finished one = tool({"run", "--input", packed});
  EXPECT_TRUE(has(one.out, "3 sequences, 40 tokens")) << one.out << one.err;
  EXPECT_EQ(digest_of(tool({"run", "--input", packed, "--ranks", "4"}).out), digest_of(one.out));

  shape.sinks = {0.5F, -1.0F, 2.0F, 0.0F};
  const std::string sinks = folder.write("sinks.safetensors", safetensors_bytes(shape));
  const Finished with_sinks = tool({"run", "--input", sinks});
  EXPECT_TRUE(has(with_sinks.out, ", sinks")) << with_sinks.out;
  EXPECT_NE(digest_of(with_sinks.out), digest_of(one.out));

  shape = {};
  shape.q = {10, 4, 16};
  shape.integers = {{"q_offset", {5}}};
  const std::string offset = folder.write("offset.safetensors", safetensors_bytes(shape));
  const Finished from_file = tool({"run", "--input", offset});
  EXPECT_TRUE(has(from_file.out, "10 queries, 40 keys")) << from_file.out << from_file.err;
  const std::string at_end = digest_of(tool({"run", "--input", offset, "--query-offset", "30"}).out);
  EXPECT_NE(digest_of(from_file.out), at_end);
  shape.integers.clear();  // bottom-right: 40 − 10
  EXPECT_EQ(digest_of(tool({"run", "--input", folder.write("end.safetensors", safetensors_bytes(shape))}).out), at_end);
}

TEST(Run, SaysTheJobOfAFileInReportAndConfiguration) {
  const TemporaryFolder folder;
  const std::string input = folder.write("in.safetensors", safetensors_bytes(FileShape()));
  const Finished run = tool({"run", "--input", input, "--json", "-"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(json_at(run.out, "/job/q_tokens"), "40");
  EXPECT_EQ(json_at(run.out, "/job/heads"), "4");
  EXPECT_EQ(json_at(run.out, "/job/kv_heads"), "2");
  EXPECT_EQ(json_at(run.out, "/job/head_dim"), "16");
  const Finished printed = tool({"run", "--input", input, "--print-config"});
  EXPECT_TRUE(has(printed.out, "# heads = 4 comes from the input")) << printed.out;
  const Finished again = tool({"run", "--config", folder.write("c.toml", printed.out), "--json", "-"});
  EXPECT_EQ(json_at(again.out, "/digest/out"), json_at(run.out, "/digest/out")) << again.err;
}

TEST(Run, AcceptsNanAndSaysSo) {
  const TemporaryFolder folder;
  FileShape shape;
  shape.plant_nan = true;
  const std::string input = folder.write("nan.safetensors", safetensors_bytes(shape));
  const Finished run = tool({"run", "--input", input, "--ranks", "3", "--json", "-"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(has(run.err, "0 values of q, 0 of k and 1 of v are NaN or infinite")) << run.err;
  EXPECT_EQ(json_at(run.out, "/non_finite_inputs/v"), "1");
}

struct BadFile {
  const char* what;
  FileShape shape;
  Words flags;
  int code;
  const char* expected;
};

TEST(Run, RefusesFilesThatDoNotFit) {
  const auto changed = [](auto change) {
    FileShape shape;
    change(shape);
    return shape;
  };
  const BadFile cases[] = {
      {"heads",
       changed([](FileShape& s) {
         s.k = {40, 3, 16}, s.v = {40, 3, 16};
       }),
       {},
       3,
       "K has 3 heads, Q has 4 (4 is not a multiple of 3). Check the file's k shape [40, 3, 16]."},
      {"v heads",
       changed([](FileShape& s) {
         s.v = {40, 4, 16};
       }),
       {},
       3,
       "k has 2 heads"},
      {"v tokens",
       changed([](FileShape& s) {
         s.v = {41, 2, 16};
       }),
       {},
       3,
       "k has 40 tokens"},
      {"head_dim",
       changed([](FileShape& s) {
         s.k = {40, 2, 8};
       }),
       {},
       3,
       "q's head_dim is 16"},
      {"rank",
       changed([](FileShape& s) {
         s.q = {40, 64};
       }),
       {},
       3,
       "it must have 3 axes"},
      {"ranks differ",
       changed([](FileShape& s) {
         s.q = {1, 40, 4, 16};
       }),
       {},
       3,
       "q has 4 axes"},
      {"order", FileShape{}, {"--order", "bhtd"}, 3, "order bhtd has 4 axes"},
      {"names", changed([](FileShape& s) { s.prefix = "layer."; }), {}, 3, "`q`"},
      {"batch",
       changed([](FileShape& s) {
         s.q = {2, 20, 4, 16}, s.k = s.v = {1, 40, 2, 16};
       }),
       {},
       3,
       "q has a batch of 2"},
      {"cu and batch",
       changed([](FileShape& s) {
         s.q = {2, 20, 4, 16}, s.k = s.v = {2, 20, 2, 16};
         s.integers = {{"cu_seqlens_q", {0, 40}}};
       }),
       {},
       3,
       "has an axis for the batch"},
      {"cu end",
       changed([](FileShape& s) {
         s.integers = {{"cu_seqlens_q", {0, 39}}};
       }),
       {},
       3,
       "its last entry is 39 and q has 40 tokens"},
      {"cu start",
       changed([](FileShape& s) {
         s.integers = {{"cu_seqlens_q", {1, 40}}};
       }),
       {},
       3,
       "it starts with 1"},
      {"cu descends",
       changed([](FileShape& s) {
         s.integers = {{"cu_seqlens_q", {0, 30, 20, 40}}};
       }),
       {},
       3,
       "descends"},
      {"cu empty",
       changed([](FileShape& s) {
         s.integers = {{"cu_seqlens_q", {}}};
       }),
       {},
       3,
       "one entry for each sequence"},
      {"cu_k alone",
       changed([](FileShape& s) {
         s.integers = {{"cu_seqlens_k", {0, 40}}};
       }),
       {},
       3,
       "is given without the other"},
      {"cu_k missing",
       changed([](FileShape& s) {
         s.q = {20, 4, 16}, s.integers = {{"cu_seqlens_q", {0, 20}}};
       }),
       {},
       3,
       "is given without the other"},
      {"offsets",
       changed([](FileShape& s) {
         s.integers = {{"q_offset", {0, 1}}};
       }),
       {},
       3,
       "the job has 1 sequence"},
      {"sinks", changed([](FileShape& s) { s.sinks = {1.0F}; }), {}, 3, "q has 4 heads"},
      {"kernel",
       changed([](FileShape& s) {
         s.q = {40, 4, 12}, s.k = s.v = {40, 2, 12};
       }),
       {},
       4,
       "head_dim 12"},
  };
  for (const BadFile& bad : cases) {
    const TemporaryFolder folder;
    const std::string input = folder.write("in.safetensors", safetensors_bytes(bad.shape));
    const std::string output = folder.file("out.safetensors");
    const Finished run = tool(Words{"run", "--input", input, "--output", output, "--ranks", "2"} + bad.flags);
    EXPECT_EQ(run.code, bad.code) << bad.what << "\n" << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
    EXPECT_TRUE(has(run.err, bad.expected)) << bad.what << "\n" << run.err;
    EXPECT_EQ(run.out.find("digest"), std::string::npos) << run.out;
    EXPECT_EQ(folder.entries().size(), 1U) << bad.what;  // nothing but the input
  }
}

TEST(Run, RenamesTensors) {
  const TemporaryFolder folder;
  FileShape shape;
  const std::string plain = folder.write("plain.safetensors", safetensors_bytes(shape));
  shape.prefix = "layers.3.";
  const std::string other = folder.write("other.safetensors", safetensors_bytes(shape));
  const Finished run = tool({"run", "--input", other, "--tensors", "q=layers.3.q,k=layers.3.k,v=layers.3.v"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(digest_of(run.out), digest_of(tool({"run", "--input", plain}).out));
}

TEST(Run, KeepsWhatIsThereWithoutForce) {
  const TemporaryFolder folder;
  for (const char* flag : {"--output", "--json", "--trace"}) {
    const std::string path = folder.write("there", "precious");
    const Finished run = tool(Words{"run", flag, path} + small_job());
    EXPECT_EQ(run.code, 3) << flag << run.err;
    EXPECT_TRUE(has(run.err, "--force")) << run.err;
    EXPECT_EQ(read_whole(path), "precious");
    EXPECT_EQ(tool(Words{"run", "--force", flag, path} + small_job()).code, 0);
    EXPECT_NE(read_whole(path), "precious");
  }
  EXPECT_EQ(tool(Words{"run", "--output", folder.file("none/out")} + small_job()).code, 3);
  EXPECT_EQ(tool(Words{"run", "--json", folder.file("none/out")} + small_job()).code, 3);
  EXPECT_EQ(tool(Words{"run", "--trace", folder.path()} + small_job()).code, 3);
}

TEST(Run, ReportsWhatItDid) {
  const TemporaryFolder folder;
  const std::string path = folder.file("report.json");
  const Finished run = tool(Words{"run", "--ranks", "3", "--json", path} + small_job(), {{"OMP_DYNAMIC", "false"}});
  ASSERT_EQ(run.code, 0) << run.err;
  const std::string report = read_whole(path);
  EXPECT_EQ(check_report(report), "");
  EXPECT_EQ(json_at(report, "/world/ranks"), "3");
  EXPECT_EQ(json_at(report, "/config/seq"), "300");
  EXPECT_EQ(json_at(report, "/config/mask"), "\"causal\"");
  EXPECT_EQ(json_at(report, "/environment/OMP_DYNAMIC"), "\"false\"");
  EXPECT_EQ(json_at(report, "/environment/PATH"), "absent");
  EXPECT_EQ(json_at(report, "/digest/out"), "\"" + digest_of(run.out) + "\"");
  EXPECT_EQ(json_at(report, "/verdict"), "\"ok\"");
  EXPECT_EQ(json_at(report, "/error"), "null");
  EXPECT_EQ(json_at(report, "/samples_ms/0/2") == "absent", false);

  const Finished to_stdout = tool(Words{"run", "--json", "-"} + small_job());
  EXPECT_EQ(check_report(to_stdout.out), "");
  EXPECT_EQ(digest_of(to_stdout.err), digest_of(run.out));
}

TEST(Run, ReportsFailures) {
  const TemporaryFolder folder;
  struct Failure {
    Words words;
    int code;
  };
  const Failure failures[] = {
      {{"--synthetic", "7", "--heads", "3"}, 2},
      {{"--mask", "casual"}, 2},
      {{"--input", folder.file("none.safetensors")}, 3},
      {{"--synthetic", "7", "--head-dim", "12"}, 4},
      {{"--synthetic", "7", "--kernel", "none"}, 2},
      {{"--synthetic", "7", "--transport", "none"}, 2},
      {{"--synthetic", "7", "--seq", "1k", "--memory", "4k"}, 5},
  };
  for (const Failure& failure : failures) {
    const std::string path = folder.file("report.json");
    const Finished run = tool(Words{"run", "--ranks", "2", "--json", path} + failure.words);
    EXPECT_EQ(run.code, failure.code) << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
    const std::string report = read_whole(path);
    EXPECT_EQ(check_report(report), "") << run.err;
    EXPECT_EQ(json_at(report, "/error/code"), std::to_string(failure.code)) << report;
    EXPECT_EQ(json_at(report, "/digest"), "null");
    std::filesystem::remove(path);
  }
}

TEST(Run, TracesEveryRanksBlocks) {
  const TemporaryFolder folder;
  const std::string path = folder.file("trace.json");
  ASSERT_EQ(tool(Words{"run", "--ranks", "3", "--block", "64", "--trace", path} + small_job()).code, 0);
  const std::string trace = read_whole(path);
  EXPECT_NE(json_at(trace, "/traceEvents/0"), "absent") << trace;
  std::set<std::string> seen;
  for (int i = 0; json_at(trace, "/traceEvents/" + std::to_string(i)) != "absent"; ++i) {
    const std::string at = "/traceEvents/" + std::to_string(i);
    seen.insert(json_at(trace, at + "/ph") + json_at(trace, at + "/pid") + json_at(trace, at + "/cat"));
  }
  for (const char* event : {R"("X"0"compute")", R"("X"2"compute")", R"("X"1"wait")", R"("X"1"transfer")"}) {
    EXPECT_EQ(seen.count(event), 1U) << event;
  }
}

TEST(Run, DryRunAndPrintConfigComputeNothing) {
  const TemporaryFolder folder;
  const std::string output = folder.file("out");
  const Finished dry = tool(Words{"run", "--dry-run", "--output", output} + small_job());
  EXPECT_EQ(dry.code, 0) << dry.err;
  EXPECT_TRUE(has(dry.out, "dry run: nothing is computed")) << dry.out;
  const Finished printed = tool(Words{"run", "--print-config", "--output", output} + small_job());
  EXPECT_EQ(printed.code, 0) << printed.err;
  EXPECT_TRUE(has(printed.out, "seq = 300  # flag\n")) << printed.out;
  EXPECT_TRUE(folder.entries().empty());
  // A dry run finds what a run would.
  EXPECT_EQ(tool(Words{"run", "--dry-run", "--memory", "4k"} + small_job()).code, 5);
  EXPECT_EQ(tool({"run", "--dry-run", "--input", folder.file("none")}).code, 3);
}

TEST(Run, OneTokenAndNoToken) {
  for (const char* tokens : {"0", "1"}) {
    const Words job{"--synthetic", "7", "--seq", tokens, "--head-dim", "16"};
    const Finished one = tool(Words{"run"} + job);
    ASSERT_EQ(one.code, 0) << one.err;
    const Finished three = tool(Words{"run", "--ranks", "3"} + job);
    ASSERT_EQ(three.code, 0) << three.err;
    EXPECT_EQ(digest_of(three.out), digest_of(one.out));
  }
}

}  // namespace
}  // namespace ringattn::testing
