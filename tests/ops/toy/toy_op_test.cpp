// SPDX-License-Identifier: Apache-2.0
// A new op is one directory and one row of the table: every subcommand, its help and its files know it.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "io/safetensors_writer.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Words toy(const std::string& command, const Words& words = {}) {
  return Words{command, "--op", "toy", "--synthetic", "7", "--seq", "300", "--heads", "3", "--head-dim", "5"} + words;
}

Finished done(const Words& words) {
  Finished finished = tool(words);
  EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
  return finished;
}

nlohmann::json report_of(const Words& words) { return nlohmann::json::parse(done(words + Words{"--json", "-"}).out); }

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// left, right and gate of two heads, fp32; `prefix` before their names.
void write_tensors(const std::string& path, const std::string& prefix, std::int64_t tokens, std::int64_t gate_heads) {
  const std::vector<OutputTensor> tensors{{prefix + "left", FileDtype::kF32, {tokens, 2, 4}},
                                          {prefix + "right", FileDtype::kF32, {tokens, 2, 4}},
                                          {prefix + "gate", FileDtype::kF32, {tokens, gate_heads, 1}}};
  const auto writer = SafetensorsWriter::create(plan_safetensors(tensors, {}), path, true);
  float value = 1.0F;
  for (const OutputTensor& tensor : tensors) {
    std::vector<float> values(static_cast<std::size_t>(tensor.shape[0] * tensor.shape[1] * tensor.shape[2]));
    for (float& element : values) element = value += 0.125F;
    writer->write_bytes(tensor.name, std::as_bytes(std::span(values)));
  }
  writer->commit();
}

TEST(ToyOp, RunsWithTheSameBitsOnAnyRanks) {
  const TemporaryFolder folder;
  const auto file = [&](int ranks) { return folder.file("out" + std::to_string(ranks)); };
  for (const int ranks : {1, 2, 7}) {
    const Finished run = done(toy("run", {"--ranks", std::to_string(ranks), "--output", file(ranks)}));
    EXPECT_TRUE(has(run.out, "# job: toy, bf16, heads 3, head_dim 5, temperature 1, 300 tokens")) << run.out;
    EXPECT_EQ(text_of(file(ranks)), text_of(file(1))) << ranks;
  }
  EXPECT_NE(digest_of(done(toy("run", {"--temperature", "2"})).out), digest_of(done(toy("run")).out));
}

TEST(ToyOp, IsVerified) {
  const TemporaryFolder folder;
  const Finished shapes = done(toy("verify"));
  EXPECT_TRUE(has(shapes.out, "# 5 shapes, bit for bit") && has(shapes.out, "PASS")) << shapes.out;
  EXPECT_TRUE(has(done(toy("verify", {"--against", "oracle", "--ranks", "2"})).out, "# 64 rows against")) << shapes.out;
  const std::string golden = folder.file("golden.json");
  done(toy("verify", {"--record", golden}));
  EXPECT_TRUE(has(done(toy("verify", {"--golden", golden, "--ranks", "3"})).out, "PASS"));
  const Finished other = tool(toy("verify", {"--golden", golden, "--temperature", "3"}));
  EXPECT_EQ(other.code, 2) << other.out << other.err;  // another job
  const std::string out = folder.file("out.safetensors");
  done(toy("run", {"--output", out}));
  EXPECT_TRUE(has(done(toy("verify", {"--against", out, "--ranks", "2"})).out, "PASS"));
  const Finished wrong = tool(toy("verify", {"--against", out, "--temperature", "3"}));
  EXPECT_EQ(wrong.code, 1) << wrong.out << wrong.err;
  EXPECT_TRUE(has(wrong.out, "first difference: out at sequence 0, token 0, head 0, dim 0: ")) << wrong.out;
  for (const char* flag : {"--peer", "--decode"}) {
    const Finished refused = tool(toy("verify", flag == std::string("--peer") ? Words{flag, out} : Words{flag}));
    EXPECT_EQ(refused.code, 2) << refused.out << refused.err;
  }
}

TEST(ToyOp, IsReportedPlannedAndMeasured) {
  const nlohmann::json report = report_of(toy("run", {"--temperature", "0.5"}));
  EXPECT_EQ(report.at("op"), "toy");
  EXPECT_EQ(report.at("job").at("temperature"), "0.5");
  EXPECT_EQ(report.at("job").at("tokens"), 300);
  EXPECT_EQ(report.at("digest").at("out").get<std::string>().size(), 32U);
  const nlohmann::json plan = report_of(toy("plan", {"--world", "4,7"}));
  EXPECT_EQ(plan.at("op"), "toy");
  EXPECT_EQ(plan.at("rows").at(0).at("ranks").size(), 4U);
  const Finished bench = done(toy("bench", {"--samples", "2", "--jsonl", "-"}));
  const nlohmann::json line = nlohmann::json::parse(bench.out);
  EXPECT_EQ(line.at("job").at("op"), "toy");
  EXPECT_EQ(line.at("job").at("temperature"), "1");
  EXPECT_EQ(line.at("samples"), 2);
  EXPECT_GT(line.at("ms").at("median").get<double>(), 0.0);
}

