// SPDX-License-Identifier: Apache-2.0
// The causal convolution without an SSM layer: files with causal_conv1d's and mamba_ssm's names, and seeds.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "io/safetensors_file.hpp"
#include "ops/ssm/ssm_input.hpp"
#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/ssm_files.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

constexpr int kChannels = 8;
constexpr std::int64_t kRowBytes = kChannels * 2;

Words job_of_a_seed() { return {"--op", "convolution", "--synthetic", "7", "--seq", "300", "--heads", "8"}; }

// What the program makes of a seed: x, conv1d_weight and conv1d_bias.
NamedTensors conv1d_tensors(std::int64_t tokens) {
  SyntheticSsmInput made;
  made.convolution = true;
  made.seed = 7;
  made.tokens = tokens;
  made.heads = kChannels;
  made.conv_width = 4;
  const SsmInput input(made, {});
  NamedTensor x{FileDtype::kBf16, {tokens, kChannels}, {}};
  x.bytes.resize(static_cast<std::size_t>(tokens * kRowBytes));
  const PackedRun all[] = {{0, tokens}};
  input.read(SsmTensorKind::kX, all,
             dense_view(static_cast<void*>(x.bytes.data()), Dtype::kBf16, tokens, kChannels, std::int64_t{1}), 1);
  return {{"x", x},
          {"conv1d_weight", float_list(input.conv_weight(), {kChannels, 4})},
          {"conv1d_bias", float_list(input.conv_bias())}};
}

std::vector<std::byte> bytes_of(const std::string& path, const std::string& name) {
  const SafetensorsFile file(path);
  const TensorSource tensor = file.tensor(name);
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.info->bytes()));
  tensor.shard->read(*tensor.info, 0, bytes);
  return bytes;
}

// The bytes of y that the program makes of a file.
std::vector<std::byte> y_of(const TemporaryFolder& folder, const NamedTensors& tensors, const Words& flags = {}) {
  const std::string input = write_tensors(folder.file("in"), tensors);
  const Finished run = tool(Words{"run", "--input", input, "--output", folder.file("y"), "--force"} + flags);
  EXPECT_EQ(run.code, 0) << run.err;
  return run.code == 0 ? bytes_of(folder.file("y"), "y") : std::vector<std::byte>();
}

TEST(Conv1dOp, OfAFileIsThatOfItsSeed) {
  const TemporaryFolder folder;
  const std::vector<std::byte> of_file = y_of(folder, conv1d_tensors(300));
  const Finished seed = tool(Words{"run", "--output", folder.file("seed")} + job_of_a_seed());
  ASSERT_EQ(seed.code, 0) << seed.err;
  EXPECT_TRUE(has(seed.out, "# job: conv1d, bf16, 8 channels, width 4, bias, silu; 1 sequence, 300 tokens"))
      << seed.out;
  EXPECT_TRUE(of_file == bytes_of(folder.file("seed"), "y"));
  NamedTensors other = conv1d_tensors(300);
  other["conv1d_bias"].bytes[3] ^= std::byte{0x80};
  EXPECT_FALSE(of_file == y_of(folder, other)) << "the bias counts";
}

TEST(Conv1dOp, ReadsTheNamesOfCausalConv1d) {
  const TemporaryFolder folder;
  const NamedTensors ours = conv1d_tensors(300);
  NamedTensors theirs{{"x", ours.at("x")}, {"weight", ours.at("conv1d_weight")}, {"bias", ours.at("conv1d_bias")}};
  theirs["x"].shape = {1, 300, kChannels};
  theirs["weight"].shape = {kChannels, 1, 4};
  const std::vector<std::byte> y = y_of(folder, ours);
  EXPECT_TRUE(y == y_of(folder, theirs));
  EXPECT_TRUE(y == y_of(folder, {{"x", ours.at("x")},
                                 {"conv1d.weight", ours.at("conv1d_weight")},
                                 {"conv1d.bias", ours.at("conv1d_bias")}}));
  theirs["layer"] = theirs["weight"];
  theirs.erase("weight");
  EXPECT_TRUE(y == y_of(folder, theirs, {"--tensors", "conv1d_weight=layer"}));
}

