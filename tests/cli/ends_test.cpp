// SPDX-License-Identifier: Apache-2.0
// How a job ends where the machine is slow, full or refuses: no work is lost, the exit code says what happened, and a
// report is there.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

// The program under a fault of tests/support/faults.cpp.
Variables faulty(const std::string& name, const std::string& value) {
  return {{"LD_PRELOAD", RINGATTN_FAULTS}, {"ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0"}, {name, value}};
}

TEST(Ends, CallsThatSignalsBreakOffAreMadeAgain) {
  const TemporaryFolder folder;
  const Words words = Words{"run"} + small_job();
  ASSERT_EQ(tool(words + Words{"--output", folder.file("calm")}).code, 0);
  const Finished run = tool(words + Words{"--output", folder.file("out"), "--json", folder.file("report.json"),
                                          "--trace", folder.file("trace.json")},
                            faulty("FAULT_EINTR", "2"));
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(read_whole(folder.file("out")) == read_whole(folder.file("calm")));
  EXPECT_EQ(folder.entries().size(), 4U);
}

TEST(Ends, ADiskThatIsSlowIsNoPeersDeath) {
  const TemporaryFolder folder;
  const std::string report = folder.file("report.json");
  const Finished run = tool(
      Words{"run", "--ranks", "2", "--timeout", "1", "--output", folder.file("out"), "--json", report} + small_job(),
      faulty("FAULT_FSYNC_SECONDS", "4"));
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(json_at(read_whole(report), "/verdict"), R"("ok")");
  EXPECT_TRUE(std::filesystem::exists(folder.file("out")));
}

TEST(Ends, EveryNameThatTheFileSystemTakesIsTaken) {
  const TemporaryFolder folder;
  for (const std::size_t length : {240U, 255U}) {
    const std::string out = folder.file(std::string(length, 'o'));
    const std::string report = folder.file(std::string(length, 'r'));
    const std::string trace = folder.file(std::string(length, 't'));
    const Finished run = tool(Words{"run", "--output", out, "--json", report, "--trace", trace} + small_job());
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(check_report(read_whole(report)), "");
  }
  EXPECT_EQ(folder.entries().size(), 6U);
  // What doesn't fit is said before anything is computed.
  const Finished run = tool(Words{"run", "--output", folder.file(std::string(256, 'o'))} + small_job());
  EXPECT_EQ(run.code, 3);
  EXPECT_FALSE(has(run.out, "digest")) << run.out;
}

TEST(Ends, ThreadsThatCannotStartAreFour) {
  for (const char* ranks : {"1", "2"}) {
    for (const char* threads : {"0", "1", "2", "3"}) {
      const TemporaryFolder folder;
      const std::string report = folder.file("report.json");
      const Finished run = tool(Words{"run", "--ranks", ranks, "--threads", "8", "--json", report} + small_job(),
                                faulty("FAULT_THREADS", threads));
      EXPECT_EQ(run.code, 4) << ranks << " ranks, " << threads << " threads: " << run.err;
      EXPECT_EQ(count_messages(run.err), 1) << run.err;
      EXPECT_TRUE(has(run.err, "Resource temporarily unavailable). Use fewer ")) << run.err;
      EXPECT_EQ(json_at(read_whole(report), "/error/code"), "4") << read_whole(report);
    }
  }
}

// libgomp calls exit(1) where a thread is refused after all. Where a driver of GPUs has started one before, ours is
// refused.
TEST(Ends, ALibraryThatEndsTheProgramIsFour) {
  const TemporaryFolder folder;
  const std::string report = folder.file("report.json");
  const Finished run =
      tool(Words{"run", "--threads", "2", "--json", report} + small_job(), faulty("FAULT_THREADS", "1"));
  if (run.code == 0) GTEST_SKIP() << "needs: an OpenMP that starts its threads by pthread_create";
  EXPECT_EQ(run.code, 4) << run.err;
  EXPECT_EQ(count_messages(run.err), 1) << run.err;
  EXPECT_TRUE(has(run.err, "a library ended the program (Open MPI or OpenMP; its own message is above). Check") ||
              has(run.err, "Resource temporarily unavailable). Use fewer "))
      << run.err;
  EXPECT_EQ(json_at(read_whole(report), "/error/code"), "4");
}

