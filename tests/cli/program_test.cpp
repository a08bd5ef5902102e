// SPDX-License-Identifier: Apache-2.0
// The program's own words: help, version, unknown words, the shape of messages.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

TEST(Program, HelpAndVersion) {
  for (const Words& words :
       {Words{"--help"}, {"run", "--help"}, {"verify", "-h"}, {"plan", "--help"}, {"info", "--help"}}) {
    const Finished help = tool(words);
    EXPECT_EQ(help.code, 0);
    EXPECT_EQ(help.err, "");
    EXPECT_EQ(help.out.rfind("Examples:\n", 0), 0U) << help.out;
    EXPECT_TRUE(has(help.out, "Exit codes")) << help.out;
  }
  EXPECT_TRUE(has(tool({"run", "--help"}).out, "--mask full|causal")) << tool({"run", "--help"}).out;
  EXPECT_EQ(tool({"--version"}).out.rfind("ringattn ", 0), 0U);
}

TEST(Program, UnknownWordsAreUsageErrors) {
  const std::pair<Words, const char*> cases[] = {{{}, "no subcommand"},
                                                 {{"rum"}, "Did you mean run?"},
                                                 {{"frobnicate"}, "unknown subcommand frobnicate"},
                                                 {{"--synthetic", "7"}, "--synthetic stands before a subcommand"},
                                                 {{"run", "--softcp", "1"}, "Did you mean --softcap?"}};
  for (const auto& [words, expected] : cases) {
    const Finished run = tool(words);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_EQ(run.out, "");
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
    EXPECT_TRUE(has(run.err, expected)) << run.err;
  }
  const Finished variable = tool(Words{"run"} + small_job(), {{"RINGATTN_PACE", "fast"}});
  EXPECT_EQ(variable.code, 2) << variable.err;
  EXPECT_TRUE(has(variable.err, "RINGATTN_PACE is \"fast\"")) << variable.err;
}

TEST(Program, MessagesAreOneLine) {
  const TemporaryFolder folder;
  const std::string file = folder.write("job.toml", "\"he\\nads\" = 8\n");
  const Finished run = tool({"run", "--config", file});
  EXPECT_EQ(run.code, 2) << run.err;
  EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
}

TEST(Program, ExamplesOfTheHelpRun) {
  EXPECT_EQ(tool({"run", "--synthetic", "7", "--seq", "1k"}).code, 0);
  EXPECT_EQ(tool({"plan", "--world", "8", "--seq", "1m"}).code, 0);
  EXPECT_EQ(tool({"plan", "--world", "2-1k*2", "--seq", "64k,2m", "--heads", "32", "--kv-heads", "8", "--quiet"}).code,
            0);
  EXPECT_EQ(tool({"info"}).code, 0);
}

}  // namespace
}  // namespace ringattn::testing
