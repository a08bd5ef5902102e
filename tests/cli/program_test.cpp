// SPDX-License-Identifier: Apache-2.0
// The program's own words: help, version, unknown words, the shape of messages.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "launch/commands.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

TEST(Program, HelpAndVersion) {
  for (const Words& words : {Words{"--help"},
                             {"run", "--help"},
                             {"verify", "-h"},
                             {"bench", "--help"},
                             {"plan", "--help"},
                             {"info", "--help"}}) {
    const Finished help = tool(words);
    EXPECT_EQ(help.code, 0);
    EXPECT_EQ(help.err, "");
    EXPECT_EQ(help.out.rfind("Examples:\n", 0), 0U) << help.out;
    EXPECT_TRUE(has(help.out, "Exit codes")) << help.out;
  }
  EXPECT_TRUE(has(tool({"run", "--help"}).out, "--ranks N")) << tool({"run", "--help"}).out;
  EXPECT_FALSE(has(tool({"run", "--help"}).out, "--mask full|causal")) << tool({"run", "--help"}).out;
  EXPECT_EQ(tool({"help", "run"}).out, tool({"run", "--help"}).out);
  EXPECT_EQ(tool({"--version"}).out.rfind("ringattn ", 0), 0U);
}

// Each flag of a job is in the common help or in that of the ops it belongs to.
TEST(Program, HelpOfAnOpShowsItsFlagsAlone) {
  const std::string common = tool({"run", "--help"}).out;
  const std::pair<const char*, std::pair<std::vector<const char*>, std::vector<const char*>>> ops[] = {
      {"attention",
       {{"--mask full|causal", "--kv-heads HK", "--layout"}, {"--rope-dim", "--state-dim", "--page-size"}}},
      {"decode", {{"--page-size TOKENS", "--prefix TOKENS"}, {"--layout", "--rope-dim"}}},
      {"mla", {{"--rope-dim DR", "--form expanded", "w_uk"}, {"--kv-heads", "--state-dim"}}},
      {"ssd", {{"--state-dim N", "--dt-limit MIN,MAX", "dt_bias"}, {"--mask", "--form"}}},
      {"selective_scan", {{"--state-dim N", "delta_bias"}, {"--head-dim", "--mask"}}},
      {"conv1d", {{"--conv-width W", "--final-states"}, {"--state-dim", "--q-len"}}}};
  for (const auto& [op, flags] : ops) {
    const Finished help = tool({"run", "--op", op, "--help"});
    EXPECT_EQ(help.code, 0) << help.err;
    EXPECT_TRUE(has(common, std::string("  ") + op)) << common;
    EXPECT_FALSE(has(help.out, "--ranks")) << help.out;
    for (const char* flag : flags.first) EXPECT_TRUE(has(help.out, flag)) << flag << "\n" << help.out;
    for (const char* flag : flags.second) EXPECT_FALSE(has(help.out, flag)) << flag << "\n" << help.out;
  }
  EXPECT_EQ(tool({"run", "--op", "scan", "--help"}).code, 2);
  EXPECT_EQ(tool({"run", "--op", "convolution", "--help"}).out, tool({"run", "--op", "conv1d", "--help"}).out);
}

