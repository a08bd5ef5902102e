// SPDX-License-Identifier: Apache-2.0
// The program as ranks that meet at RINGATTN_STORE, without MPI: the same bytes, one message, one exit code.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/cli/rank_failures.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

// The program as N ranks; `options` are those of tests/support/store_ranks.py.
Finished store_tool(int ranks, const Words& words, const Words& options = {}) {
  return run_program(Words{"python3", RINGATTN_STORE_RANKS, std::to_string(ranks)} + options +
                     Words{"--", RINGATTN_TOOL} + words);
}

TEST(StoreProgram, WritesTheBytesOfOneRank) {
  const TemporaryFolder folder;
  const std::string one = folder.file("one");
  const Words job = Words{"run", "--backend", "cpu"} + small_job();
  ASSERT_EQ(tool(job + Words{"--output", one}).code, 0);
  for (const int ranks : {1, 2, 3}) {
    const std::string many = folder.file("many" + std::to_string(ranks));
    const Finished run = store_tool(ranks, job + Words{"--output", many, "--json", "-"});
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_TRUE(read_whole(many) == read_whole(one)) << ranks << " ranks";
    EXPECT_EQ(check_report(run.out), "") << run.out;
    EXPECT_EQ(json_at(run.out, "/world/ranks"), std::to_string(ranks));
  }
  EXPECT_EQ(folder.entries().size(), 4U);  // no temporary file stays
}

TEST(StoreProgram, VerifiesAndTimes) {
  const Finished verified = store_tool(3, Words{"verify", "--backend", "cpu"} + small_job());
  ASSERT_EQ(verified.code, 0) << verified.err;
  EXPECT_TRUE(has(verified.out, "# 14 shapes")) << verified.out;
  EXPECT_TRUE(verified.out.ends_with("PASS\n")) << verified.out;
  const Finished timed = store_tool(2, Words{"bench", "--backend", "cpu", "--samples", "3"} + small_job());
  EXPECT_EQ(timed.code, 0) << timed.err;
  EXPECT_TRUE(has(timed.out, "transport tcp")) << timed.out;
}

TEST(StoreProgram, FailuresAreOneMessageAndOneCode) {
  expect_one_message_and_one_code([](const Words& words) { return store_tool(3, words); });
}

TEST(StoreProgram, WhatRunsOnceFailsOnce) {
  expect_the_first_process_speaks([](const Words& words) { return store_tool(2, words, {"--except", "1"}); });
}

// A rank that was given something else is told apart before anything is computed.
TEST(StoreProgram, RanksCompareWhatTheyWereGiven) {
  const Finished run =
      store_tool(3, Words{"run", "--backend", "cpu"} + small_job(), {"--set", "2", "RINGATTN_BLOCK=128"});
  EXPECT_EQ(run.code, 2) << run.err;
  EXPECT_EQ(count_messages(run.err), 1) << run.err;
  EXPECT_TRUE(has(run.err, "rank 2 and rank 0 have different configurations")) << run.err;
}

TEST(StoreProgram, NamesARankOfAnotherJob) {
  // The refused rank leaves with its own code; the others wait for the right one, and say who came instead.
  const Words job = Words{"run", "--backend", "cpu", "--timeout", "2"} + small_job();
  const Finished run = store_tool(3, job, {"--set", "1", "RINGATTN_JOB=another", "--except", "1"});
  EXPECT_EQ(run.code, 6) << run.err;
  EXPECT_EQ(count_messages(run.err), 2) << run.err;
  EXPECT_TRUE(has(run.err, "refuses rank 1 (the store serves another job than job another)")) << run.err;
  EXPECT_TRUE(has(run.err, "rank 1 did not come to the store at 127.0.0.1:")) << run.err;
  EXPECT_TRUE(has(run.err, "was refused: it belongs to job another")) << run.err;
}

bool has_secrets() {
  const Finished tried = tool({"run", "--backend", "cpu", "--synthetic", "1", "--seq", "64", "--timeout", "0.2"},
                              {{"RINGATTN_STORE", "127.0.0.1:1"},
                               {"RANK", "1"},
                               {"WORLD_SIZE", "2"},
                               {"RINGATTN_STORE_SECRET", std::string(64, 's')}});
  return tried.code != 4;
}

