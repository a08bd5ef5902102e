// SPDX-License-Identifier: Apache-2.0
// Machine models and golden files: what is written is read back, everything else is refused with kFile.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "attention/ring/machine_model.hpp"
#include "base/error.hpp"
#include "io/flat_table.hpp"
#include "kernels/common/registry.hpp"
#include "ops/jobs/golden.hpp"

namespace ringattn {
namespace {

std::string refused(const std::function<void()>& read, ErrorCode code) {
  try {
    read();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code(), code) << message;
    EXPECT_NE(message.find("). "), std::string::npos) << message << ": it lacks a reason or a suggestion";
    return message;
  }
  ADD_FAILURE() << "accepted";
  return {};
}

TEST(MachineModelFiles, AreReadBack) {
  const MachineModel machine{"a \"machine\"\n", 6.5e14, 3.0e11, 0.0};
  const MachineModel measured{"a host", 4.8e12, 3.0e11, 1e-6, 1.3e12, 9.1e10, "cpu_attention"};
  for (const char* path : {"m.json", "m.toml"}) {
    EXPECT_EQ(parse_machine_model(machine_model_text(machine, path), path), machine) << path;
    EXPECT_EQ(parse_machine_model(machine_model_text(measured, path), path), measured) << path;
  }
}

TEST(MachineModelFiles, RefuseEverythingElse) {
  const std::string good = R"("flops_per_second": 1e9, "link_bytes_per_second": 1e9)";
  for (const std::string& text :
       {std::string(), std::string("{}"), std::string("[]"), std::string("7"), std::string("null"), "{" + good + "}",
        "{" + good + R"(, "latency_seconds": -1})", "{" + good + R"(, "latency_seconds": "1"})",
        "{" + good + R"(, "latency_seconds": 1e999})", "{" + good + R"(, "latency_seconds": 1, "latency": 1})",
        "{" + good + R"(, "latency_seconds": 1, "name": 7})", "{" + good + R"(, "latency_seconds": [1]})",
        "{" + good + R"(, "latency_seconds": 1, "latency_seconds": 1})", "{" + good + R"(, "latency_seconds": 1} x)",
        "\xEF\xBB\xBF{" + good + R"(, "latency_seconds": 1})", "{" + good + R"(, "latency_seconds": 1})" + '\0',
        std::string(R"({"flops_per_second": 0, "link_bytes_per_second": 1, "latency_seconds": 1})")}) {
    refused([&] { parse_machine_model(text, "m.json"); }, ErrorCode::kFile);
  }
  EXPECT_NE(refused([&] { parse_machine_model("kernel = 5", "m.toml"); }, ErrorCode::kFile)
                .find("kernel is 5, and must be a text"),
            std::string::npos);
  for (const char* text :
       {"flops_per_second = 1", "flops_per_second = nan\nlink_bytes_per_second = 1\nlatency_seconds = 1",
        "x = ", "[a]\nb = 1"}) {
    refused([&] { parse_machine_model(text, "m.toml"); }, ErrorCode::kFile);
  }
}

TEST(DefaultMachine, IsAsFastAsTheKernel) {
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    const MachineModel machine = default_machine(row, *row.make_backend({1, kNoDevice}));
    EXPECT_GT(machine.flops_per_second, 0.0) << row.name;
    EXPECT_GT(machine.link_bytes_per_second, 0.0) << row.name;
    EXPECT_TRUE(row.name != "sm80_simt" || machine.flops_per_second < 1e13) << "no tensor cores";
    // The same every time, and of all threads.
    EXPECT_EQ(default_machine(row, *row.make_backend({1, kNoDevice})), machine) << row.name;
    // Threads share cores, so 16 of them are less than 16 times as fast.
    const double more = default_machine(row, *row.make_backend({16, kNoDevice})).flops_per_second;
    EXPECT_EQ(more > 8.0 * machine.flops_per_second, row.backend == "cpu") << row.name;
    EXPECT_LE(more, 16.0 * machine.flops_per_second) << row.name;
  }
}

