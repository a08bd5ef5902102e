// SPDX-License-Identifier: Apache-2.0
// Layers of Mamba by the program: the convolution before an SSM layer, and decode steps, of files and of seeds.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "io/safetensors_file.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

Words layer_job() {
  return {"--op", "ssd",        "--synthetic", "7",           "--seq", "300",          "--heads",
          "8",    "--head-dim", "16",          "--state-dim", "16",    "--conv-width", "4"};
}
Words step_job() {
  return {"--op",    "ssd", "--synthetic", "7",  "--q-len",     "1",  "--batch",      "5",
          "--heads", "8",   "--head-dim",  "16", "--state-dim", "16", "--conv-width", "4"};
}

NamedTensors with_conv1d(NamedTensors tensors, std::int64_t channels) {
  std::vector<float> weight;
  for (std::int64_t i = 0; i < channels * 4; ++i) weight.push_back(0.1F * static_cast<float>(i % 7) - 0.25F);
  tensors["conv1d_weight"] = float_list(weight, {channels, 4});
  tensors["conv1d_bias"] = float_list(std::vector<float>(static_cast<std::size_t>(channels), 0.125F));
  return tensors;
}

TEST(SsmLayer, OfAFileHasTheSameBytesOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  for (const bool selective : {false, true}) {
    const SsmFile shape{.selective = selective, .lengths = {65'600, 70}, .heads = 8, .head_dim = 8, .state_dim = 8};
    const NamedTensors tensors = with_conv1d(ssm_tensors(shape), selective ? 8 : 80);
    const std::string input = write_tensors(folder.file("in"), tensors);
    for (const char* ranks : {"1", "2", "3"}) {
      const std::string path = folder.file(ranks);
      const Finished run =
          tool({"run", "--input", input, "--final-states", "--ranks", ranks, "--output", path, "--force"});
      ASSERT_EQ(run.code, 0) << run.err;
      EXPECT_TRUE(has(run.out, "after a convolution of width 4, its bias and silu")) << run.out;
      EXPECT_TRUE(read_whole(path) == read_whole(folder.file("1"))) << ranks << " ranks";
    }
    EXPECT_TRUE(has(read_whole(folder.file("1")), R"("final_conv_state":{"dtype":"BF16")"));
    const Finished oracle = tool({"verify", "--input", input, "--against", "oracle", "--ranks", "2"});
    EXPECT_EQ(oracle.code, 0) << oracle.out << oracle.err;
    const Finished shapes = tool({"verify", "--input", input, "--ranks", "2"});
    EXPECT_EQ(shapes.code, 0) << shapes.out << shapes.err;
    EXPECT_TRUE(has(shapes.out, "resumed")) << shapes.out;
  }
}

// A prefill, and the next token from its final state: the file of a step is made of the output of an SSM layer.
TEST(SsmLayer, LeadsOnToAStepOfDecoding) {
  const TemporaryFolder folder;
  const NamedTensors whole = with_conv1d(ssm_tensors({}), 8 * 16 + 2 * 16);
  const std::string left = folder.file("left");
  const Finished prefill =
      tool({"run", "--input", write_tensors(folder.file("prefill"), whole), "--final-states", "--output", left});
  ASSERT_EQ(prefill.code, 0) << prefill.err;
  NamedTensors next = whole;
  for (auto& [name, tensor] : next) {
    if (tensor.shape[0] != 300) continue;
    tensor.bytes.resize(tensor.bytes.size() / 300);
    tensor.shape[0] = 1;
  }
  const SafetensorsFile output(left);
  for (const auto& [from, to] : {std::pair{"final_states", "state"}, {"final_conv_state", "conv_state"}}) {
    const TensorSource tensor = output.tensor(from);
    NamedTensor& given = next[to] = {tensor.info->dtype, tensor.info->shape, {}};
    given.bytes.resize(static_cast<std::size_t>(tensor.info->bytes()));
    tensor.shard->read(*tensor.info, 0, given.bytes);
  }
  const std::string input = write_tensors(folder.file("next"), next);
  const std::string stepped = folder.file("stepped");
  const Finished step = tool({"run", "--input", input, "--output", stepped});
  ASSERT_EQ(step.code, 0) << step.err;
  EXPECT_TRUE(has(step.out, "# job: update of one token, SSD, bf16, 8 heads of 16, state 16")) << step.out;
  EXPECT_TRUE(has(read_whole(stepped), R"("final_conv_state")")) << "the next step's";
  EXPECT_EQ(tool({"verify", "--input", input, "--against", "oracle"}).code, 0);
  EXPECT_EQ(tool({"verify", "--input", input, "--against", stepped}).code, 0);
  next["initial_states"] = next["state"];
  const Finished both = tool({"run", "--input", write_tensors(folder.file("both"), next)});
  EXPECT_EQ(both.code, 3);
  EXPECT_TRUE(has(both.err, "Leave one of them out")) << both.err;
}

TEST(SsmLayer, OfASeedIsVerifiedPlannedAndMeasured) {
  for (const Words& job : {layer_job(), step_job()}) {
    const Finished worlds = tool(Words{"verify", "--ranks", "3"} + job);
    EXPECT_EQ(worlds.code, 0) << worlds.out << worlds.err;
    const Finished oracle = tool(Words{"verify", "--against", "oracle", "--ranks", "2"} + job);
    EXPECT_EQ(oracle.code, 0) << oracle.out << oracle.err;
    const Finished run = tool(Words{"run", "--json", "-", "--ranks", "2"} + job);
    EXPECT_EQ(check_report(run.out), "");
    EXPECT_EQ(json_at(run.out, "/job/conv_width"), "4");
    EXPECT_EQ(json_at(run.out, "/job/update"), job == step_job() ? "true" : "false");
    const Finished plan = tool(Words{"plan", "--world", "2", "--json", "-"} + job);
    ASSERT_EQ(plan.code, 0) << plan.err;
    EXPECT_EQ(json_at(plan.out, "/rows/0/estimated_ms") == "null", job == step_job());
  }
  const TemporaryFolder folder;
  const std::string lines = folder.file("lines");
  const Finished bench = tool({"bench", "--op", "ssd", "--q-len", "1", "--batch", "2,3", "--heads", "2", "--head-dim",
                               "8", "--state-dim", "8", "--samples", "2", "--jsonl", lines});
  ASSERT_EQ(bench.code, 0) << bench.err;
  const std::string text = read_whole(lines);
  const std::string line = text.substr(0, text.find('\n'));
  EXPECT_EQ(json_at(line, "/job/batch"), "2");
  EXPECT_TRUE(has(json_at(line, "/job/mask"), "update")) << line;
  EXPECT_GT(std::stod(json_at(line, "/gb_per_s")), 0.0);
}

TEST(SsmLayer, RefusesWhatContradictsAStep) {
  const Words step{"run", "--op", "ssd", "--synthetic", "7"};
  const Finished several = tool(step + Words{"--q-len", "3"});
  EXPECT_EQ(several.code, 2);
  EXPECT_TRUE(has(several.err, "--q-len 3 (a decode step takes one token of each sequence)")) << several.err;
  const Finished both = tool(step + Words{"--q-len", "1", "--seq", "64"});
  EXPECT_EQ(both.code, 2);
  EXPECT_TRUE(has(both.err, "--seq contradicts --q-len")) << both.err;
  EXPECT_EQ(tool(step + Words{"--conv-width", "5"}).code, 2);
  EXPECT_EQ(tool(step + Words{"--conv-width", "1"}).code, 2);
  const TemporaryFolder folder;
  const NamedTensors good = with_conv1d(ssm_tensors({}), 8 * 16 + 2 * 16);
  const auto refused = [&](const std::string& name, std::vector<std::int64_t> shape) {
    NamedTensors tensors = good;
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    tensors[name] = float_list(std::vector<float>(static_cast<std::size_t>(count)), std::move(shape));
    const Finished run = tool({"run", "--input", write_tensors(folder.file("bad"), tensors)});
    EXPECT_EQ(run.code, 3) << run.err;
    return run.err;
  };
  EXPECT_TRUE(has(refused("conv1d_weight", {128, 4}), "the SSM has 160 channels"));
  EXPECT_TRUE(has(refused("conv1d_weight", {160, 5}), "widths are 2, 3 and 4"));
  EXPECT_TRUE(has(refused("conv1d_bias", {4}), "one number a channel"));
  EXPECT_TRUE(has(refused("conv_state", {1, 160, 2}), "the last 3 or 4 tokens"));
  EXPECT_TRUE(has(refused("conv_state", {1, 160, 3}), "have one dtype"));
  EXPECT_TRUE(has(refused("state", {300, 8, 16}), "a state for each sequence"));
  NamedTensors alone = good;
  alone.erase("conv1d_weight");
  const Finished weightless = tool({"run", "--input", write_tensors(folder.file("alone"), alone)});
  EXPECT_EQ(weightless.code, 3);
  EXPECT_TRUE(has(weightless.err, "there is no conv1d_weight")) << weightless.err;
}

}  // namespace
}  // namespace ringattn::testing
