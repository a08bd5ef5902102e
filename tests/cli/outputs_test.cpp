// SPDX-License-Identifier: Apache-2.0
// Which files the program writes, and which it never does.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

TEST(Outputs, NeverWritesOverWhatItReadsOrWritesTwice) {
  const TemporaryFolder folder;
  const std::string bytes = safetensors_bytes(FileShape());
  const std::string input = folder.write("in.safetensors", bytes);
  const std::string other = folder.file("x");
  const std::string dotted = folder.file("./x");
  const Words clashes[] = {{"--output", input},
                           {"--json", input},
                           {"--trace", input},
                           {"--output", other, "--json", dotted},
                           {"--output", other, "--trace", other},
                           // Names of files that aren't there, relative to the working folder.
                           {"--dry-run", "--output", "no_such_file", "--trace", "./no_such_file"}};
  for (const Words& clash : clashes) {
    const Finished run = tool(Words{"run", "--force", "--input", input} + clash);
    EXPECT_EQ(run.code, 2) << run.out;
    EXPECT_TRUE(has(run.err, "are the same file")) << run.err;
    EXPECT_TRUE(read_whole(input) == bytes);
    EXPECT_FALSE(std::filesystem::exists(other));
  }
}

TEST(Outputs, NeverWritesOverWhatItComparesOrIsShapedBy) {
  const TemporaryFolder folder;
  const std::string bytes = safetensors_bytes(FileShape());
  const std::string file = folder.write("theirs.safetensors", bytes);
  const std::string input = folder.write("in.safetensors", bytes);
  for (const Words& reads : {Words{"--input", input, "--peer", file}, Words{"--input", input, "--block-mask", file},
                             Words{"--synthetic", "1", "--model-config", file}}) {
    const Finished run = tool(Words{"verify", "--force", "--json", file} + reads);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_TRUE(has(run.err, "are the same file")) << run.err;
    EXPECT_TRUE(read_whole(file) == bytes) << reads[2];
  }
}

TEST(Outputs, NeverWritesOverFilesThatAnIndexNames) {
  const TemporaryFolder folder;
  const std::string bytes = safetensors_bytes(FileShape());
  const std::string shard = folder.write("s1.safetensors", bytes);
  const std::string index =
      folder.write("x.safetensors.index.json",
                   R"({"weight_map": {"q": "s1.safetensors", "k": "s1.safetensors", "v": "s1.safetensors"}})");
  for (const char* flag : {"--output", "--json", "--trace"}) {
    const Finished run = tool({"run", "--force", "--input", index, flag, shard});
    EXPECT_EQ(run.code, 2) << run.out;
    EXPECT_TRUE(has(run.err, "s1.safetensors of --input are the same file")) << run.err;
    EXPECT_TRUE(read_whole(shard) == bytes);
  }
  EXPECT_EQ(tool({"run", "--input", index}).code, 0);
}

TEST(Outputs, LeavesNoTemporaryFileWhenItIsEnded) {
  const TemporaryFolder folder;
  const std::string script =
      "cd " + folder.path() + " || exit\n" + RINGATTN_TOOL +
      " run --synthetic 1 --seq 64k --heads 8 --kv-heads 8 --head-dim 128 --dtype fp32 --window 0,0 --output out &\n"
      "job=$!\n"
      "until ls out.*.tmp; do kill -0 $job || exit 9; sleep 0.01; done\n"
      "kill -TERM $job\n"
      "wait $job; echo code $?; ls\n";
  const Finished run = run_program({"bash", "-c", script});
  EXPECT_TRUE(has(run.out, "code 143")) << run.out << run.err;
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << run.out;
}

TEST(Outputs, ReportsDontSayWhereTheProgramLies) {
  for (const Words& words : {Words{"run", "--json", "-"}, Words{"bench", "--samples", "1", "--jsonl", "-"}}) {
    const Finished run = tool(words + small_job());
    ASSERT_EQ(run.code, 0) << run.err;
    const std::string line = run.out.substr(run.out.find('{'));
    EXPECT_EQ(json_at(line, "/argv/0"), R"("ringattn")");
    EXPECT_EQ(json_at(line, "/argv/1"), '"' + words[0] + '"');
  }
}

TEST(Outputs, WritesOnlyReportsToStandardOutput) {
  const TemporaryFolder folder;
  const std::string input = folder.write("in.safetensors", safetensors_bytes(FileShape()));
  for (const char* flag : {"--output", "--trace"}) {
    const Finished run = tool({"run", "--input", input, flag, "-"});
    EXPECT_EQ(run.code, 2) << run.out;
    EXPECT_TRUE(has(run.err, std::string(flag) + " is \"-\" (only --json and --jsonl")) << run.err;
  }
  EXPECT_EQ(tool({"verify", "--input", input, "--record", "-"}).code, 2);
}

}  // namespace
}  // namespace ringattn::testing