TEST(JobMachine, HasTheSpeedOfTheJobsKernelOnTheMeasuredMachine) {
  const MachineModel measured{"measured", 2e12, 1e9, 0.0, 5e11, 1e11, {}};
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    const auto backend = row.make_backend({4, kNoDevice});
    AttentionSpec spec = measured_spec(Dtype::kBf16);
    const double expected = row.speed(spec, *backend);
    EXPECT_EQ(job_machine({}, row, spec, *backend, kManyTokens).flops_per_second, expected) << row.name;
    if (row.backend != "cpu") continue;
    // The measured shape has the measured speed, and others are as much faster or slower as by default.
    const MachineModel bf16 = job_machine(measured, row, spec, *backend, kManyTokens);
    EXPECT_NEAR(bf16.flops_per_second, 2e12, 0.05 * 2e12) << "longer than the measured job, so a little faster";
    EXPECT_EQ(job_machine(bf16, row, spec, *backend, 1), bf16) << "a job's machine model stays as it is";
    spec.head_dim = spec.head_dim_v = 64;
    const double narrow = job_machine(measured, row, spec, *backend, kManyTokens).flops_per_second;
    EXPECT_NEAR(narrow / bf16.flops_per_second, row.speed(spec, *backend) / expected, 1e-3);
    spec.dtype = Dtype::kF32;
    EXPECT_LT(row.speed(spec, *backend, 64), row.speed(spec, *backend));
    EXPECT_NEAR(job_machine(measured, row, spec, *backend, kManyTokens).flops_per_second,
                5e11 * row.speed(spec, *backend) / row.speed(measured_spec(Dtype::kF32), *backend), 0.05 * 5e11);
  }
#ifdef RINGATTN_HAVE_CUDA
  const auto sm80 = std::ranges::find(kernel_table<AttentionSpec>(), "sm80_attention", &AttentionRow::name);
  AttentionSpec wide = measured_spec(Dtype::kBf16);
  wide.head_dim = wide.head_dim_v = 512;
  EXPECT_LT(sm80->speed(wide, *sm80->make_backend({1, kNoDevice})), 1.3e14);
#endif
}

// What the estimates of all CPU kernels have in common.
TEST(HostWorks, TakeLongerWithFewerThreadsAndWithATail) {
  const auto seconds = [](int threads, double tiles, double bytes = 0.0) {
    const HostWork work{threads, 1.0, {{.tiles = tiles, .vector_seconds = 0.1, .bytes = bytes}}};
    return host_seconds(work, default_host_rates(threads));
  };
  EXPECT_DOUBLE_EQ(seconds(1, 100.0), 0.1);
  for (const double tiles : {1.0, 3.0, 17.0, 64.0, 65.0, 1000.0}) {
    for (int threads = 2; threads < 64; ++threads) {
      EXPECT_LE(seconds(threads + 1, tiles), seconds(threads, tiles) * (1.0 + 1e-12)) << tiles << ", " << threads;
    }
    EXPECT_GT(seconds(8, tiles, 1e9), seconds(8, tiles)) << "memory is waited for";
  }
  EXPECT_DOUBLE_EQ(seconds(16, 4.0), seconds(4, 4.0)) << "threads without a tile do nothing";
  EXPECT_GT(seconds(16, 17.0), seconds(16, 16.0)) << "one thread has two tiles, though each is shorter";
  EXPECT_GT(seconds(16, 32.0), seconds(16, 1600.0)) << "the last tiles end apart";
  // A rate of many threads that was measured as less than that of one counts as that of one.
  EXPECT_EQ((HostRate{2.0, 1.0}).of(4.0, 8), 2.0);
}