TEST(StoreProgram, RanksWithASecretCompute) {
  if (!has_secrets()) GTEST_SKIP() << "this build has no crypto library";
  const TemporaryFolder folder;
  const std::string secret(64, 's');
  const std::string text = folder.write("secret", secret + "\n");
  ASSERT_EQ(::chmod(text.c_str(), 0600), 0);
  // Some have it from the environment, one from a file.
  const Words job = Words{"run", "--backend", "cpu", "--json", "-"} + small_job();
  const Finished run =
      store_tool(3, job,
                 {"--set", "0", "RINGATTN_STORE_SECRET=" + secret, "--set", "1", "RINGATTN_STORE_SECRET=" + secret,
                  "--set", "2", "RINGATTN_STORE_SECRET_FILE=" + text});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(json_at(run.out, "/environment/RINGATTN_STORE_SECRET"), "\"(not shown)\"");
  EXPECT_FALSE(has(run.out + run.err, secret));
  EXPECT_FALSE(has(tool({"info"}, {{"RINGATTN_STORE_SECRET", secret}}).out, secret));
}

TEST(StoreProgram, NamesRanksWithoutTheSecret) {
  if (!has_secrets()) GTEST_SKIP() << "this build has no crypto library";
  const Words job = Words{"run", "--backend", "cpu", "--timeout", "2"} + small_job();
  const Finished run = store_tool(3, job, {"--set", "0", "RINGATTN_STORE_SECRET=" + std::string(64, 's')});
  EXPECT_EQ(run.code, 6) << run.err;
  EXPECT_TRUE(has(run.err, "rank 1, rank 2 did not come to the store at 127.0.0.1:")) << run.err;
  EXPECT_TRUE(has(run.err, "a rank 1 has no secret, and rank 0 has one; a rank 2 has no secret, and rank 0 has one"))
      << run.err;
}

TEST(StoreProgram, OpensLibcryptoForSecretsOnly) {
  if (!has_secrets()) GTEST_SKIP() << "this build has no crypto library";
  const TemporaryFolder folder;
  for (const char* file : {"libcrypto.so.3", "libcrypto.so.1.1"}) folder.write(file, "");
  const Words job = Words{"run", "--backend", "cpu"} + small_job();
  const Words broken{"--set", "0", "LD_LIBRARY_PATH=" + folder.path()};
  EXPECT_EQ(store_tool(1, job, broken).code, 0);
  const Finished run =
      store_tool(1, job, broken + Words{"--set", "0", "RINGATTN_STORE_SECRET=" + std::string(64, 's')});
  EXPECT_EQ(run.code, 4) << run.err;
  EXPECT_TRUE(has(run.err, "the secret of RINGATTN_STORE_SECRET can't be used (" + folder.file("libcrypto.so.")))
      << run.err;
}

TEST(StoreProgram, WarnsOnceWhereOtherHostsReachItsPort) {
  const Words job = Words{"run", "--backend", "cpu"} + small_job();
  const Finished here = store_tool(2, job);
  EXPECT_EQ(here.code, 0) << here.err;
  EXPECT_FALSE(has(here.err, "warning:")) << here.err;
  const Finished open = store_tool(2, job, {"--host", "0.0.0.0"});
  EXPECT_EQ(open.code, 0) << open.err;
  const std::size_t first = open.err.find("ringattn: warning: any process that can connect to 0.0.0.0:");
  ASSERT_NE(first, std::string::npos) << open.err;
  EXPECT_EQ(open.err.find("warning:", first + 20), std::string::npos) << open.err;
}

TEST(StoreProgram, ChecksTheEnvironment) {
  const Words job = Words{"run", "--backend", "cpu"} + small_job();
  const auto expect_usage = [&](const Variables& variables, std::string_view text) {
    const Finished run = tool(job, variables);
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
    EXPECT_TRUE(has(run.err, text)) << run.err;
  };
  expect_usage({{"RINGATTN_STORE", "127.0.0.1"}}, "RINGATTN_STORE is \"127.0.0.1\"");
  expect_usage({{"RINGATTN_STORE", "127.0.0.1:99999"}}, "RINGATTN_STORE is \"127.0.0.1:99999\"");
  expect_usage({{"RINGATTN_STORE", "127.0.0.1:29555"}}, "neither RANK nor SLURM_PROCID says which rank");
  expect_usage({{"RINGATTN_STORE", "127.0.0.1:29555"}, {"RANK", "two"}, {"WORLD_SIZE", "4"}}, "RANK is \"two\"");
  expect_usage({{"RINGATTN_STORE", "127.0.0.1:29555"}, {"RANK", "4"}, {"WORLD_SIZE", "4"}},
               "RANK is \"4\" (it takes a whole number from 0 to 3)");
  // Without it, torchrun's variables mean nothing to the program: a script under torchrun may start it.
  EXPECT_EQ(tool(job, {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "127.0.0.1"}}).code, 0);
}

}  // namespace
}  // namespace ringattn::testing
