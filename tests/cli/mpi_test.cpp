// SPDX-License-Identifier: Apache-2.0
// The program under mpirun: the same bytes, one message, one exit code.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <vector>

#include "base/host.hpp"
#include "tests/cli/rank_failures.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {

Finished mpi_tool(int ranks, const Words& words, const Variables& variables) {
  Words launcher{RINGATTN_MPIRUN};
  std::string flags = RINGATTN_MPIRUN_FLAGS;
  for (std::size_t begin = 0; begin < flags.size();) {
    const std::size_t end = std::min(flags.find(' ', begin), flags.size());
    launcher.push_back(flags.substr(begin, end - begin));
    begin = end + 1;
  }
  Variables all{{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}};
  all.insert(all.end(), variables.begin(), variables.end());
  return run_program(launcher + Words{"-np", std::to_string(ranks), RINGATTN_TOOL} + words, all);
}

namespace {

TEST(Mpi, WritesTheBytesOfOneRank) {
  const TemporaryFolder folder;
  FileShape shape;
  shape.integers = {{"cu_seqlens_q", {0, 7, 7, 40}}};
  const std::string input = folder.write("in.safetensors", safetensors_bytes(shape));
  const std::string one = folder.file("one");
  ASSERT_EQ(tool({"run", "--input", input, "--output", one}).code, 0);
  for (const int ranks : {1, 2, 3}) {
    const std::string many = folder.file("many" + std::to_string(ranks));
    const Finished run = mpi_tool(ranks, {"run", "--input", input, "--output", many, "--json", "-"});
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_TRUE(read_whole(many) == read_whole(one)) << ranks << " ranks";
    EXPECT_EQ(check_report(run.out), "") << run.out;
    EXPECT_EQ(json_at(run.out, "/world/ranks"), std::to_string(ranks));
  }
  EXPECT_EQ(folder.entries().size(), 5U);  // no temporary file stays
}

TEST(Mpi, VerifiesEveryWorldUpToItsOwn) {
  const Finished run = mpi_tool(3, Words{"verify"} + small_job());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(has(run.out, "# 14 shapes")) << run.out;
  EXPECT_TRUE(run.out.ends_with("PASS\n")) << run.out;
}

TEST(Mpi, MlaHasTheBytesOfOneRank) {
  const Words latents{"--op", "mla",        "--synthetic", "7",          "--seq", "300",          "--heads",
                      "4",    "--head-dim", "16",          "--rope-dim", "8",     "--latent-dim", "32"};
  const TemporaryFolder folder;
  for (const char* form : {"expanded", "absorbed"}) {
    const std::string one = folder.file(std::string(form) + "1");
    const std::string many = folder.file(std::string(form) + "3");
    const Words job = Words{"run", "--form", form} + latents;
    ASSERT_EQ(tool(job + Words{"--output", one}).code, 0);
    const Finished run = mpi_tool(3, job + Words{"--output", many});
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_TRUE(read_whole(one) == read_whole(many));
  }
  const Finished verified = mpi_tool(3, Words{"verify"} + latents);
  EXPECT_EQ(verified.code, 0) << verified.out << verified.err;
}

TEST(Mpi, SsmHasTheBytesOfOneRank) {
  const Words scan{"--op", "ssd",        "--synthetic", "7",           "--seq", "131100",  "--heads",
                   "2",    "--head-dim", "8",           "--state-dim", "8",     "--dtype", "fp32"};
  const TemporaryFolder folder;
  const std::string one = folder.file("1");
  const std::string many = folder.file("3");
  const Words job = Words{"run", "--final-states"} + scan;
  ASSERT_EQ(tool(job + Words{"--output", one}).code, 0);
  const Finished run = mpi_tool(3, job + Words{"--output", many});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(read_whole(one) == read_whole(many));
  const Finished verified = mpi_tool(2, Words{"verify"} + scan);
  EXPECT_EQ(verified.code, 0) << verified.out << verified.err;
  EXPECT_TRUE(has(verified.out, "# 5 shapes")) << verified.out;
}

TEST(Mpi, FailuresAreOneMessageAndOneCode) {
  expect_one_message_and_one_code([](const Words& words) { return mpi_tool(3, words); });
}

TEST(Mpi, WhatRunsOnceFailsOnce) {
  expect_the_first_process_speaks([](const Words& words) { return mpi_tool(2, words); });
}

// One rank's disk fails, and all say which.
TEST(Mpi, FailuresNameTheRankAndItsHost) {
  const TemporaryFolder folder;
  const std::string report = folder.file("report.json");
  const std::string job = " run --synthetic 7 --seq 300 --quiet --output " + folder.file("out") + " --json " + report;
  const auto disk = [](const char* fault) { return std::string(" env LD_PRELOAD=" RINGATTN_FAULTS " ") + fault; };
  const std::string mpirun = std::string(RINGATTN_MPIRUN) + " " + RINGATTN_MPIRUN_FLAGS;
  const Variables root{{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                       {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                       {"ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0"}};
  const Finished run = run_program(
      {"sh", "-c",
       mpirun + " -np 1 " + RINGATTN_TOOL + job + " : -np 1" + disk("FAULT_FSYNC_EIO=1 ") + RINGATTN_TOOL + job},
      root);
  EXPECT_EQ(run.code, 3) << run.err;
  EXPECT_EQ(count_messages(run.err), 1) << run.err;
  EXPECT_TRUE(has(run.err, "error: rank 1 on " + host_name() + ": can't sync ")) << run.err;
  EXPECT_TRUE(has(run.err, "to the disk (Input/output error). Choose another folder")) << run.err;
  EXPECT_EQ(check_report(read_whole(report)), "");
  EXPECT_EQ(json_at(read_whole(report), "/error/rank"), "1");
  EXPECT_EQ(json_at(read_whole(report), "/error/host"), '"' + host_name() + '"');
  EXPECT_EQ(folder.entries(), std::vector<std::string>{"report.json"});
}

TEST(Mpi, ADiskThatIsSlowIsNoPeersDeath) {
  for (const char* fault : {"FAULT_FSYNC_SECONDS", "FAULT_FALLOCATE_SECONDS", "FAULT_RENAME_SECONDS"}) {
    const TemporaryFolder folder;
    const Finished run = mpi_tool(
        2, Words{"run", "--timeout", "2", "--output", folder.file("out")} + small_job(),
        {{"LD_PRELOAD", RINGATTN_FAULTS}, {"ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0"}, {fault, "5"}});
    EXPECT_EQ(run.code, 0) << fault << ": " << run.err;
    EXPECT_EQ(folder.entries(), std::vector<std::string>{"out"});
  }
}

TEST(Mpi, ThreadsThatCannotStartAreFour) {
  for (const char* threads : {"0", "1", "2", "3", "4"}) {
    const std::string preload = std::string("LD_PRELOAD=") + RINGATTN_FAULTS;
    const std::string fault = std::string("FAULT_THREADS=") + threads;
    const Finished run =
        run_program({"sh", "-c",
                     std::string(RINGATTN_MPIRUN) + " " + RINGATTN_MPIRUN_FLAGS + " -np 2 env " + preload + " " +
                         fault + " " + RINGATTN_TOOL + " run --synthetic 7 --seq 300 --threads 8"},
                    {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                     {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                     {"ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0"}});
    EXPECT_EQ(run.code, 4) << threads << ": " << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << threads << ": " << run.err;
  }
}

// Open MPI leaves with 1 where it has no place for its files, and that means a wrong result here. Ranks of mpirun use
// its folder, so there a bad one of their own does no harm; a rank that something else has started makes one.
TEST(Mpi, ABadFolderForTemporaryFilesIsNoWrongResult) {
  const Words job = Words{"run", "--backend", "cpu"} + small_job();
  for (const char* folder : {"/dev/null", "/proc"}) {
    const std::string bad = std::string("TMPDIR=") + folder;
    const Finished ranks = run_program(
        Words{"sh", "-c", std::string(RINGATTN_MPIRUN) + " " + RINGATTN_MPIRUN_FLAGS + " -np 2 env " + bad + " \"$@\"",
              "sh", RINGATTN_TOOL} +
            job,
        {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
    EXPECT_TRUE(ranks.code == 0 || ranks.code == 4) << bad << ": " << ranks.code << ranks.err;
    const Finished alone = run_program(Words{"env", "PMI_RANK=0", "PMI_SIZE=1", bad, RINGATTN_TOOL} + job);
    EXPECT_TRUE(alone.code == 0 || alone.code == 4) << bad << ": " << alone.code << alone.err;
    EXPECT_EQ(count_messages(alone.err), alone.code == 0 ? 0 : 1) << alone.err;
  }
}

// It also leaves with 1 where it has too few files, or doesn't know a component that its settings name.
TEST(Mpi, AStartThatMpiRefusesIsFour) {
  const Words job = Words{RINGATTN_TOOL, "run", "--backend", "cpu"} + small_job();
  const Words few{"sh", "-c", "ulimit -n 20; exec env PMI_RANK=0 PMI_SIZE=1 \"$@\"", "sh"};
  const Words unknown{"env", "PMI_RANK=0", "PMI_SIZE=1", "OMPI_MCA_pml=none"};
  for (const Words& words : {few, unknown}) {
    const Finished run = run_program(words + job);
    EXPECT_EQ(run.code, 4) << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
  }
}

TEST(Mpi, BenchIsOneTableAndTheSlowestRanksLines) {
  const Words words{"bench", "--seq",      "100,300", "--heads",   "2", "--kv-heads",
                    "1",     "--head-dim", "16",      "--samples", "2"};
  const Finished run = mpi_tool(3, words + Words{"--against", "compute", "--jsonl", "-"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(std::count(run.out.begin(), run.out.end(), '\n'), 4) << run.out;
  EXPECT_EQ(json_at(run.out.substr(0, run.out.find('\n')), "/world"), "3");
  EXPECT_TRUE(has(run.err, "compute")) << run.err;
  // The gate's verdict is rank 0's, and every rank leaves with it.
  const TemporaryFolder folder;
  const std::string lines = folder.file("lines");
  ASSERT_EQ(mpi_tool(2, words + Words{"--jsonl", lines}).code, 0);
  EXPECT_EQ(mpi_tool(2, words + Words{"--baseline", lines, "--fail-above", "1000000"}).code, 0);
  EXPECT_EQ(mpi_tool(3, words + Words{"--baseline", lines}).code, 3);
}

TEST(Mpi, PrintsOnce) {
  const auto lines_with = [](const std::string& text, const std::string& part) {
    int count = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
    return count;
  };
  EXPECT_EQ(lines_with(mpi_tool(2, {"--version"}).out, "ringattn "), 1);
  EXPECT_EQ(lines_with(mpi_tool(2, {"plan", "--world", "4"}).out, "# machine: "), 1);
  EXPECT_EQ(lines_with(mpi_tool(2, {"info"}).out, "kernels of each op in order"), 1);
  EXPECT_EQ(lines_with(mpi_tool(2, Words{"run"} + small_job()).out, "# job: "), 1);
}

TEST(Mpi, RanksThatWereConfiguredDifferentlyRefuse) {
  // Only rank 1 reads another length. The report is rank 0's, though no rank has begun with the job.
  const TemporaryFolder folder;
  const std::string report = folder.file("report.json");
  const Finished run = run_program({"sh", "-c",
                                    std::string(RINGATTN_MPIRUN) + " " + RINGATTN_MPIRUN_FLAGS + " -np 1 " +
                                        RINGATTN_TOOL + " run --synthetic 7 --seq 64 --json " + report + " : -np 1 " +
                                        RINGATTN_TOOL + " run --synthetic 7 --seq 65"},
                                   {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
  EXPECT_EQ(run.code, 2) << run.err;
  EXPECT_EQ(count_messages(run.err), 1) << run.err;
  EXPECT_TRUE(has(run.err, "different configurations (--seq 65 (flag) against --seq 64 (flag)). Give")) << run.err;
  EXPECT_EQ(check_report(read_whole(report)), "") << run.err;
  EXPECT_EQ(json_at(read_whole(report), "/error/code"), "2");
}

// `first` and `second` are what rank 0 and rank 1 are started with, the program's name aside.
Finished mpi_pair(const std::string& first, const std::string& second) {
  return run_program(
      {"sh", "-c",
       std::string(RINGATTN_MPIRUN) + " " + RINGATTN_MPIRUN_FLAGS + " -np 1 " + first + " : -np 1 " + second},
      {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
}

// Rank 1 was given what needs no world, and has left when rank 0 comes to say why it can't begin. As rank 1 never began
// MPI, mpirun kills rank 0 a second later. Where it says so and rank 0 has had no say, as on a busy host, it is tried
// anew.
TEST(Mpi, ARefusalThatNobodyComesToHearIsPrinted) {
  Finished run;
  bool killed = true;
  for (int tries = 0; tries < 10 && killed; ++tries) {
    run = mpi_pair(std::string(RINGATTN_TOOL) + " run --softcp 1",
                   std::string(RINGATTN_TOOL) + " plan --world 2 --seq 1k");
    killed = run.code == 1 && count_messages(run.err) == 0 && has(run.err, "exiting improperly");
  }
  EXPECT_EQ(run.code, 2) << run.err;
  EXPECT_EQ(count_messages(run.err), 1) << run.err;
  EXPECT_TRUE(has(run.err, "--softcp")) << run.err;
}

// A path that is the same on all ranks may lead to another file on each.
TEST(Mpi, RanksThatReadDifferentFilesRefuse) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("a"));
  std::filesystem::create_directory(folder.file("b"));
  FileShape shape;
  shape.sinks = {0.0F, 1.0F, 2.0F, 3.0F};
  const std::string a = folder.write("a/in.safetensors", safetensors_bytes(shape));
  shape.sinks[3] = 4.0F;
  const std::string b = folder.write("b/in.safetensors", safetensors_bytes(shape));
  const auto started = [&](const std::string& where, const std::string& words) {
    return "-wdir " + folder.file(where) + " " + RINGATTN_TOOL + " " + words;
  };
  const std::string out_a = folder.file("a/out.safetensors");
  const std::string out_b = folder.file("b/out.safetensors");
  for (const std::string words :
       {"run --input in.safetensors", "verify --input in.safetensors", "bench --input in.safetensors --samples 1"}) {
    const Finished run = mpi_pair(started("a", words), started("b", words));
    EXPECT_EQ(run.code, 3) << words << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
    EXPECT_TRUE(has(run.err, "read different files (in.safetensors: the XXH3-128 of samples of its data is "))
        << run.err;
  }

  // Copies are one input; the results to compare with may differ, too.
  ASSERT_EQ(tool({"run", "--input", a, "--output", out_a}).code, 0);
  ASSERT_EQ(tool({"run", "--input", b, "--output", out_b}).code, 0);
  std::filesystem::copy_file(a, b, std::filesystem::copy_options::overwrite_existing);
  const std::string run_words = "run --input in.safetensors";
  const Finished copies = mpi_pair(started("a", run_words), started("b", run_words));
  EXPECT_EQ(copies.code, 0) << copies.err;
  EXPECT_EQ(digest_of(copies.out), digest_of(tool({"run", "--input", a}).out));
  const std::string against = "verify --input in.safetensors --against out.safetensors";
  const Finished results = mpi_pair(started("a", against), started("b", against));
  EXPECT_EQ(results.code, 3) << results.err;
  EXPECT_TRUE(has(results.err, "read different files (out.safetensors: ")) << results.err;
}

// A safetensors file of this header.
std::string with_header(const std::string& json, const std::string& data) {
  const std::uint64_t length = json.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + json + data;
}

// Files that are equal wherever they are sampled: 32 pieces of 4 KiB of each tensor.
TEST(Mpi, RanksThatReadFilesWithEqualSamplesRefuse) {
  const TemporaryFolder folder;
  constexpr std::int64_t kTensor = std::int64_t{4096} * 64 * 2;
  const std::string json = R"({"q":{"dtype":"F16","shape":[4096,1,64],"data_offsets":[0,524288]},)"
                           R"("k":{"dtype":"F16","shape":[4096,1,64],"data_offsets":[524288,1048576]},)"
                           R"("v":{"dtype":"F16","shape":[4096,1,64],"data_offsets":[1048576,1572864]}})";
  for (const char* where : {"a", "b"}) {
    std::filesystem::create_directory(folder.file(where));
    std::string data(3 * kTensor, '\x21');
    if (*where == 'b') {
      const std::int64_t last = kTensor - 4096;
      std::vector<bool> sampled(static_cast<std::size_t>(kTensor));
      for (std::int64_t i = 0; i < 32; ++i) {
        const std::int64_t from = i == 31 ? last : last / 31 * i;
        std::fill_n(sampled.begin() + from, 4096, true);
      }
      for (std::size_t i = 0; i < data.size(); ++i) data[i] = sampled[i % sampled.size()] ? data[i] : '\x25';
    }
    folder.write(std::string(where) + "/in.safetensors", with_header(json, data));
  }
  const auto started = [&](const std::string& where) {
    return "-wdir " + folder.file(where) + " " + RINGATTN_TOOL + " run --input in.safetensors";
  };
  const Finished run = mpi_pair(started("a"), started("b"));
  EXPECT_EQ(run.code, 3) << run.out << run.err;
  EXPECT_TRUE(has(run.err, "read different files (in.safetensors: the XXH3-128 of its data, of 64 MB at the most, is "))
      << run.err;
  EXPECT_EQ(mpi_pair(started("b"), started("b")).code, 0);
}

// A mask of key blocks is input, too.
TEST(Mpi, RanksThatReadDifferentMasksRefuse) {
  const TemporaryFolder folder;
  const auto mask = [&](const std::string& where, std::int64_t queries, char listed) {
    const std::int64_t bytes = queries * 16;
    const std::string json =
        fmt::format(R"({{"block_mask":{{"dtype":"U8","shape":[1,{},16],"data_offsets":[0,{}]}}}})", queries, bytes);
    std::string entries(static_cast<std::size_t>(bytes), '\1');
    entries[3] = listed;
    folder.write(where + "/mask.safetensors", with_header(json, entries));
  };
  std::filesystem::create_directory(folder.file("a"));
  std::filesystem::create_directory(folder.file("b"));
  const std::string job =
      " run --synthetic 7 --seq 2k --heads 2 --kv-heads 1 --head-dim 32 --block-mask mask.safetensors";
  const auto started = [&](const std::string& where, const std::string& op) {
    return "-wdir " + folder.file(where) + " " + RINGATTN_TOOL + job + op;
  };
  for (const std::string op : {" --op decode", ""}) {
    const std::int64_t queries = op.empty() ? 16 : 1;
    mask("a", queries, '\1');
    mask("b", queries, '\0');
    const Finished run = mpi_pair(started("a", op), started("b", op));
    EXPECT_EQ(run.code, 3) << op << run.out << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
    EXPECT_TRUE(has(run.err, "read different files (mask.safetensors: ")) << run.err;
    mask("b", queries, '\1');
    const Finished copies = mpi_pair(started("a", op), started("b", op));
    EXPECT_EQ(copies.code, 0) << op << copies.err;
  }
}

// Rank 0 reads it for all: another one elsewhere can't make a rank come to another verdict.
TEST(Mpi, OneGoldenFileCounts) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.file("a"));
  std::filesystem::create_directory(folder.file("b"));
  const Words job = Words{"verify"} + small_job();
  ASSERT_EQ(tool(job + Words{"--record", folder.file("a/g.json")}).code, 0);
  folder.write("b/g.json", "nonsense");
  std::string words;
  for (const std::string& word : job + Words{"--golden", "g.json"}) words += " " + word;
  const std::string wdir_a = "-wdir " + folder.file("a") + " " + RINGATTN_TOOL + words;
  const std::string wdir_b = "-wdir " + folder.file("b") + " " + RINGATTN_TOOL + words;
  const Finished good = mpi_pair(wdir_a, wdir_b);
  EXPECT_EQ(good.code, 0) << good.err;
  const Finished bad = mpi_pair(wdir_b, wdir_a);
  EXPECT_EQ(bad.code, 3) << bad.err;
  EXPECT_EQ(count_messages(bad.err), 1) << bad.err;
}

TEST(Mpi, RanksThatWantDifferentWorldsRefuse) {
  // What a rank asks of its world decides in which calls it meets the others. So each of these would leave rank 0 and
  // rank 1 in different ones, if they did not compare first.
  struct Case {
    std::string variables;
    std::string words;
    std::string difference;
  };
  const Case cases[] = {{"", "run --synthetic 7 --seq 64 --kernel cpu_attention",
                         R"(--kernel "cpu_attention" (flag) against --kernel "auto" (default))"},
                        {"", "run --synthetic 7 --seq 64 --backend cuda",
                         R"(--backend "cuda" (flag) against --backend "auto" (default))"},
                        {"", "run --synthetic 7 --seq 64 --transport mpi",
                         R"(--transport "mpi" (flag) against --transport "auto" (default))"},
                        {"-x RINGATTN_PACE=100m ", "run --synthetic 7 --seq 64",
                         "RINGATTN_PACE is 104857600 against RINGATTN_PACE is not set"},
                        {"", "verify --synthetic 7 --seq 64", "`ringattn verify` against `ringattn run`"}};
  for (const Case& other : cases) {
    const Finished run =
        run_program({"sh", "-c",
                     std::string(RINGATTN_MPIRUN) + " " + RINGATTN_MPIRUN_FLAGS + " -np 1 " + RINGATTN_TOOL +
                         " run --synthetic 7 --seq 64 : -np 1 " + other.variables + RINGATTN_TOOL + " " + other.words},
                    {{"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}});
    EXPECT_EQ(run.code, 2) << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
    EXPECT_TRUE(has(run.err, "different configurations (" + other.difference + "). Give")) << run.err;
  }
}

}  // namespace
}  // namespace ringattn::testing