TEST(ToyOp, ReadsFilesThatAreRecognizedByTheirTensors) {
  const TemporaryFolder folder;
  const std::string file = folder.file("in.safetensors");
  write_tensors(file, "", 11, 2);
  const Finished run = done({"run", "--input", file, "--ranks", "3"});
  EXPECT_TRUE(has(run.out, "# job: toy, fp32, heads 2, head_dim 4, temperature 1, 11 tokens")) << run.out;
  const std::string renamed = folder.file("renamed.safetensors");
  write_tensors(renamed, "layer.", 11, 2);
  const Words names{"--tensors", "left=layer.left,right=layer.right,gate=layer.gate"};
  EXPECT_EQ(digest_of(done(Words{"run", "--input", renamed} + names).out), digest_of(run.out));
  EXPECT_TRUE(has(done({"verify", "--input", file, "--against", "oracle"}).out, "PASS"));
  EXPECT_TRUE(has(done({"plan", "--input", file}).out, "# job: toy, fp32"));
  const std::string wrong = folder.file("wrong.safetensors");
  write_tensors(wrong, "", 11, 1);
  const Finished refused = tool({"run", "--input", wrong});
  EXPECT_EQ(refused.code, 3) << refused.out;
  EXPECT_TRUE(has(refused.err, "gate has 1 heads of 1 (left has 2 of 4). Give tensors of one layer.")) << refused.err;
}

TEST(ToyOp, RefusesWhatItWouldIgnore) {
  const TemporaryFolder folder;
  const std::string file = folder.file("in.safetensors");
  write_tensors(file, "", 11, 2);
  const Finished named = tool({"run", "--input", file, "--tensors", "v=nosuch"});
  EXPECT_EQ(named.code, 2) << named.out;
  EXPECT_TRUE(has(named.err, "--tensors names v (the job of ")) << named.err;
  const auto write = [&](const std::string& name, const std::vector<OutputTensor>& tensors) {
    const std::string path = folder.file(name);
    const auto writer = SafetensorsWriter::create(plan_safetensors(tensors, {}), path, true);
    for (const OutputTensor& tensor : tensors) {
      std::size_t bytes = 4;  // of fp32 and of 32-bit integers
      for (const std::int64_t extent : tensor.shape) bytes *= static_cast<std::size_t>(extent);
      writer->write_bytes(tensor.name, std::vector<std::byte>(bytes));
    }
    writer->commit();
    return path;
  };
  const std::vector<OutputTensor> two{{"left", FileDtype::kF32, {5, 2, 4}}, {"right", FileDtype::kF32, {5, 2, 4}}};
  const Finished missing = tool({"run", "--input", write("two", two)});
  EXPECT_EQ(missing.code, 3) << missing.out;
  EXPECT_TRUE(has(missing.err, "gate")) << missing.err;
  std::vector<OutputTensor> all = two;
  all.push_back({"gate", FileDtype::kF32, {5, 2, 1}});
  all.push_back({"cu_seqlens_q", FileDtype::kI32, {2}});
  EXPECT_EQ(tool({"run", "--input", write("sequences", all)}).code, 3);
  all = {{"left", FileDtype::kF32, {5, 0, 4}},
         {"right", FileDtype::kF32, {5, 0, 4}},
         {"gate", FileDtype::kF32, {5, 0, 1}}};
  EXPECT_EQ(tool({"run", "--input", write("empty", all)}).code, 3);
}

TEST(ToyOp, KeepsTheOrderOfAxesAndReadsItsLinesBack) {
  const TemporaryFolder folder;
  const std::string out = folder.file("out.safetensors");
  done(toy("run", {"--order", "htd", "--output", out}));
  EXPECT_TRUE(has(text_of(out), R"("shape":[3, 300, 5])")) << text_of(out).substr(0, 400);
  const std::string lines = folder.file("lines.jsonl");
  done(toy("bench", {"--samples", "2", "--jsonl", lines}));
  EXPECT_TRUE(has(done(toy("bench", {"--samples", "2", "--baseline", lines, "--fail-above", "1000000%"})).out, "PASS"));
}

TEST(ToyOp, HasItsFlagAndNoOther) {
  const Finished help = done({"run", "--op", "toy", "--help"});
  EXPECT_TRUE(has(help.out, "ringattn run --op toy: an op of tests.")) << help.out;
  EXPECT_TRUE(has(help.out, "left            [tokens, heads, head_dim]")) << help.out;
  EXPECT_TRUE(has(help.out, "--temperature X") && has(help.out, "factor of left [1]")) << help.out;
  EXPECT_FALSE(has(help.out, "--kv-heads")) << help.out;
  EXPECT_TRUE(has(done({"run", "--help"}).out, "toy                 an op of tests"));
  EXPECT_TRUE(has(done(toy("run", {"--print-config"})).out, "temperature = 1  # default"));
  struct Case {
    Words words;
    std::string_view part;
  };
  for (const auto& [words, part] :
       {Case{toy("run", {"--kv-heads", "3"}), "--kv-heads contradicts --op toy (it belongs to --op attention"},
        Case{
            {"run", "--synthetic", "7", "--temperature", "2"},
            "--temperature contradicts --op attention, the default (it belongs to --op toy). Leave it out, or use --op "
            "toy."},
        Case{toy("run", {"--temperature", "hot"}), "--temperature is \"hot\" (it takes a finite number"},
        Case{toy("run", {"--backend", "cuda"}), "toy"}}) {
    const Finished refused = tool(words);
    EXPECT_TRUE(refused.code == 2 || refused.code == 4) << refused.out << refused.err;
    EXPECT_TRUE(has(refused.err, part) || part == "toy") << refused.err;
  }
  const Finished memory = tool(toy("run", {"--memory", "1k"}));
  EXPECT_EQ(memory.code, 5) << memory.err;
}

}  // namespace
}  // namespace ringattn::testing