TEST(HostWorks, AreThoseOfTheMeasuredMachine) {
  const MachineModel all{"all", 5e12, 1e9, 0.0, 1.4e12, 8e10, {}};
  const HostRates rates = host_rates(all, 16);
  EXPECT_NEAR(rates.vector.all / rates.vector.one, default_host_rates(16).vector.all, 1e-9) << "one was not measured";
  EXPECT_EQ(rates.memory.all, 8e10);
  MachineModel both = all;
  both.thread_fp32_flops_per_second = 2.8e11;
  both.thread_memory_bytes_per_second = 2e10;
  both.region_seconds = 1e-3;
  const HostRates measured = host_rates(both, 16);
  EXPECT_NEAR(measured.vector.all / measured.vector.one, 5.0, 1e-9);
  EXPECT_EQ(measured.memory.one, 2e10);
  EXPECT_EQ(measured.region_seconds, 1e-3);
  EXPECT_EQ(parse_machine_model(machine_model_text(both, "m.json"), "m.json"), both);
}

TEST(FlatTables, RefuseDepthAndDuplicates) {
  std::string deep;
  for (int i = 0; i < 20; ++i) deep += "{\"a\":";
  refused([&] { parse_json_table(deep + "1" + std::string(20, '}'), "f", ErrorCode::kFile); }, ErrorCode::kFile);
  const std::string twice =
      refused([] { parse_json_table(R"({"a":{"b":1},"a":2})", "f", ErrorCode::kUsage); }, ErrorCode::kUsage);
  EXPECT_NE(twice.find("\"a\" is given twice"), std::string::npos) << twice;
  const auto entries = parse_json_table(R"({"a":{"b":1,"c":-2},"d":"x","e":true,"f":0.5,"g":18446744073709551615})",
                                        "f", ErrorCode::kFile);
  ASSERT_EQ(entries.size(), 6U);
  EXPECT_EQ(entries[0].key + entries[0].text, "a.b1");
  EXPECT_EQ(entries[1].key + entries[1].text, "a.c-2");
  EXPECT_EQ(entries[5].text, "18446744073709551615");
  EXPECT_EQ(parse_toml_table("s = " + toml_quoted("a\"\\\n\x7f"), "f", ErrorCode::kFile).at(0).text, "a\"\\\n\x7f");
}

std::string dotted(int segments) {
  std::string key = "a";
  for (int i = 1; i < segments; ++i) key += ".a";
  return key;
}

// What toml++ would build by recursion is refused before it is asked, wherever it stands.
TEST(FlatTables, RefuseDeepTomlBeforeItIsParsed) {
  const std::string deep = dotted(40000);
  for (const std::string& text :
       {deep + " = 1\n", "[" + deep + "]\n", "[[" + deep + "]]\n", "x = {" + deep + " = 1}\n", "x = 1\n " + deep,
        "x = \"\"\"\"a\"\"\"\"\"\n" + deep + " = 1\n", "x = '''b'''''\n" + deep + " = 1\n",
        "x = \"a\\\"\"\n" + deep + " = 1\n", "# \"\"\"\n" + deep + " = 1\n", "x = '\\'\n" + deep + " = 1\n",
        "x = \"\"\n" + deep + " = 1\n", "\xEF\xBB\xBF" + deep + " = 1\n", "# \xe2\x80\xa8" + deep + " = 1\n",
        "# \xc2\x85" + deep + " = 1\n", "# \v" + deep + " = 1\n", "# \r" + deep + " = 1\n",
        "x = " + std::string(100000, '[') + "\n", std::string(100000, '[') + "\n",
        "x = " + std::string(9, '[') + std::string(9, ']')}) {
    refused([&] { parse_toml_table(text, "f.toml", ErrorCode::kUsage); }, ErrorCode::kUsage);
  }
  const std::string line =
      refused([&] { parse_toml_table("x = 1\n" + deep + " = 1", "f.toml", ErrorCode::kFile); }, ErrorCode::kFile);
  EXPECT_NE(line.find("line 2: a key has more than 8 segments"), std::string::npos) << line;
}

