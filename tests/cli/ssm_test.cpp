// SPDX-License-Identifier: Apache-2.0
// Scans by the program: files of both kinds, seeds, and what is refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

// Jobs of milliseconds whose length divides nothing.
Words ssd_job() {
  return {"--op", "ssd", "--synthetic", "7", "--seq", "300", "--heads", "8", "--head-dim", "16", "--state-dim", "16"};
}
Words selective_job() {
  return {"--op", "selective_scan", "--synthetic", "7", "--seq", "300", "--heads", "8", "--state-dim", "16"};
}
// Two super-segments and a bit, so that states are sent, of few numbers.
Words long_job() {
  return {"--op", "ssd",        "--synthetic", "7",           "--seq", "131100",  "--heads",
          "2",    "--head-dim", "8",           "--state-dim", "8",     "--dtype", "fp32"};
}

std::string digest(const Words& words) {
  const Finished run = tool(Words{"run"} + words);
  EXPECT_EQ(run.code, 0) << run.err;
  return digest_of(run.out);
}

TEST(SsmFiles, AreThoseOfTheSeed) {
  const TemporaryFolder folder;
  const std::string ssd = write_tensors(folder.file("ssd"), ssm_tensors({}));
  const std::string selective = write_tensors(folder.file("selective"), ssm_tensors({.selective = true}));
  EXPECT_EQ(digest({"--input", ssd}), digest(ssd_job()));
  EXPECT_EQ(digest({"--input", selective}), digest(selective_job()));
  const Finished file = tool({"run", "--input", selective});
  EXPECT_TRUE(has(file.out, "# job: selective scan, bf16, 8 channels, state 16")) << file.out;
}

