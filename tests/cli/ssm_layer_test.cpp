// SPDX-License-Identifier: Apache-2.0
// Layers of Mamba by the program: the convolution before an SSM layer, and decode steps, of files and of seeds.
#include <fmt/format.h>
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

// v, k and q of 2 heads, and log-decays of a kind, over lengths that are longer than a super-segment together.
NamedTensors linear_attention_tensors(const std::string& decay, const std::vector<std::int64_t>& lengths) {
  NamedTensors ssd = ssm_tensors({.lengths = lengths, .heads = 2, .head_dim = 16, .groups = 2, .state_dim = 8});
  NamedTensors tensors{{"v", ssd.at("x")}, {"k", ssd.at("B")}, {"q", ssd.at("C")}};
  if (ssd.contains("cu_seqlens")) tensors["cu_seqlens"] = ssd.at("cu_seqlens");
  std::vector<std::int64_t> shape{2};
  if (decay != "head") shape.insert(shape.begin(), tensors.at("v").shape[0]);
  if (decay == "dim") shape.push_back(8);
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  std::vector<float> logs;
  for (std::int64_t i = 0; i < count; ++i) logs.push_back(-1e-4F * static_cast<float>(1 + i * 7 % 11));
  tensors["log_decay"] = float_list(logs, shape);
  return tensors;
}