TEST(Ends, AKilledJobLeavesAReport) {
  for (const char* signal : {"KILL", "TERM"}) {
    const TemporaryFolder folder;
    const std::string script = "cd " + folder.path() + " || exit\n" + RINGATTN_TOOL +
                               " run --synthetic 1 --seq 64k --heads 32 --kv-heads 8 --json report.json &\n"
                               "job=$!\n"
                               "until test -e report.json; do kill -0 $job || exit 9; sleep 0.01; done\n"
                               "kill -" +
                               signal + " $job\nwait $job; echo code $?\n";
    const Finished run = run_program({"bash", "-c", script});
    EXPECT_TRUE(has(run.out, signal == std::string("KILL") ? "code 137" : "code 143")) << run.out << run.err;
    const std::string report = read_whole(folder.file("report.json"));
    EXPECT_EQ(check_report(report), "");
    EXPECT_EQ(json_at(report, "/verdict"), R"("unfinished")");
    EXPECT_EQ(json_at(report, "/error/code"), "6");
    EXPECT_EQ(folder.entries().size(), 1U);
  }
}

TEST(Ends, AReportOfAnEarlierJobIsKeptUnlessReplaced) {
  const TemporaryFolder folder;
  const std::string report = folder.write("report.json", "precious");
  const Words words = Words{"run", "--json", report} + small_job();
  EXPECT_EQ(tool(words).code, 3);
  EXPECT_EQ(tool(words + Words{"--head-dim", "x"}).code, 2);
  EXPECT_EQ(tool(words + Words{"--frob"}).code, 2);
  EXPECT_EQ(read_whole(report), "precious");
  EXPECT_EQ(tool(words + Words{"--force"}).code, 0);
  EXPECT_EQ(json_at(read_whole(report), "/verdict"), R"("ok")");
}

TEST(Ends, WhatCannotBeReadIsReportedToo) {
  struct Case {
    Words words;
    Variables variables;
  };
  const TemporaryFolder folder;
  const std::string report = folder.file("report.json");
  const Case cases[] = {{{"run", "--json", report, "--frob"}, {}},
                        {{"run", "--json=" + report, "--seq"}, {}},
                        {{"run", "--json", report, "--seq", "1", "--seq", "2"}, {}},
                        {{"run", "stray"}, {{"RINGATTN_JSON", report}}},
                        {{"run", "--seq", "x"}, {{"RINGATTN_JSON", report}}},
                        {{"frobnicate", "--json", report}, {}}};
  for (const Case& bad : cases) {
    std::filesystem::remove(report);
    const Finished run = tool(bad.words, bad.variables);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_EQ(check_report(read_whole(report)), "") << run.err;
    EXPECT_EQ(json_at(read_whole(report), "/error/code"), "2");
  }
}

TEST(Ends, AFlagIsNoReportsName) {
  const TemporaryFolder folder;
  const Finished run = run_program({"sh", "-c", "cd " + folder.path() + " && " RINGATTN_TOOL " run --json -q --frob"});
  EXPECT_EQ(run.code, 2) << run.err;
  EXPECT_TRUE(folder.entries().empty());
}

TEST(Ends, AProcessAloneIsNeverSilent) {
  const Finished run = tool({"run", "--synthetic", "7", "--softcp", "1"}, {{"SLURM_PROCID", "1"}});
  EXPECT_EQ(run.code, 2);
  EXPECT_EQ(count_messages(run.err), 1) << run.err;
  EXPECT_EQ(count_messages(tool({"plan", "--mask", "none"}, {{"SLURM_PROCID", "1"}}).err), 1);
}

TEST(Ends, MessagesNameTheSettingThatWasGiven) {
  const TemporaryFolder folder;
  const std::string config = folder.write("job.toml", "memory = 5\n");
  const Words job{"run", "--synthetic", "7"};
  const std::string by_flag = tool(job + Words{"--memory", "5"}).err;
  EXPECT_TRUE(has(by_flag, "). --memory ") && has(by_flag, "m is enough")) << by_flag;
  const std::string by_variable = tool(job, {{"RINGATTN_MEMORY", "5"}}).err;
  EXPECT_TRUE(has(by_variable, "). RINGATTN_MEMORY=") && has(by_variable, "m is enough")) << by_variable;
  const std::string by_key = tool(job + Words{"--config", config}).err;
  EXPECT_TRUE(has(by_key, "m in " + config + " is enough")) << by_key;
}

TEST(Ends, ATooSmallBudgetNamesOneThatDoes) {
  const Finished run = tool({"run", "--synthetic", "7", "--memory", "5"});
  EXPECT_EQ(run.code, 5);
  const std::size_t at = run.err.find("--memory ");
  ASSERT_NE(at, std::string::npos) << run.err;
  const std::string enough = run.err.substr(at + 9, run.err.find(' ', at + 9) - at - 9);
  EXPECT_TRUE(has(run.err, " is enough; with more ranks, ")) << run.err;
  EXPECT_EQ(tool({"run", "--synthetic", "7", "--memory", enough, "--dry-run"}).code, 0) << enough;
}

}  // namespace
}  // namespace ringattn::testing