TEST(Conv1dOp, HasTheSameBytesOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  NamedTensors tensors = conv1d_tensors(131'200);
  tensors["cu_seqlens"] = long_list({0, 131'100, 131'101, 131'200});
  const std::string input = write_tensors(folder.file("in"), tensors);
  for (const char* ranks : {"1", "2", "3"}) {
    const std::string path = folder.file(ranks);
    const Finished run = tool({"run", "--input", input, "--final-states", "--ranks", ranks, "--output", path});
    ASSERT_EQ(run.code, 0) << run.err;
    EXPECT_TRUE(read_whole(path) == read_whole(folder.file("1"))) << ranks << " ranks";
  }
  const Finished shapes = tool({"verify", "--input", input, "--ranks", "3"});
  EXPECT_EQ(shapes.code, 0) << shapes.out << shapes.err;
  EXPECT_TRUE(has(shapes.out, "resumed")) << shapes.out;
  EXPECT_TRUE(has(shapes.out, "in-turn")) << shapes.out;
  EXPECT_EQ(tool({"verify", "--input", input, "--against", "oracle", "--ranks", "2"}).code, 0);
  EXPECT_EQ(tool({"verify", "--input", input, "--against", folder.file("1"), "--ranks", "2"}).code, 0);
  std::string other = read_whole(folder.file("1"));
  other[other.size() - 5] = static_cast<char>(other[other.size() - 5] ^ 1);
  const Finished different = tool({"verify", "--input", input, "--against", folder.write("other", other)});
  EXPECT_EQ(different.code, 1) << different.out;
  EXPECT_TRUE(has(different.out, "first difference: ")) << different.out;
}

// The window that one job leaves is another's, cut anywhere, by either name.
TEST(Conv1dOp, GoesOnFromAWindow) {
  const TemporaryFolder folder;
  const NamedTensors whole = conv1d_tensors(300);
  const std::vector<std::byte> y = y_of(folder, whole);
  for (const std::int64_t cut : {1, 2, 3, 150}) {
    NamedTensors front = whole;
    front["x"].shape[0] = cut;
    front["x"].bytes.resize(static_cast<std::size_t>(cut * kRowBytes));
    y_of(folder, front, {"--final-states"});
    const SafetensorsFile output(folder.file("y"));
    const std::vector<std::int64_t> shape{1, kChannels, 3};
    EXPECT_EQ(output.tensor("final_conv_state").info->shape, shape);
    NamedTensors rear = whole;
    rear["x"].shape[0] = 300 - cut;
    auto& bytes = rear["x"].bytes;
    bytes.erase(bytes.begin(), bytes.begin() + cut * kRowBytes);
    const NamedTensor window{FileDtype::kBf16, shape, bytes_of(folder.file("y"), "final_conv_state")};
    for (const char* name : {"conv_state", "initial_states", "initial_state"}) {
      NamedTensors next = rear;
      next[name] = window;
      const std::vector<std::byte> rest = y_of(folder, next);
      const std::vector<std::byte> expected(y.begin() + cut * kRowBytes, y.end());
      EXPECT_TRUE(rest == expected) << name << " behind " << cut;
    }
    EXPECT_FALSE(y_of(folder, rear) == std::vector<std::byte>(y.begin() + cut * kRowBytes, y.end())) << cut;
  }
}

TEST(Conv1dOp, IsReportedPlannedAndMeasured) {
  const Finished run = tool(Words{"run", "--json", "-", "--final-states", "--ranks", "2"} + job_of_a_seed());
  EXPECT_EQ(check_report(run.out), "");
  EXPECT_EQ(json_at(run.out, "/op"), R"("conv1d")");
  EXPECT_EQ(json_at(run.out, "/kernel"), R"("cpu_conv1d")");
  EXPECT_EQ(json_at(run.out, "/job/channels"), "8");
  EXPECT_NE(json_at(run.out, "/digest/final_states"), "null");
  const Finished plan =
      tool({"plan", "--op", "convolution", "--seq", "200k", "--heads", "8", "--world", "2", "--json", "-"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_EQ(json_at(plan.out, "/rows/0/bytes_moved"), "48") << "three tokens of eight channels";
  const TemporaryFolder folder;
  const std::string lines = folder.file("lines");
  const Words bench{"bench", "--op", "convolution", "--heads", "8", "--seq", "64,128", "--samples", "2"};
  const Finished measured = tool(bench + Words{"--jsonl", lines});
  ASSERT_EQ(measured.code, 0) << measured.err;
  EXPECT_EQ(json_at(read_whole(lines).substr(0, read_whole(lines).find('\n')), "/job/op"), R"("conv1d")");
  const Finished again = tool(bench + Words{"--against", lines});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_TRUE(has(again.out, "ours/theirs")) << again.out;
}

TEST(Conv1dOp, RefusesWhatItHasNot) {
  for (const Words& flags : {Words{"--state-dim", "64"},
                             {"--groups", "2"},
                             {"--head-dim", "8"},
                             {"--dt-limit", "0,inf"},
                             {"--q-len", "1"},
                             {"--mask", "full"},
                             {"--layout", "striped"}}) {
    const Finished refused = tool(Words{"run"} + job_of_a_seed() + flags);
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_TRUE(has(refused.err, flags[0] + " contradicts --op conv1d")) << refused.err;
  }
  EXPECT_EQ(tool(Words{"run", "--conv-width", "5"} + job_of_a_seed()).code, 2);
  EXPECT_EQ(tool(Words{"run", "--conv-width", "0"} + job_of_a_seed()).code, 2);
  EXPECT_EQ(tool(Words{"run", "--kernel", "cpu_ssd"} + job_of_a_seed()).code, 4);
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& name, NamedTensor tensor) {
    NamedTensors tensors = conv1d_tensors(300);
    tensors[name] = std::move(tensor);
    const Finished run = tool({"run", "--input", write_tensors(folder.file("bad"), tensors)});
    EXPECT_EQ(run.code, 3) << run.err;
    return run.err;
  };
  EXPECT_TRUE(has(refused("conv1d_weight", float_list(std::vector<float>(28), {7, 4})), "has BF16 [300, 8]"));
  EXPECT_TRUE(has(refused("conv1d_weight", float_list(std::vector<float>(40), {8, 5})), "widths are 2, 3 and 4"));
  EXPECT_TRUE(has(refused("conv1d_bias", float_list({1.0F})), "one number a channel"));
  EXPECT_TRUE(has(refused("conv_state", float_list(std::vector<float>(24), {1, 8, 3})), "have one dtype"));
  EXPECT_TRUE(has(refused("x", float_list(std::vector<float>(8))), "it must have 2 axes"));
}

TEST(Conv1dOp, OfAModelIsOverItsChannels) {
  const TemporaryFolder folder;
  const std::string config = folder.write(
      "config.json", R"({"model_type": "mamba2", "hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 1,
      "state_size": 16, "conv_kernel": 3})");
  const Finished plan = tool({"plan", "--op", "convolution", "--model-config", config, "--seq", "1k"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_TRUE(has(plan.out, "# job: conv1d, bf16, 160 channels, width 3")) << plan.out;
  const std::string input = write_tensors(folder.file("in"), conv1d_tensors(300));
  EXPECT_EQ(tool({"plan", "--input", input, "--model-config", config}).code, 2) << "width 4 is not 3";
}

}  // namespace
}  // namespace ringattn::testing