TEST(LinearAttention, OfAFileHasTheSameBytesOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  for (const std::string decay : {"token", "dim"}) {
    const std::string input = write_tensors(folder.file("in"), linear_attention_tensors(decay, {65'536 + 70, 0, 70}));
    const Words rope{"--rope", "on", "--rope-theta", "600000", "--rotary-factor", "0.5"};
    for (const char* ranks : {"1", "2", "3"}) {
      const std::string path = folder.file(ranks);
      const Finished run =
          tool(Words{"run", "--input", input, "--final-states", "--ranks", ranks, "--output", path, "--force"} + rope);
      ASSERT_EQ(run.code, 0) << run.err;
      EXPECT_TRUE(has(run.out, "linear attention, bf16, 2 heads of 8, values of 16, a decay per")) << run.out;
      EXPECT_TRUE(has(run.out, "RoPE of 4 dims")) << run.out;
      EXPECT_TRUE(read_whole(path) == read_whole(folder.file("1"))) << ranks << " ranks";
    }
    if (decay == "dim") continue;  // kernels are compared with fp64 elsewhere
    const Finished oracle = tool(Words{"verify", "--input", input, "--against", "oracle", "--ranks", "2"} + rope);
    EXPECT_EQ(oracle.code, 0) << oracle.out << oracle.err;
    EXPECT_TRUE(has(oracle.out, "out: greatest error")) << oracle.out;
    const Finished shapes = tool(Words{"verify", "--input", input, "--ranks", "2"} + rope);
    EXPECT_EQ(shapes.code, 0) << shapes.out << shapes.err;
    EXPECT_TRUE(has(shapes.out, "resumed")) << shapes.out;
  }
}

TEST(LinearAttention, OfASeedIsVerifiedPlannedAndMeasured) {
  const Words job{"--op", "linear_attention", "--synthetic", "7", "--heads", "3", "--head-dim", "16"};
  for (const char* decay : {"head", "token", "dim"}) {
    const Words layer = job + Words{"--decay", decay, "--seq", "300", "--head-dim-v", "24", "--scale", "0.5"};
    const Words step = job + Words{"--decay", decay, "--q-len", "1", "--batch", "5", "--rope", "on"};
    for (const Words& one : {layer, step}) {
      const Finished oracle = tool(Words{"verify", "--against", "oracle", "--ranks", "2"} + one);
      EXPECT_EQ(oracle.code, 0) << oracle.out << oracle.err;
    }
    EXPECT_EQ(tool(Words{"verify", "--ranks", "3"} + step).code, 0);
    const Finished run = tool(Words{"run", "--json", "-"} + layer);
    EXPECT_EQ(check_report(run.out), "");
    EXPECT_EQ(json_at(run.out, "/job/decay"), fmt::format("\"{}\"", decay));
    EXPECT_EQ(json_at(run.out, "/job/scale"), "0.5");
  }
  EXPECT_EQ(tool(Words{"plan", "--world", "2"} + job + Words{"--seq", "2m"}).code, 0);
}

// The next token of a sequence from its final state, at its position: the values of the whole sequence.
TEST(LinearAttention, GoesOnFromAStateAndRefusesWhatContradictsIt) {
  const TemporaryFolder folder;
  const NamedTensors whole = linear_attention_tensors("token", {300});
  const std::string left = folder.file("left");
  ASSERT_EQ(
      tool({"run", "--input", write_tensors(folder.file("whole"), whole), "--final-states", "--output", left}).code, 0);
  NamedTensors next = whole;
  for (auto& [name, tensor] : next) {
    tensor.bytes.resize(tensor.bytes.size() / 300);
    tensor.shape[0] = 1;
  }
  const SafetensorsFile output(left);
  const TensorSource states = output.tensor("final_states");
  NamedTensor& state = next["state"] = {states.info->dtype, states.info->shape, {}};
  state.bytes.resize(static_cast<std::size_t>(states.info->bytes()));
  states.shard->read(*states.info, 0, state.bytes);
  const std::string step = write_tensors(folder.file("step"), next);
  EXPECT_EQ(tool({"verify", "--input", step, "--against", "oracle"}).code, 0);
  const auto refused = [&](const Words& words, int code, const std::string& text) {
    const Finished run = tool(Words{"run"} + words);
    EXPECT_EQ(run.code, code) << run.err;
    EXPECT_TRUE(has(run.err, text)) << run.err;
  };
  refused({"--input", step, "--rope", "on"}, 2, "a decode step with RoPE has no q_offset");
  next["q_offset"] = {FileDtype::kI64, {1}, std::vector<std::byte>(8)};
  next["q_offset"].bytes[1] = std::byte{1};  // 256
  const std::string placed = write_tensors(folder.file("placed"), next);
  EXPECT_EQ(tool({"verify", "--input", placed, "--against", "oracle", "--rope", "on"}).code, 0);
  refused({"--input", placed}, 2, "q_offset without RoPE");
  refused({"--input", step, "--decay", "head"}, 2, "its log_decay says it");
  refused({"--input", step, "--rope-theta", "500"}, 2, "q and k are not rotated");
  NamedTensors delta = whole;
  delta["beta"] = delta.at("log_decay");
  refused({"--input", write_tensors(folder.file("delta"), delta), "--op", "linear_attention"}, 2,
          "the file has the tensors of gated_delta");
  next["q_offset"].bytes[7] = std::byte{0x7f};
  refused({"--input", write_tensors(folder.file("far"), next), "--rope", "on"}, 3, "positions are 0 to ");
  NamedTensors packed = whole;
  packed["cu_seqlens"] = {FileDtype::kI64, {2}, std::vector<std::byte>(16)};
  refused({"--input", write_tensors(folder.file("packed"), packed)}, 3, "its last entry is 0 and v has 300 tokens");
  refused({"--input", step, "--scale", "1e-60"}, 2, "or a number of at least 1e-30");
  const Words seed{"--op", "linear_attention", "--synthetic", "7", "--heads", "1", "--log-decays"};
  refused(seed + Words{"-1,-2"}, 2, "2 log-decays of heads (the layer has 1 head, with a decay per head)");
  refused(seed + Words{"-1,"}, 2, "--log-decays is \"-1,\"");
  NamedTensors wide = whole;
  wide["log_decay"] = float_list(std::vector<float>(600), {2, 300});
  refused({"--input", write_tensors(folder.file("wide"), wide)}, 3, "log_decay");
}

// A layer of Ring or Ling: the config gives RoPE and scale, and the file's shapes and decays are compared with it.
TEST(LinearAttention, OfAModelsLayerHasItsRopeAndScale) {
  const TemporaryFolder folder;
  const std::string config = folder.write("config.json", R"({"model_type": "bailing_moe_linear", "hidden_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4, "layer_group_size": 4,
    "rope_theta": 600000, "partial_rotary_factor": 0.5, "linear_rope": true, "group_norm_size": 1})");
  NamedTensors tensors = linear_attention_tensors("head", {300});
  NamedTensor& v = tensors["v"] = tensors.at("k");
  v.bytes[0] = std::byte{1};
  tensors["log_decay"] = float_list({-0x1p-4F * (2.0F / 3.0F + 1e-5F), -0x1p-8F * (2.0F / 3.0F + 1e-5F)});
  const Words model{"--model-config", config, "--layer", "2"};
  const std::string input = write_tensors(folder.file("in"), tensors);
  const Finished run = tool(Words{"verify", "--input", input, "--against", "oracle"} + model);
  EXPECT_EQ(run.code, 0) << run.out << run.err;
  EXPECT_TRUE(has(run.out, "2 heads of 8, a decay per head, scale 0.3536, RoPE of 4 dims")) << run.out;
  const Finished synthetic = tool(Words{"run", "--synthetic", "7", "--seq", "64", "--json", "-"} + model);
  EXPECT_EQ(synthetic.code, 0) << synthetic.err;
  EXPECT_EQ(json_at(synthetic.out, "/job/rope"), "true");
  tensors["log_decay"] = float_list({-0.25F, -0.5F});
  const Finished other = tool(Words{"run", "--input", write_tensors(folder.file("other"), tensors)} + model);
  EXPECT_EQ(other.code, 3) << other.err;
  EXPECT_TRUE(has(other.err, "log_decay of head 0 is -0.25")) << other.err;
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

// x alone may be a part of several ops.
TEST(SsmLayer, NamesTheOpsOfXAlone) {
  const TemporaryFolder folder;
  NamedTensors alone;
  alone["x"] = float_list(std::vector<float>(64), {4, 2, 8});
  for (const Words& op : {Words{}, Words{"--op", "conv1d"}}) {
    const Finished run = tool(Words{"run", "--input", write_tensors(folder.file("alone"), alone)} + op);
    EXPECT_EQ(run.code, 3) << run.err;
    EXPECT_TRUE(has(run.err, "has x without a weight (with conv1d_weight it is a convolution")) << run.err;
  }
}

}  // namespace
}  // namespace ringattn::testing
