// SPDX-License-Identifier: Apache-2.0
// What --model-config fills in for a layer of attention, and what it says beside a file. The values by family are those
// of model_config_test.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/cli/report_schema.hpp"
#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

// q [40, heads, dim], and k and v of kv_heads.
FileShape attention_file(long long heads, long long kv_heads, long long dim, long long dim_v) {
  FileShape shape;
  shape.q = {40, heads, dim};
  shape.k = {40, kv_heads, dim};
  shape.v = {40, kv_heads, dim_v};
  return shape;
}

class ModelLayerFlags : public ::testing::Test {
 protected:
  std::string config(std::string_view text) { return folder_.write("config.json", std::string(text)); }
  std::string input(const FileShape& shape) { return folder_.write("in.safetensors", safetensors_bytes(shape)); }
  Finished beside(const FileShape& shape, const Words& flags = {}) {
    return tool(Words{"run", "--input", input(shape), "--model-config", folder_.file("config.json")} + flags);
  }
  void expect_refused(const FileShape& shape, const char* what) {
    const Finished refused = beside(shape);
    EXPECT_EQ(refused.code, 2) << refused.out;
    EXPECT_TRUE(has(refused.err, "contradicts --input")) << refused.err;
    EXPECT_TRUE(has(refused.err, what)) << refused.err;
  }

  TemporaryFolder folder_;
};

TEST_F(ModelLayerFlags, SayTheScaleAlways) {
  EXPECT_TRUE(has(tool(Words{"run"} + small_job()).out, ", causal, scale 0.25; 1 sequence"));
  EXPECT_TRUE(has(tool({"plan", "--seq", "1k,2k", "--head-dim", "64"}).out, ", causal, scale 0.125\n"));
  const std::string path = config(R"({"model_type": "granite", "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attention_multiplier": 0.0078125})");
  const Words job{"run", "--synthetic", "7", "--seq", "300", "--dtype", "fp32", "--model-config", path};
  const Finished scaled = tool(job);
  EXPECT_TRUE(has(scaled.out, ", causal, scale 0.0078125; 1 sequence")) << scaled.out << scaled.err;
  EXPECT_EQ(digest_of(scaled.out), digest_of(tool(Words{"run", "--softmax-scale", "0.0078125"} + small_job()).out));
  // The op's default is left to the op.
  config(R"({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2})");
  EXPECT_TRUE(has(tool(job + Words{"--print-config"}).out, "# softmax-scale is not set"));
}

TEST_F(ModelLayerFlags, SetTheMaskOfBidirectionalLayers) {
  const std::string path = config(R"({"model_type": "modernbert", "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 4, "local_attention": 32})");
  const Words job{"run", "--synthetic", "7", "--seq", "300", "--dtype", "fp32", "--model-config", path, "--layer"};
  const Words rows{"run",        "--synthetic", "7",          "--seq", "300",     "--heads", "4",
                   "--kv-heads", "4",           "--head-dim", "16",    "--dtype", "fp32"};
  const Finished local = tool(job + Words{"1"});
  EXPECT_EQ(digest_of(local.out), digest_of(tool(rows + Words{"--mask", "full", "--window", "16,16"}).out))
      << local.err;
  EXPECT_EQ(digest_of(tool(job + Words{"3"}).out), digest_of(tool(rows + Words{"--mask", "full"}).out));
  // What a user says counts.
  EXPECT_EQ(digest_of(tool(job + Words{"1", "--mask", "causal"}).out),
            digest_of(tool(rows + Words{"--window", "16,-1"}).out));
}

TEST_F(ModelLayerFlags, AnnounceSinks) {
  const std::string path = config(R"({"model_type": "gpt_oss", "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 2, "sliding_window": 8})");
  const Words job{"--synthetic", "7", "--seq", "64", "--model-config", path, "--layer", "1"};
  for (const Words& command : {Words{"run"}, Words{"plan"}}) {
    const Finished said = tool(command + (command[0] == "run" ? job : Words(job.begin() + 2, job.end())));
    EXPECT_TRUE(has(said.out, "# sinks: the model's layer has a learned logit")) << said.out << said.err;
  }
  EXPECT_TRUE(has(tool(Words{"run", "--print-config"} + job).out, "# sinks of the model's layer are not generated"));
  FileShape file = attention_file(4, 2, 16, 16);
  const Finished without = beside(file, {"--layer", "1"});
  EXPECT_EQ(without.code, 2);
  EXPECT_TRUE(has(without.err, "the file has no tensor `sinks`")) << without.err;
  file.sinks = {0.0F, 1.0F, 2.0F, 3.0F};
  const Finished with = beside(file, {"--layer", "1"});
  EXPECT_EQ(with.code, 0) << with.err;
  EXPECT_TRUE(has(with.out, ", sinks, scale 0.25;")) << with.out;
  EXPECT_FALSE(has(with.out, "# sinks:")) << with.out;
}

TEST_F(ModelLayerFlags, AllowSharesThatTensorParallelismMakes) {
  config(R"({"model_type": "llama", "hidden_size": 512, "num_attention_heads": 32, "num_key_value_heads": 8})");
  for (const auto& [heads, kv_heads] : {std::pair{32, 8}, {8, 2}, {4, 1}, {2, 1}}) {
    const Finished share = beside(attention_file(heads, kv_heads, 16, 16));
    EXPECT_EQ(share.code, 0) << heads << "/" << kv_heads << share.err;
  }
  expect_refused(attention_file(4, 2, 16, 16), "num_key_value_heads is 8 in the config and 2 by the file's tensors");
  expect_refused(attention_file(32, 4, 16, 16), "num_key_value_heads is 8 in the config and 4");
  expect_refused(attention_file(12, 4, 16, 16), "num_attention_heads is 32 in the config and 12");
  expect_refused(attention_file(32, 8, 32, 32), "head_dim is 16 in the config and 32");
  expect_refused(attention_file(32, 8, 16, 32), "the dim of v is 16 in the config and 32");
}

// Beside a file, its op says which layers of a hybrid model are meant.
TEST_F(ModelLayerFlags, TakeTheLayersOfTheFilesOp) {
  const std::string path = config(R"({"model_type": "bamba", "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "num_hidden_layers": 4,
    "attn_layer_indices": [1]})");
  EXPECT_EQ(beside(attention_file(4, 2, 16, 16)).code, 0);
  expect_refused(attention_file(4, 4, 16, 16), "num_key_value_heads is 2 in the config and 4");
  const Finished unnamed = tool({"plan", "--model-config", path});
  EXPECT_EQ(unnamed.code, 2);
  EXPECT_TRUE(has(unnamed.err, "(3 `mamba`, 1 `full_attention`). Name one with --layer 0.")) << unnamed.err;
}

TEST_F(ModelLayerFlags, KnowExpandedKeysOfLatents) {
  config(R"({"model_type": "deepseek_v2", "num_attention_heads": 8, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}})");
  const Finished expanded = beside(attention_file(4, 4, 24, 16));
  EXPECT_EQ(expanded.code, 0) << expanded.err;
  EXPECT_TRUE(has(expanded.out, ", scale 0.382498")) << expanded.out;  // (0.1 · ln 40 + 1)² / √24
  EXPECT_EQ(beside(attention_file(8, 1, 40, 32)).code, 0) << "the latents as one K/V head";
  expect_refused(attention_file(4, 4, 16, 16), "head_dim is 24 in the config and 16");
  expect_refused(attention_file(4, 2, 24, 16), "num_key_value_heads is 8 in the config and 2");
}

}  // namespace
}  // namespace ringattn::testing