TEST(FlatTables, TakeDotsThatAreNoDepth) {
  const std::string dots(1000, '.');
  const std::string text = "# " + dots + "[[[[[[[[[[[\nz = \"" + dots + "\" # " + dots + "\nb = '''\n" + dots +
                           "'''''\nc = \"\"\"\\\"\"\"\\\"" + dots + "\"\"\"\"\"\n" + dotted(7) +
                           ".b = 0.5\n[t]\nx = 1\r\ny = 2\n";
  const auto entries = parse_toml_table(text, "f.toml", ErrorCode::kFile);
  ASSERT_EQ(entries.size(), 6U);
  EXPECT_EQ(entries[0].text, dots);
  EXPECT_EQ(entries[1].text, dots + "''");
  EXPECT_EQ(entries[2].text, "\"\"\"\"" + dots + "\"\"");
  EXPECT_EQ(entries[5].key, "t.y");
}

Golden golden() {
  return {"0.1.0",
          "0123456789ab",
          "feed",
          "cpu_attention",
          "AVX2",
          "a job",
          {{"out", std::string(32, 'a')}, {"lse", std::string(32, '0')}}};
}

TEST(GoldenFiles, AreReadBack) {
  const Golden read = parse_golden(golden_text(golden()), "g");
  EXPECT_EQ(read.kernel, "cpu_attention");
  EXPECT_EQ(read.digests, golden().digests);
  EXPECT_NO_THROW(check_comparable(read, golden(), "g"));
}

TEST(GoldenFiles, RefuseEverythingElse) {
  const std::string text = golden_text(golden());
  for (std::size_t length = 0; length + 2 < text.size(); ++length) {
    refused([&] { parse_golden(text.substr(0, length), "g"); }, ErrorCode::kFile);
  }
  Golden bad = golden();
  bad.digests["lse"] = std::string(32, 'G');
  refused([&] { parse_golden(golden_text(bad), "g"); }, ErrorCode::kFile);
}

TEST(GoldenFiles, HaveDigestsOfAnyTensors) {
  Golden scan = golden();
  scan.digests = {{"out", std::string(32, 'a')}, {"final_states", std::string(32, '0')}};
  EXPECT_EQ(parse_golden(golden_text(scan), "g").digests, scan.digests);
  scan.digests["lse"] = kNoDigest;
  EXPECT_EQ(parse_golden(golden_text(scan), "g").digests, scan.digests);
  scan.digests["final_states"] = std::string(31, '0');
  refused([&] { parse_golden(golden_text(scan), "g"); }, ErrorCode::kFile);
  scan.digests.clear();
  refused([&] { parse_golden(golden_text(scan), "g"); }, ErrorCode::kFile);
}

TEST(GoldenFiles, OfOtherProgramsAreNotComparable) {
  const auto other = [](auto change) {
    Golden changed = golden();
    change(changed);
    return changed;
  };
  const std::pair<Golden, ErrorCode> cases[] = {
      {other([](Golden& g) { g.kernel = "other"; }), ErrorCode::kUnsupported},
      {other([](Golden& g) { g.target = "SSE4"; }), ErrorCode::kUnsupported},
      {other([](Golden& g) { g.build_id = "beef"; }), ErrorCode::kUnsupported},
      {other([](Golden& g) { g.version = "0.2.0"; }), ErrorCode::kUnsupported},
      {other([](Golden& g) { g.job = "another job"; }), ErrorCode::kUsage},
  };
  for (const auto& [recorded, code] : cases) {
    refused([&, &mine = recorded] { check_comparable(mine, golden(), "g"); }, code);
  }
  EXPECT_NO_THROW(check_comparable(other([](Golden& g) { g.git = "another"; }), golden(), "g"));
}

}  // namespace
}  // namespace ringattn