TEST(SsmFiles, GiveTheSameBytesOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  const SsmFile shape{.lengths = {131'100, 70}, .heads = 2, .head_dim = 8, .state_dim = 8};
  const std::string input = write_tensors(folder.file("in"), ssm_tensors(shape));
  for (const char* ranks : {"1", "2", "3"}) {
    const std::string path = folder.file(ranks);
    const Finished run = tool({"run", "--input", input, "--final-states", "--ranks", ranks, "--output", path});
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_TRUE(read_whole(path) == read_whole(folder.file("1"))) << ranks << " ranks";
  }
  const std::string whole = read_whole(folder.file("1"));
  EXPECT_TRUE(has(whole, R"("op":"ssd")"));
  EXPECT_TRUE(has(whole, R"("state_dim":"8")"));
  EXPECT_TRUE(has(whole, R"("shape":[131170, 2, 8])"));  // y
  EXPECT_TRUE(has(whole, R"("shape":[2, 2, 8, 8])"));    // final_states
  EXPECT_FALSE(has(whole, "config.mask"));
  EXPECT_EQ(tool({"verify", "--input", input, "--against", folder.file("1"), "--ranks", "2"}).code, 0);
  // Without states, only y is compared.
  const std::string bare = folder.file("bare");
  EXPECT_EQ(tool({"run", "--input", input, "--output", bare}).code, 0);
  EXPECT_FALSE(has(read_whole(bare), "final_states"));
  const Finished against = tool({"verify", "--input", input, "--against", bare});
  EXPECT_TRUE(has(against.out, "it holds no final_states")) << against.out;
  EXPECT_EQ(against.code, 0);
  const Finished other = tool({"verify", "--input", input, "--against", bare, "--dt-limit", "0,0.01"});
  EXPECT_EQ(other.code, 1) << other.out;
  EXPECT_TRUE(has(other.out, "first difference: y at sequence 0, token 0, head 0, dim 0: ")) << other.out;
}

TEST(SsmFiles, GoOnFromWhereAnotherEnded) {
  // A sequence cut after a super-segment, and its end from the states of its beginning.
  const TemporaryFolder folder;
  const SsmFile shape{.lengths = {65'600}, .heads = 2, .head_dim = 8, .state_dim = 8};
  const NamedTensors whole = ssm_tensors(shape);
  const auto cut = [&](std::int64_t begin, std::int64_t end) {
    NamedTensors part = whole;
    for (auto& [name, tensor] : part) {
      if (tensor.shape[0] != 65'600) continue;
      const auto row = static_cast<std::ptrdiff_t>(tensor.bytes.size() / 65'600);
      tensor.bytes = {whole.at(name).bytes.begin() + begin * row, whole.at(name).bytes.begin() + end * row};
      tensor.shape[0] = end - begin;
    }
    return part;
  };
  const std::string first = folder.file("first");
  const Finished beginning =
      tool({"run", "--input", write_tensors(folder.file("a"), cut(0, 65'536)), "--final-states", "--output", first});
  ASSERT_EQ(beginning.code, 0) << beginning.err;
  NamedTensors rest = cut(65'536, 65'600);
  const SafetensorsFile output(first);
  const TensorSource states = output.tensor("final_states");
  NamedTensor initial{FileDtype::kF32, states.info->shape, std::vector<std::byte>(2 * 8 * 8 * 4)};
  states.shard->read(*states.info, 0, initial.bytes);
  rest["initial_states"] = initial;
  const auto states_of = [&](const NamedTensors& tensors) {
    const Finished run = tool({"run", "--input", write_tensors(folder.file("b"), tensors), "--final-states"});
    EXPECT_EQ(run.code, 0) << run.err;
    const std::size_t at = run.out.find("# digest of final_states: ");
    return run.out.substr(at, run.out.find('\n', at) - at);
  };
  EXPECT_EQ(states_of(rest), states_of(whole));
  rest.erase("initial_states");
  EXPECT_NE(states_of(rest), states_of(whole));
}

TEST(SsmFiles, AreRefusedByEveryCommandBeforeAnythingIsComputed) {
  const TemporaryFolder folder;
  NamedTensors tensors = ssm_tensors({});
  tensors["dt"].shape = {150, 16};
  const std::string bad = write_tensors(folder.file("bad"), tensors);
  for (const char* command : {"run", "verify", "bench", "plan"}) {
    const Finished refused = tool({command, "--input", bad});
    EXPECT_EQ(refused.code, 3) << refused.err;
    EXPECT_TRUE(has(refused.err, "`dt` of " + bad + " has BF16 [150, 16]")) << refused.err;
    EXPECT_TRUE(has(refused.err, "has BF16 [300, 8, 16]")) << refused.err;
  }
}

TEST(Ssm, RefusesFlagsByName) {
  for (const Words& flags : {Words{"--kv-heads", "2"},
                             {"--mask", "full"},
                             {"--window", "64,0"},
                             {"--layout", "striped"},
                             {"--block", "64"},
                             {"--softcap", "2"},
                             {"--checksum"},
                             {"--block-mask", "window:64"}}) {
    for (const Words& job : {ssd_job(), selective_job()}) {
      const Finished refused = tool(Words{"run"} + job + flags);
      EXPECT_EQ(refused.code, 2) << refused.err;
      EXPECT_TRUE(has(refused.err, flags[0] + " contradicts --op " + job[1])) << refused.err;
    }
  }
  EXPECT_EQ(tool(Words{"run", "--head-dim", "8"} + selective_job()).code, 2);
  EXPECT_EQ(tool(Words{"verify", "--decode"} + ssd_job()).code, 2);
  EXPECT_EQ(tool(Words{"run", "--dt-limit", "2,1"} + ssd_job()).code, 2);
  EXPECT_EQ(tool(Words{"run", "--order", "htd"} + ssd_job()).code, 2);
  for (const Words& flags : {Words{"--state-dim", "64"},
                             {"--groups", "2"},
                             {"--conv-width", "4"},
                             {"--dt-softplus", "on"},
                             {"--dt-limit", "0,inf"},
                             {"--final-states"}}) {
    for (const char* op : {"attention", "decode", "mla"}) {
      const Finished refused = tool(Words{"run", "--op", op, "--synthetic", "7", "--seq", "50"} + flags);
      EXPECT_EQ(refused.code, 2) << refused.err;
      EXPECT_TRUE(has(refused.err, flags[0] + " contradicts --op")) << refused.err;
    }
  }
  const TemporaryFolder folder;
  const std::string input = write_tensors(folder.file("in"), ssm_tensors({}));
  const Finished file = tool({"run", "--input", input, "--mask", "full"});
  EXPECT_EQ(file.code, 2);
  EXPECT_TRUE(has(file.err, "--mask contradicts a file with Mamba-2 tensors")) << file.err;
}

TEST(Ssm, HasDefaultsOfItsOwn) {
  const Finished ssd = tool({"plan", "--op", "ssd", "--seq", "1k"});
  ASSERT_EQ(ssd.code, 0) << ssd.err;
  EXPECT_TRUE(has(ssd.out, "# job: SSD, bf16, 8 heads of 64, state 128, 1 group")) << ssd.out;
  const Finished selective = tool({"plan", "--op", "selective_scan", "--seq", "1k"});
  EXPECT_TRUE(has(selective.out, "# job: selective scan, bf16, 256 channels, state 16, 1 group")) << selective.out;
  const Finished printed = tool({"run", "--op", "ssd", "--print-config"});
  EXPECT_TRUE(has(printed.out, "# mask does not belong to --op ssd")) << printed.out;
  const TemporaryFolder folder;
  const std::string config = folder.write("job.toml", printed.out);
  EXPECT_EQ(tool({"plan", "--config", config}).code, 0);
  // What a file says stands there, and nothing that is another op's.
  const std::string input = write_tensors(folder.file("in"), ssm_tensors({}));
  const Finished of_file = tool({"run", "--input", input, "--print-config"});
  EXPECT_TRUE(has(of_file.out, "# heads = 8 comes from the input")) << of_file.out;
  EXPECT_TRUE(has(of_file.out, "# mask does not belong to --op ssd")) << of_file.out;
  EXPECT_EQ(tool({"run", "--config", folder.write("file.toml", of_file.out)}).code, 0);
}

// The time of the state passing, beside what hides it.
TEST(Ssm, IsTraced) {
  const TemporaryFolder folder;
  const std::string path = folder.file("trace.json");
  const Finished run = tool(Words{"run", "--ranks", "2", "--trace", path} + long_job());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_TRUE(has(run.out, "# trace: " + path)) << run.out;
  const std::string trace = read_whole(path);
  std::map<std::string, int> counts;                       // of lanes of both ranks
  std::map<std::string, std::pair<double, double>> spans;  // of the second rank's halves
  for (int i = 0; json_at(trace, fmt::format("/traceEvents/{}", i)) != "absent"; ++i) {
    const auto at = [&](const char* member) { return json_at(trace, fmt::format("/traceEvents/{}/{}", i, member)); };
    if (at("ph") != "\"X\"") continue;
    ++counts[at("cat")];
    const double begin = std::stod(at("ts"));
    EXPECT_GE(std::stod(at("dur")), 0.0);
    if (at("pid") == "1") spans[at("cat") + at("name")] = {begin, begin + std::stod(at("dur"))};
  }
  // Two heads in two halves on two ranks.
  for (const char* lane : {"\"compute\"", "\"finish\"", "\"states\""}) EXPECT_EQ(counts[lane], 4) << lane;
  EXPECT_GE(counts["\"wait\""], 2);
  // The first half's states are sent while the second is computed, the second's while the first is finished.
  const auto overlap = [&](const std::string& a, const std::string& b) {
    return spans[a].first <= spans[b].first && spans[b].second <= spans[a].second;
  };
  EXPECT_TRUE(overlap("\"states\"\"heads 0 to 0\"", "\"compute\"\"heads 1 to 1\"")) << trace;
  EXPECT_TRUE(overlap("\"states\"\"heads 1 to 1\"", "\"finish\"\"heads 0 to 0\"")) << trace;
}

TEST(Ssm, IsReported) {
  const Finished run = tool(Words{"run", "--json", "-", "--ranks", "2", "--final-states"} + long_job());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(check_report(run.out), "");
  EXPECT_EQ(json_at(run.out, "/op"), "\"ssd\"");
  EXPECT_EQ(json_at(run.out, "/job/state_dim"), "8");
  EXPECT_EQ(json_at(run.out, "/job/tokens"), "131100");
  EXPECT_EQ(json_at(run.out, "/job/dt_max"), "null");
  EXPECT_EQ(json_at(run.out, "/plan/bytes_moved"), "512");  // 2 heads of 8 x 8 numbers
  EXPECT_EQ(json_at(run.out, "/plan/memory/exchange"), "512");
  EXPECT_EQ(json_at(run.out, "/digest/lse"), "null");
  EXPECT_EQ(json_at(run.out, "/digest/out").size(), 34U);
  EXPECT_EQ(json_at(run.out, "/digest/final_states").size(), 34U);
  EXPECT_EQ(json_at(run.out, "/non_finite_inputs/rows"), "0");
  EXPECT_GT(std::stod(json_at(run.out, "/tflops_per_rank")), 0.0);
  EXPECT_GE(std::stod(json_at(run.out, "/exposed_comm_ms")), 0.0);
}

TEST(Ssm, IsVerifiedInWorldsAndResumed) {
  const Finished shapes = tool(Words{"verify", "--ranks", "3"} + long_job());
  ASSERT_EQ(shapes.code, 0) << shapes.out << shapes.err;
  EXPECT_TRUE(has(shapes.out, "# 6 shapes")) << shapes.out;
  EXPECT_TRUE(has(shapes.out, "in-turn      whole       2      PASS")) << shapes.out;
  EXPECT_TRUE(has(shapes.out, "neighbours    resumed")) << shapes.out;
  const Finished brief = tool(Words{"verify", "--ranks", "2"} + selective_job());
  ASSERT_EQ(brief.code, 0) << brief.out << brief.err;
  EXPECT_TRUE(has(brief.out, "# no sequence is longer than a super-segment")) << brief.out;
}

TEST(Ssm, IsVerifiedAgainstTheOracle) {
  for (const Words& job : {ssd_job(), selective_job()}) {
    for (const char* dtype : {"bf16", "fp16", "fp32"}) {
      const Finished oracle = tool(Words{"verify", "--dtype", dtype, "--against", "oracle", "--ranks", "2"} + job);
      EXPECT_EQ(oracle.code, 0) << oracle.out << oracle.err;
      EXPECT_TRUE(has(oracle.out, " rows against the fp64 oracle")) << oracle.out;
      EXPECT_TRUE(has(oracle.out, "  y: greatest error 0.")) << oracle.out;
      EXPECT_TRUE(has(oracle.out, "  final states: greatest error 0.")) << oracle.out;
    }
  }
  const Finished reported = tool(Words{"verify", "--against", "oracle", "--rows", "9", "--json", "-"} + ssd_job());
  EXPECT_EQ(check_report(reported.out), "");
  EXPECT_GT(std::stod(json_at(reported.out, "/accuracy/out/allowed")), 0.0);
  EXPECT_GT(std::stod(json_at(reported.out, "/accuracy/final_states/allowed")), 0.0);
}

// fp16's smallest numbers lie 2^-24 apart: a small y is rounded by more than a part of itself.
TEST(Ssm, IsVerifiedWhereRowsOfFp16AreSubnormal) {
  const TemporaryFolder folder;
  NamedTensors tensors = ssm_tensors({.lengths = {70}, .heads = 2, .dtype = Dtype::kF16});
  NamedTensor& x = tensors["x"];
  for (std::size_t at = 0; at < x.bytes.size(); at += size_of(Dtype::kF16)) {
    std::byte* const value = x.bytes.data() + at;
    store_element(value, Dtype::kF16, load_element(value, Dtype::kF16) * 0x1p-18F);
  }
  const std::string input = write_tensors(folder.file("small"), tensors);
  const Finished verified = tool({"verify", "--input", input, "--against", "oracle"});
  EXPECT_EQ(verified.code, 0) << verified.out;
}

TEST(Ssm, IsVerifiedAgainstGoldenFiles) {
  const TemporaryFolder folder;
  const std::string golden = folder.file("golden");
  EXPECT_EQ(tool(Words{"verify", "--record", golden} + ssd_job()).code, 0);
  EXPECT_EQ(json_at(read_whole(golden), "/digest_lse"), "absent");
  EXPECT_EQ(json_at(read_whole(golden), "/digest_final_states").size(), 34U);
  EXPECT_EQ(tool(Words{"verify", "--golden", golden, "--ranks", "2"} + ssd_job()).code, 0);
  EXPECT_EQ(tool(Words{"verify", "--golden", golden} + selective_job()).code, 2);  // another job
  EXPECT_EQ(tool(Words{"verify", "--golden", golden, "--dt-limit", "0,1"} + ssd_job()).code, 2);
  std::string text = read_whole(golden);
  const std::size_t at = text.find("digest_final_states\": \"") + 23;
  text[at] = text[at] == '0' ? '1' : '0';
  const Finished changed = tool(Words{"verify", "--golden", folder.write("changed", text)} + ssd_job());
  EXPECT_EQ(changed.code, 1) << changed.out << changed.err;
  EXPECT_TRUE(has(changed.out, "final_states: recorded ")) << changed.out;
}

// What a run assumes of GPUs, where there are none, too; and what a convolution in front takes.
TEST(Ssm, IsPlannedByTheKernelsMachineAndWithItsConv1d) {
  const TemporaryFolder folder;
  const auto plan = [](const Words& words) {
    return tool(Words{"plan", "--op", "ssd", "--seq", "128k", "--world", "2"} + words);
  };
  const std::string slow = folder.write(
      "slow.json",
      R"({"name": "slow", "flops_per_second": 1e9, "link_bytes_per_second": 1e9, "latency_seconds": 1e-3})");
  const auto expect_machine = [](const Finished& planned, const char* machine, bool assumed) {
    ASSERT_EQ(planned.code, 0) << planned.err;
    EXPECT_TRUE(has(planned.out, machine)) << planned.out;
    EXPECT_EQ(has(planned.out, "a default machine description, not for a measured machine"), assumed) << planned.out;
  };
  for (const char* kernel : {"cpu_ssd", "sm80_ssd"}) {
    const bool gpu = std::string_view(kernel) != "cpu_ssd";
    if (gpu && !has(tool({"info"}).out, kernel)) continue;  // a build without CUDA
    const Words words{"--kernel", kernel};
    expect_machine(
        plan(words),
        gpu ? "; machine default GPU: 250 GB/s, latency 15 us" : "; machine default: 5 GB/s, latency 20 us\n", true);
    expect_machine(plan(words + Words{"--machine", slow}), "; machine slow: 1 GB/s, latency 1000 us", false);
    const auto estimated = [](const Finished& planned) {
      return std::stod(json_at(planned.out, "/rows/0/estimated_ms"));
    };
    const Words json{"--heads", "8", "--head-dim", "64", "--state-dim", "128", "--json", "-"};
    const double scan = estimated(plan(words + json));
    const double layer = estimated(plan(words + json + Words{"--conv-width", "4"}));
    const double convolution =
        estimated(tool({"plan", "--op", "convolution", "--seq", "128k", "--heads", "768", "--conv-width", "4",
                        "--world", "2", "--json", "-", "--kernel", gpu ? "sm80_conv1d" : "cpu_conv1d"}));
    EXPECT_NEAR(layer, scan + convolution, 1e-2 * layer) << kernel;  // its last tiles are not counted
    EXPECT_GT(convolution, 1e-2 * scan) << kernel;
  }
}

TEST(Ssm, IsMeasuredAndPlanned) {
  const TemporaryFolder folder;
  const std::string lines = folder.file("lines");
  const Words sweep{"bench",      "--op", "ssd",         "--seq", "64,128",    "--heads", "2",
                    "--head-dim", "8",    "--state-dim", "8",     "--samples", "2"};
  const Finished bench = tool(sweep + Words{"--jsonl", lines});
  ASSERT_EQ(bench.code, 0) << bench.err;
  const std::string text = read_whole(lines);
  const std::string line = text.substr(0, text.find('\n'));
  EXPECT_EQ(json_at(line, "/job/op"), "\"ssd\"");
  EXPECT_EQ(json_at(line, "/job/state_dim"), "8");
  EXPECT_GT(std::stod(json_at(line, "/tokens_per_s")), 0.0);
  EXPECT_GT(std::stod(json_at(line, "/gb_per_s")), 0.0);
  EXPECT_TRUE(has(tool(sweep + Words{"--against", lines}).out, "ours/theirs"));
  EXPECT_EQ(tool(sweep + Words{"--against", "sgemm"}).code, 2);
  const Finished other = tool({"bench", "--op", "selective_scan", "--seq", "64", "--against", lines});
  EXPECT_EQ(other.code, 3) << other.err;

  const Finished plan = tool(Words{"plan", "--world", "2"} + long_job());
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_TRUE(has(plan.out, "# rank 1 owns 65564 tokens, receives 512 B: 0:65536-131100")) << plan.out;
  const Finished list =
      tool({"plan", "--op", "ssd", "--seq", "64k,2m", "--world", "2,8", "--memory", "1g", "--json", "-"});
  ASSERT_EQ(list.code, 0) << list.err;
  EXPECT_EQ(json_at(list.out, "/op"), "\"ssd\"");
  EXPECT_EQ(json_at(list.out, "/rows/0/ranks/0/tokens"), "65536");
  EXPECT_EQ(tool({"plan", "--op", "ssd", "--seq", "2m", "--memory", "1m"}).code, 5);
  EXPECT_EQ(tool(Words{"run", "--memory", "4k"} + ssd_job()).code, 5);
}

// Shapes only, as Hugging Face writes them.
constexpr const char* kMamba2 = R"({"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "state_size": 16,
  "n_groups": 1, "conv_kernel": 3, "time_step_limit": [0.0, Infinity]})";
constexpr const char* kHybrid = R"({"num_attention_heads": 4, "head_dim": 16, "hidden_size": 64,
  "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "hybrid_override_pattern": "M*-M"})";

TEST(ModelConfigFlag, GivesSsm) {
  const TemporaryFolder folder;
  const std::string config = folder.write("config.json", kMamba2);
  const Finished run = tool({"run", "--model-config", config, "--synthetic", "7", "--seq", "300", "--json", "-"});
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_EQ(json_at(run.out, "/op"), "\"ssd\"");
  EXPECT_EQ(json_at(run.out, "/job/dt_min"), "0");
  EXPECT_EQ(json_at(run.out, "/job/dt_max"), "null");
  // Softplus leaves nothing to limit.
  EXPECT_EQ(json_at(run.out, "/digest/out"), "\"" + digest(ssd_job() + Words{"--conv-width", "3"}) + "\"");
  EXPECT_EQ(tool({"plan", "--op", "attention", "--model-config", config}).code, 2);
  EXPECT_EQ(tool({"plan", "--op", "selective_scan", "--model-config", config}).code, 2);
  const std::string first =
      folder.write("first.json", R"({"model_type": "mamba", "state_size": 16, "hidden_size": 64, "expand": 2})");
  EXPECT_TRUE(has(tool({"plan", "--model-config", first}).out, "# job: selective scan, bf16, 128 channels, state 16"));
}

TEST(ModelConfigFlag, IsComparedWithTheFilesSsm) {
  const TemporaryFolder folder;
  const std::string config = folder.write("config.json", kMamba2);
  const std::string input = write_tensors(folder.file("in"), ssm_tensors({}));
  EXPECT_EQ(tool({"run", "--input", input, "--model-config", config}).code, 0);
  const auto expect_refused = [&](const SsmFile& shape, const char* what) {
    const std::string other = write_tensors(folder.file("other"), ssm_tensors(shape));
    for (const char* command : {"run", "verify", "bench", "plan"}) {
      const Finished refused = tool({command, "--input", other, "--model-config", config});
      EXPECT_EQ(refused.code, 2) << refused.err;
      EXPECT_TRUE(has(refused.err, "--model-config " + config + " contradicts --input " + other)) << refused.err;
      EXPECT_TRUE(has(refused.err, what)) << refused.err;
    }
  };
  expect_refused({.state_dim = 32}, "the state's dim is 16 in the config and 32");
  expect_refused({.head_dim = 32}, "the dim of a head is 16 in the config and 32");
  expect_refused({.heads = 6}, "the number of heads is 8 in the config and 6");
  expect_refused({.selective = true}, "the file holds an SSM of Mamba-1, and the config is of Mamba-2");
  NamedTensors convolved = ssm_tensors({});
  convolved["conv1d_weight"] = float_list(std::vector<float>(160 * 4, 0.5F), {160, 4});
  const Finished wide =
      tool({"run", "--input", write_tensors(folder.file("wide"), convolved), "--model-config", config});
  EXPECT_EQ(wide.code, 2);
  EXPECT_TRUE(has(wide.err, "the convolution's width is 3 in the config and 4")) << wide.err;
  const Finished report = tool({"run", "--input", input, "--json", "-"});
  EXPECT_EQ(json_at(report.out, "/config/op"), "\"ssd\"");
  EXPECT_EQ(json_at(report.out, "/config/state-dim"), "16");
}

TEST(ModelConfigFlag, GivesAHybridsLayers) {
  const TemporaryFolder folder;
  const std::string config = folder.write("config.json", kHybrid);
  const auto job_of = [&](const Words& flags) {
    const Finished plan = tool(Words{"plan", "--model-config", config, "--seq", "300"} + flags);
    EXPECT_EQ(plan.code, 0) << plan.err;
    const std::size_t at = plan.out.find("# job: ");
    return plan.out.substr(at, plan.out.find('\n', at) - at);
  };
  EXPECT_TRUE(has(job_of({"--layer", "0"}), "# job: SSD, bf16, 8 heads of 16, state 16"));
  EXPECT_TRUE(has(job_of({"--op", "ssd"}), "# job: SSD, bf16, 8 heads of 16, state 16"));
  EXPECT_TRUE(has(job_of({"--layer", "1"}), "heads 4/4")) << job_of({"--layer", "1"});
  EXPECT_TRUE(has(job_of({"--op", "attention"}), "heads 4/4"));
  const Finished unnamed = tool({"plan", "--model-config", config, "--seq", "300"});
  EXPECT_EQ(unnamed.code, 2);
  EXPECT_TRUE(
      has(unnamed.err, "layers of several kinds (2 `mamba`, 1 `full_attention`, 1 `-`). Name one with --layer 0."))
      << unnamed.err;
  const Finished neither = tool({"plan", "--model-config", config, "--layer", "2"});
  EXPECT_EQ(neither.code, 2);
  EXPECT_TRUE(has(neither.err, "neither attention nor an SSM")) << neither.err;
}

}  // namespace
}  // namespace ringattn::testing