TEST(Program, UnknownWordsAreUsageErrors) {
  const std::pair<Words, const char*> cases[] = {
      {{}, "no subcommand"},
      {{"rum"}, "Did you mean run?"},
      {{"help", "rum"}, "Did you mean run?"},
      {{"frobnicate"},
       "unknown subcommand frobnicate (there are run, verify, bench, plan, compress, quantize, info, launch and "
       "collect-env). "
       "See "
       "`ringattn "
       "--help`."},
      {{""}, "unknown subcommand \"\" (there are run, "},
      {{"--synthetic", "7"}, "--synthetic comes before a subcommand (the first argument is a subcommand: run, "},
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
  EXPECT_TRUE(
      has(variable.err, "RINGATTN_PACE is \"fast\" (it takes bytes per second, e.g. 100m). Unset it, or give it"))
      << variable.err;
}

TEST(Program, AFlagWithoutItsValueTakesNoOther) {
  const Words empty[] = {{"run", "--output=", "--force"},    {"run", "--json", "-q"},
                         {"run", "--softmax-scale=", "0.5"}, {"run", "--trace", "--ranks", "3"},
                         {"run", "--seq", "--help"},         {"run", "--seq"}};
  for (const Words& words : empty) {
    const Finished run = tool(words);
    EXPECT_EQ(run.code, 2) << run.out;
    EXPECT_TRUE(has(run.err, "has no value (it takes one)")) << run.err;
  }
}

TEST(Program, FilesThatAreNoFilesAreRefusedAtOnce) {
  const TemporaryFolder folder;
  const std::string fifo = folder.file("fifo");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const std::string link = folder.file("link");
  folder.write("target", "kept");
  ASSERT_EQ(::symlink(folder.file("target").c_str(), link.c_str()), 0);
  const Words refused[] = {{"--config", fifo},          {"--machine", fifo}, {"--json", fifo},
                           {"--trace", fifo},           {"--output", fifo},  {"--output", link, "--force"},
                           {"--json", link, "--force"}, {"--input", fifo}};
  for (const Words& words : refused) {
    const Words job = words[0] == "--input" ? Words{} : small_job();
    EXPECT_EQ(tool(Words{"run"} + words + job).code, 3) << words[0] << " " << words[1];
  }
  EXPECT_EQ(read_whole(folder.file("target")), "kept");
}

TEST(Program, AStdoutThatTakesNothingIsAnError) {
  const std::string command =
      std::string(RINGATTN_TOOL) + " run --synthetic 1 --seq 8 --heads 1 --kv-heads 1 --head-dim 8";
  const auto code_of = [&](const std::string& redirection) {
    return WEXITSTATUS(std::system((command + redirection).c_str()));
  };
  EXPECT_EQ(code_of(" > /dev/full 2> /dev/null"), 3);
  EXPECT_EQ(code_of(" >&- 2> /dev/null"), 3);
  EXPECT_EQ(code_of(" > /dev/null 2>&-"), 0);
  const TemporaryFolder folder;
  const std::string messages = folder.file("messages");
  for (const char* flags : {"", " --json -"}) {
    EXPECT_EQ(code_of(std::string(flags) + " > /dev/full 2> " + messages), 3) << flags;
    EXPECT_TRUE(has(read_whole(messages), " can't be written to stdout (No space left on device). Redirect stdout"))
        << read_whole(messages);
  }
  EXPECT_EQ(WEXITSTATUS(std::system((std::string(RINGATTN_TOOL) + " --help > /dev/full 2> " + messages).c_str())), 3);
  EXPECT_TRUE(has(read_whole(messages), "can't be written to stdout (No space")) << read_whole(messages);
}

// It has to work where something is wrong: with variables of any bytes, without Python, and with settings that no other
// command takes.
TEST(Program, CollectEnvPrintsWhatThereIs) {
  const Finished run = tool({"collect-env"}, {{"PATH", "/nowhere"},
                                              {"RINGATTN_NONSENSE", "a\xff\n\xc3\xa9"},
                                              {"RINGATTN_STORE_SECRET", "not to be seen by anybody"},
                                              {"AWS_SECRET_ACCESS_KEY", "nor this"}});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(run.err, "");
  for (const char* line :
       {"ringattn\n  version           ", "\n  compiler ", "\n  NCCL ", "\nmachine\n  system ", "\n  CPU ",
        "\nGPUs and links\n", "\n  transport threads yes\n", "\n  RINGATTN_NONSENSE a\\xff\\x0a\xc3\xa9\n",
        "\n  Python            none (there is no python3 on PATH)\n"}) {
    EXPECT_TRUE(has(run.out, line)) << line << "\n" << run.out;
  }
  EXPECT_FALSE(has(run.out, "not to be seen") || has(run.out, "nor this")) << run.out;

  const Finished whole = tool({"collect-env"});
  EXPECT_TRUE(has(whole.out, "\nPython\n  Python            ")) << whole.out;
  const Finished refused = tool({"collect-env", "--json"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(has(refused.err, "belongs to no flag (collect-env takes none)")) << refused.err;
  EXPECT_EQ(tool({"help", "collect-env"}).out, tool({"collect-env", "--help"}).out);
}

TEST(Program, CollectEnvEndsWhateverPython3Prints) {
  const TemporaryFolder folder;
  const std::string python = folder.write("python3", "#!/bin/sh\nwhile :; do printf 'y\\033\\377\\n'; done\n");
  ASSERT_EQ(::chmod(python.c_str(), 0700), 0);
  const Finished run = tool({"collect-env"}, {{"PATH", folder.path()}});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(has(run.out, "\nPython\n  y\\x1b\\xff\n")) << run.out;
  EXPECT_TRUE(has(run.out, "\n  more              unknown (python3 printed more than 100 lines)\n")) << run.out;
}

TEST(Program, MessagesAreOneLine) {
  const TemporaryFolder folder;
  const std::string file = folder.write("job.toml", "\"he\\nads\" = 8\n");
  const Finished run = tool({"run", "--config", file});
  EXPECT_EQ(run.code, 2) << run.err;
  EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
}

// The defaults that --print-config writes contradict nothing when they are read back.
TEST(Program, APrintedConfigRuns) {
  const TemporaryFolder folder;
  const Words commands[] = {{"run", "--synthetic", "7", "--op", "ssd", "--q-len", "1"},
                            {"verify", "--synthetic", "7", "--seq", "64"},
                            {"bench", "--seq", "64", "--samples", "1"},
                            {"bench", "--seq", "64", "--samples", "1", "--total-tokens", "128"}};
  for (const Words& words : commands) {
    const Finished printed = tool(words + Words{"--print-config"});
    ASSERT_EQ(printed.code, 0) << printed.err;
    const Finished run = tool({words.front(), "--config", folder.write("job.toml", printed.out)});
    EXPECT_EQ(run.code, 0) << words.front() << run.err;
  }
}

TEST(Program, ExamplesOfTheHelpRun) {
  int examples = 0;
  for (const CommandRow& command : command_table()) {
    for (const std::string_view example : command.examples) {
      // Examples of one process that need no file.
      if (!example.starts_with("ringattn ") || has(example, "--input")) continue;
      Words words;
      for (std::size_t at = std::string_view("ringattn ").size(); at < example.size();) {
        const std::size_t end = std::min(example.find(' ', at), example.size());
        words.emplace_back(example.substr(at, end - at));
        at = end + 1;
      }
      if (words.front() != "plan" && words.front() != "info") words.emplace_back("--dry-run");  // seconds, else
      const Finished run = tool(words);
      EXPECT_EQ(run.code, 0) << example << "\n" << run.err;
      ++examples;
    }
  }
  EXPECT_EQ(examples, 6);
}

}  // namespace
}  // namespace ringattn::testing
