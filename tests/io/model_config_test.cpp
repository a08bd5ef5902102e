// SPDX-License-Identifier: Apache-2.0
// Configs as Hugging Face has them: what a layer computes, and what is refused with the key's name. Values that matter
// are those of the named models' config.json; expectations are those of transformers' classes (5.24) or of the code
// beside the weights.
#include "io/model_config.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

ModelConfig config(std::string_view text) { return {text, "config.json"}; }

constexpr std::string_view kDeepSeekV2Lite = R"({
  "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "head_dim": 64, "hidden_size": 2048,
  "kv_lora_rank": 512, "q_lora_rank": null, "num_attention_heads": 16, "num_key_value_heads": 16,
  "num_hidden_layers": 27, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                   "original_max_position_embeddings": 4096, "type": "yarn"},
  "rope_theta": 10000, "tie_word_embeddings": false})";
constexpr std::string_view kDeepSeekV3 = R"({
  "model_type": "deepseek_v3", "hidden_size": 7168, "kv_lora_rank": 512, "q_lora_rank": 1536, "attention_bias": false,
  "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64, "v_head_dim": 128, "quantization_config": {"weight_block_size": [128, 128]},
  "rope_scaling": {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}})";
constexpr std::string_view kLlama3 = R"({
  "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
  "num_hidden_layers": 32, "rope_scaling": null, "eos_token_id": [128001, 128009], "rms_norm_eps": 1e-05})";
constexpr std::string_view kQwen2 = R"({
  "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
  "num_hidden_layers": 28, "max_window_layers": 21, "sliding_window": 131072, "use_sliding_window": true})";
constexpr std::string_view kGemma2 = R"({"model_type": "gemma2", "hidden_size": 2304, "head_dim": 256,
  "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 26, "sliding_window": 4096,
  "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})";
// gemma-3-4b-it leaves out what its class has: 8 heads of 256 over 4, a scale of 256^-0.5, and the pattern.
constexpr std::string_view kGemma3 = R"({"model_type": "gemma3", "vision_config": {"num_attention_heads": 16},
  "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}})";
constexpr std::string_view kGemma4 = R"({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text",
  "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 32, "num_hidden_layers": 60, "hidden_size": 5376,
  "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": true, "sliding_window": 1024}})";
constexpr std::string_view kGranite4 = R"({"model_type": "granitemoehybrid", "hidden_size": 1536, "mamba_n_heads": 48,
  "attention_multiplier": 0.0078125, "mamba_d_head": "auto", "mamba_expand": 2, "mamba_n_groups": 1,
  "mamba_d_state": 128, "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 3,
  "layer_types": ["mamba", "linear_attention", "attention"]})";
constexpr std::string_view kBamba = R"({"model_type": "bamba", "hidden_size": 4096, "mamba_n_heads": 128,
  "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_conv": 2, "mamba_d_state": 256, "num_attention_heads": 32,
  "num_key_value_heads": 8, "intermediate_size": 14336, "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]})";
constexpr std::string_view kNemotronH = R"({"model_type": "nemotron_h", "hidden_size": 4480, "mamba_num_heads": 128,
  "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "num_attention_heads": 40, "head_dim": 128,
  "num_key_value_heads": 8, "hybrid_override_pattern": "M-M*-", "time_step_limit": [0.0, {"__float__": "Infinity"}]})";
constexpr std::string_view kMamba2 = R"({"model_type": "mamba2", "num_heads": 80, "head_dim": 64, "state_size": 128,
  "n_groups": 1, "conv_kernel": 3, "hidden_size": 2560, "expand": 2, "time_step_limit": [0.0, Infinity]})";
constexpr std::string_view kJamba = R"({"model_type": "jamba", "hidden_size": 4096, "num_attention_heads": 32,
  "num_key_value_heads": 8, "num_hidden_layers": 32, "attn_layer_offset": 4, "attn_layer_period": 8,
  "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "sliding_window": null})";

struct AttentionCase {
  std::string_view text;
  std::int64_t layer;
  int heads, kv_heads, head_dim;
  double scale;
  std::int64_t left = -1, right = -1;
};

void expect_layer(const ModelLayer& layer, const AttentionCase& expected) {
  EXPECT_EQ(layer.kind, LayerKind::kAttention) << expected.text;
  EXPECT_EQ(layer.heads, expected.heads) << expected.text;
  EXPECT_EQ(layer.kv_heads, expected.kv_heads) << expected.text;
  EXPECT_EQ(layer.head_dim, expected.head_dim) << expected.text;
  EXPECT_EQ(layer.head_dim_v, expected.head_dim) << expected.text;
  EXPECT_DOUBLE_EQ(layer.softmax_scale, expected.scale) << expected.text;
  EXPECT_EQ(layer.window_left, expected.left) << expected.text << expected.layer;
  EXPECT_EQ(layer.window_right, expected.right) << expected.text;
}

TEST(ModelConfig, DerivesLinearAttentionByFamily) {
  const ModelConfig ring(R"({"model_type": "bailing_moe_linear", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 34, "layer_group_size": 8, "linear_rope": true,
    "linear_silu": false, "use_qk_norm": true, "group_norm_size": 4, "rope_theta": 600000,
    "partial_rotary_factor": 0.5})",
                         "config");
  const ModelLayer layer = ring.layer(3);
  EXPECT_EQ(layer.kind, LayerKind::kLinearAttention);
  EXPECT_EQ(layer.heads, 32);
  EXPECT_EQ(layer.head_dim, 128);
  EXPECT_EQ(layer.head_dim_v, 128);
  EXPECT_DOUBLE_EQ(layer.softmax_scale, 1.0 / std::sqrt(128.0));
  ASSERT_EQ(layer.log_decays.size(), 32U);
  EXPECT_DOUBLE_EQ(layer.log_decays[1], -std::exp2(-0.5) * (1.0 - 2.0 / 33.0 + 1e-5));
  EXPECT_EQ(layer.rope.refusal, "");
  EXPECT_DOUBLE_EQ(layer.rope.theta, 6e5);
  EXPECT_DOUBLE_EQ(layer.rope.rotary_factor, 0.5);
  for (const std::int64_t full : {7, 31, 32, 33}) EXPECT_EQ(ring.layer(full).kind, LayerKind::kAttention) << full;
  const ModelConfig minimax(R"({"model_type": "minimax", "hidden_size": 6144, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 80})",
                            "config");
  EXPECT_DOUBLE_EQ(minimax.layer(1).softmax_scale, 1.0);
  EXPECT_EQ(minimax.layer(1).rope.type, "none");
  EXPECT_DOUBLE_EQ(minimax.layer(1).log_decays[7], -0.5 * (1.0 - 1.0 / (79.0 + 1e-5) + 1e-5));
  const ModelConfig retnet(R"({"model_type": "retnet", "hidden_size": 2048, "num_heads": 8, "num_hidden_layers": 24})",
                           "config");
  EXPECT_EQ(retnet.layer(3).head_dim, 256);
  EXPECT_EQ(retnet.layer(3).head_dim_v, 512);
  EXPECT_NEAR(retnet.layer(3).log_decays[2], std::log(1.0 - 0x1p-7), 1e-15);
}

TEST(ModelConfig, DerivesAttentionByFamily) {
  const double of_128 = 1.0 / std::sqrt(128.0);
  for (const AttentionCase& row : {
           AttentionCase{kLlama3, 31, 32, 8, 128, of_128},
           {kGemma2, 0, 8, 4, 256, 0.0625, 4095},
           {kGemma2, 1, 8, 4, 256, 0.0625},
           {kGemma3, 4, 8, 4, 256, 0.0625, 1023},
           {kGemma3, 5, 8, 4, 256, 0.0625},
           {kGemma4, 4, 32, 16, 256, 1.0, 1023},
           {kGemma4, 5, 32, 4, 512, 1.0},
           {kQwen2, 20, 28, 4, 128, of_128},
           {kQwen2, 21, 28, 4, 128, of_128, 131071},
           {kGranite4, 2, 12, 4, 128, 0.0078125},
           {kBamba, 9, 32, 8, 128, of_128},
           {kNemotronH, 3, 40, 8, 128, of_128},
           {kJamba, 4, 32, 8, 128, of_128},
           // gemma-3-27b's scalar is that of hidden / heads, and not of the head.
           {R"({"model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "num_attention_heads": 32,
             "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "sliding_window": 1024, "num_hidden_layers": 62})",
            0, 32, 16, 128, 1.0 / std::sqrt(168.0), 1023},
           {R"({"model_type": "granite", "attention_multiplier": 0.0078125, "hidden_size": 4096,
             "num_attention_heads": 32, "num_key_value_heads": 8})",
            3, 32, 8, 128, 0.0078125},
           {R"({"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8})", 0,
            32, 8, 128, of_128, 4095},  // Mistral 7B v0.1 by its class
           {R"({"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
             "sliding_window": null})",
            0, 32, 8, 128, of_128},
           {R"({"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "multi_query": true,
             "new_decoder_architecture": false, "alibi": false})",
            0, 71, 1, 64, 0.125},
           {R"({"model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
             "multi_query": true, "new_decoder_architecture": true})",
            0, 128, 8, 64, 0.125},
           {R"({"model_type": "chatglm", "hidden_size": 4096, "kv_channels": 128, "num_attention_heads": 32,
             "num_layers": 28, "multi_query_attention": true, "multi_query_group_num": 2})",
            27, 32, 2, 128, of_128},
           {R"({"model_type": "deci", "hidden_size": 4096, "num_attention_heads": 32,
             "num_key_value_heads_per_layer": [4, 4, 2, 1]})",
            2, 32, 2, 128, of_128},
           {R"({"model_type": "nemotron-nas", "hidden_size": 8192, "num_attention_heads": 64,
             "num_key_value_heads": null, "block_configs": [{"attention": {"n_heads_in_group": 8, "no_op": false}}]})",
            0, 64, 8, 128, of_128},
           {R"({"model_type": "step3_text", "hidden_size": 7168, "head_dim": 256, "num_attention_heads": 64,
             "num_attention_groups": 1})",
            0, 64, 1, 256, 0.0625},
           {R"({"model_type": "phi3small", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
             "num_hidden_layers": 32, "blocksparse_block_size": 64, "dense_attention_every_n_layers": 2,
             "mup_attn_multiplier": 1.0, "mup_use_scaling": true})",
            1, 32, 8, 128, 1.0 / 128},
           {R"({"model_type": "llama4_text", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
             "head_dim": 128, "num_hidden_layers": 48, "no_rope_layers": [], "attention_chunk_size": 8192})",
            3, 40, 8, 128, of_128},
           {R"({"model_type": "minimax_text_01", "hidden_size": 6144, "head_dim": 128, "num_attention_heads": 64,
             "num_key_value_heads": 8, "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1]})",
            7, 64, 8, 128, of_128},
           {R"({"model_type": "exaone4", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
             "num_hidden_layers": 64, "sliding_window": 4096, "sliding_window_pattern": "LLLG"})",
            4, 40, 8, 128, of_128, 4095},
           {R"({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12})", 0, 12, 12, 64, 0.125},
           {R"({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
             "scale_attn_by_inverse_layer_idx": true})",
            3, 12, 12, 64, 0.125 / 4},
           {R"({"model_type": "gpt_neo", "hidden_size": 2048, "num_heads": 16, "num_layers": 24, "window_size": 256,
             "attention_types": [[["global", "local"], 12]]})",
            1, 16, 16, 128, 1.0, 255},
           {R"({"model_type": "qwen2_moe", "hidden_size": 2048, "num_attention_heads": 16, "use_sliding_window": true,
             "sliding_window": 64, "max_window_layers": 21, "num_hidden_layers": 24})",
            20, 16, 16, 128, of_128, 63},
           {R"({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {"model_type": "qwen3_omni_moe_text",
             "head_dim": 128, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}}})",
            0, 32, 4, 128, of_128},
           {R"({"model_type": "zamba2", "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 54,
             "mamba_d_state": 64, "n_mamba_heads": 80, "mamba_ngroups": 1})",
            6, 32, 32, 160, 1.0 / std::sqrt(80.0)},
           // as transformers writes it back
           {R"({"model_type": "gemma4_text", "head_dim": 256, "num_attention_heads": 32, "num_key_value_heads": 16,
             "attention_k_eq_v": true, "sliding_window": 1024, "num_hidden_layers": 6,
             "per_layer_config": {"05": {"head_dim": 512, "num_key_value_heads": 4}}})",
            5, 32, 4, 512, 1.0},
       }) {
    expect_layer(config(row.text).layer(row.layer, LayerKind::kAttention), row);
  }
}

// MiMo-V2-Flash: layers with windows have K/V heads and sinks of their own.
TEST(ModelConfig, DerivesLayersWithTheirOwnSinks) {
  const ModelConfig mimo = config(R"({"model_type": "mimo_v2_flash", "add_swa_attention_sink_bias": true,
    "add_full_attention_sink_bias": false, "head_dim": 192, "v_head_dim": 128, "num_attention_heads": 64,
    "num_key_value_heads": 4, "swa_num_key_value_heads": 8, "sliding_window": 128, "sliding_window_size": 128,
    "attention_chunk_size": 128, "num_hidden_layers": 4, "hybrid_layer_pattern": [0, 1, 1, 0]})");
  const ModelLayer sliding = mimo.layer(1);
  EXPECT_EQ(sliding.kv_heads, 8);
  EXPECT_EQ(sliding.window_left, 128);
  EXPECT_TRUE(sliding.sinks);
  const ModelLayer full = mimo.layer(3);
  EXPECT_EQ(full.kv_heads, 4);
  EXPECT_EQ(full.head_dim_v, 128);
  EXPECT_FALSE(full.sinks);
  EXPECT_TRUE(config(R"({"model_type": "gpt_oss", "num_attention_heads": 64})").layer(1).sinks);
}

TEST(ModelConfig, DerivesBidirectionalLayers) {
  for (const AttentionCase& row : {
           // embeddinggemma-300m, of which a row sees half of the window on each side
           AttentionCase{R"({"model_type": "gemma3_text", "head_dim": 256, "num_attention_heads": 3,
             "num_key_value_heads": 1, "num_hidden_layers": 24, "query_pre_attn_scalar": 256, "sliding_window": 512,
             "_sliding_window_pattern": 6, "use_bidirectional_attention": true})",
                         0, 3, 1, 256, 0.0625, 256, 256},
           {R"({"model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 22,
             "local_attention": 128, "global_attn_every_n_layers": 3, "sparse_prediction": true})",
            1, 12, 12, 64, 0.125, 64, 64},
           {R"({"model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 22,
             "local_attention": 128, "global_attn_every_n_layers": 3})",
            3, 12, 12, 64, 0.125},
           {R"({"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
             "position_embedding_type": "absolute"})",
            0, 12, 12, 64, 0.125},
       }) {
    const ModelLayer layer = config(row.text).layer(row.layer);
    expect_layer(layer, row);
    EXPECT_TRUE(layer.bidirectional) << row.text;
  }
  EXPECT_FALSE(config(kGemma3).layer(5).bidirectional);
}

TEST(ModelConfig, DerivesMla) {
  const ModelLayer lite = config(kDeepSeekV2Lite).layer({});
  EXPECT_EQ(lite.kind, LayerKind::kMla);
  EXPECT_EQ(lite.heads, 16);
  EXPECT_EQ(lite.latent_dim, 512);
  EXPECT_EQ(lite.head_dim, 128);
  EXPECT_EQ(lite.rope_dim, 64);
  EXPECT_EQ(lite.head_dim_v, 128);
  EXPECT_EQ(lite.window_left, -1);
  // YaRN's factor multiplies queries and keys alike.
  const double mscale = 0.1 * 0.707 * std::log(40.0) + 1.0;
  EXPECT_DOUBLE_EQ(lite.softmax_scale, mscale * mscale / std::sqrt(192.0));
  const ModelLayer v3 = config(kDeepSeekV3).layer({}, LayerKind::kAttention);  // as a file of expanded keys asks
  EXPECT_EQ(v3.heads, 128);
  EXPECT_NEAR(v3.softmax_scale, 0.1352337788608801, 1e-12);  // (0.1 · ln 40 + 1)² / √192
  const ModelConfig kimi = config(R"({"model_type": "kimi_linear", "num_attention_heads": 32, "num_hidden_layers": 8,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]}})");
  EXPECT_EQ(kimi.layer(3).kind, LayerKind::kMla);
  EXPECT_DOUBLE_EQ(kimi.layer(7).softmax_scale, 1.0 / std::sqrt(192.0));
}

TEST(ModelConfig, DerivesSsm) {
  struct Case {
    std::string_view text;
    int heads, dim, state, groups, width;
  };
  for (const auto& [text, heads, dim, state, groups, width] :
       {Case{kMamba2, 80, 64, 128, 1, 3}, Case{kGranite4, 48, 64, 128, 1, 4}, Case{kBamba, 128, 64, 256, 1, 2},
        Case{kNemotronH, 128, 80, 128, 8, 4}}) {
    const ModelLayer layer = config(text).layer(0);
    EXPECT_EQ(layer.kind, LayerKind::kSsd) << text;
    EXPECT_EQ(layer.heads, heads) << text;
    EXPECT_EQ(layer.head_dim, dim) << text;
    EXPECT_EQ(layer.state_dim, state) << text;
    EXPECT_EQ(layer.groups, groups) << text;
    EXPECT_EQ(layer.conv_width, width) << text;
    EXPECT_EQ(layer.conv_channels, heads * dim + 2 * groups * state) << text;
  }
  const ModelLayer jamba = config(kJamba).layer(0);
  EXPECT_EQ(jamba.kind, LayerKind::kSelectiveScan);
  EXPECT_EQ(jamba.heads, 8192);
  EXPECT_EQ(jamba.conv_channels, 8192);
  const ModelLayer first = config(R"({"state_size": 16, "hidden_size": 768, "expand": 2})").layer({});
  EXPECT_EQ(first.kind, LayerKind::kSelectiveScan);
  EXPECT_EQ(first.heads, 1536);
  const std::pair<double, double> usual{0.0, INFINITY};
  EXPECT_EQ(config(kMamba2).layer({}).dt_limit, usual);
  EXPECT_EQ(config(kNemotronH).layer(0).dt_limit, usual);
  EXPECT_EQ(config(kBamba).layer(0).dt_limit, std::nullopt);
}

// The kind that is wanted leaves the other layers aside; without one, and without a layer, the reader asks.
TEST(ModelConfig, AsksWhereLayersDiffer) {
  EXPECT_EQ(config(kBamba).layer({}, LayerKind::kSsd).heads, 128);
  EXPECT_EQ(config(kBamba).layer({}, LayerKind::kAttention).heads, 32);
  struct Case {
    std::string_view text;
    std::string_view part;
  };
  for (const auto& [text, part] : {
           Case{kGemma3, "29 `sliding_attention`, 5 `full_attention`"},
           Case{kBamba, "29 `mamba`, 3 `full_attention`"},
           Case{kNemotronH, "2 `mamba`, 2 `-`, 1 `full_attention`"},
           Case{R"({"model_type": "deci", "hidden_size": 64, "num_attention_heads": 4,
             "num_key_value_heads_per_layer": [4, 4, 2, 1]})",
                "K/V heads: 4 in layer 0, 2 in layer 2"},
       }) {
    const Error error = error_of([&, text = text] { config(text).layer({}); });
    EXPECT_EQ(error.code(), ErrorCode::kUsage) << text;
    EXPECT_NE(std::string(error.what()).find("layers of several kinds"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
  const ModelConfig both = config(R"({"model_type": "falcon_h1", "hidden_size": 2048, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64,
    "mamba_d_state": 256, "num_hidden_layers": 36, "key_multiplier": 0.39, "attention_in_multiplier": 1.0})");
  EXPECT_EQ(both.layer({}, LayerKind::kSsd).heads, 48);
  EXPECT_EQ(both.layer(3, LayerKind::kAttention).heads, 8);
  const Error unsaid = error_of([&] { both.layer({}); });
  EXPECT_NE(std::string(unsaid.what()).find("layer 0 of config.json has attention and an SSM"), std::string::npos);
  EXPECT_TRUE(both.mixes_ops() && config(kBamba).mixes_ops());
  EXPECT_FALSE(config(kGemma3).mixes_ops() || config(kMamba2).mixes_ops());
}

// Such lists were read beyond their end, or shortened the model.
TEST(ModelConfig, RefusesListsThatLackLayers) {
  for (
      const std::string_view text : {
          R"({"model_type": "minimax_text_01", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
             "attn_type_list": []})",
          R"({"model_type": "deci", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads_per_layer": []})",
          R"({"model_type": "nemotron-nas", "hidden_size": 64, "num_attention_heads": 4, "block_configs": []})",
          R"({"model_type": "qwen3_next", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3,
             "layer_types": ["linear_attention", "full_attention"]})",
      }) {
    const Error error = error_of([&] { static_cast<void>(config(text).layer({})); });
    EXPECT_EQ(error.code(), ErrorCode::kFile) << text;
    EXPECT_NE(std::string(error.what()).find("it has an entry for "), std::string::npos) << error.what();
  }
}

TEST(ModelConfig, RefusesLayersByTheirKind) {
  const ModelConfig listed = config(R"({"sliding_window": 128, "num_attention_heads": 4, "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention", "linear_attention", "conv", "chunked_attention"]})");
  EXPECT_EQ(listed.layer(0).window_left, 127);
  EXPECT_EQ(listed.layer(1).window_left, -1);
  struct Case {
    std::int64_t layer;
    ErrorCode code;
    std::string_view part;
  };
  for (const auto& [layer, code, part] :
       {Case{2, ErrorCode::kUnsupported, "`linear_attention`"}, Case{3, ErrorCode::kUnsupported, "`conv`"},
        Case{4, ErrorCode::kUnsupported, "`chunked_attention`"}, Case{5, ErrorCode::kUsage, "layers 0 to 4"}}) {
    const Error error = error_of([&, layer = layer] { listed.layer(layer); });
    EXPECT_EQ(error.code(), code) << layer;
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
  const ModelConfig vision = config(R"({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model",
    "cross_attention_layers": [3, 8], "num_hidden_layers": 40}})");
  EXPECT_EQ(vision.layer(2).kv_heads, 8);
  EXPECT_EQ(error_of([&] { vision.layer(8); }).code(), ErrorCode::kUnsupported);
}

TEST(ModelConfig, RefusesWhatItDoesNotKnow) {
  struct Case {
    std::string_view text;
    std::string_view part;
  };
  for (const auto& [text, part] : {
           Case{R"({"model_type": "foo", "num_attention_heads": 4})", "model_type `foo` of config.json is not known"},
           Case{R"({"model_type": "bloom", "n_head": 4})", "ALiBi"},
           Case{R"({"model_type": "t5", "num_heads": 4})", "biases by relative position"},
           Case{R"({"model_type": "deepseek_v32", "index_topk": 2048})", "an indexer chooses"},
           Case{R"({"num_attention_heads": 4, "index_topk": 2048})", "`index_topk` is 2048"},
           Case{R"({"model_type": "falcon", "alibi": true})", "`alibi` is true"},
           Case{R"({"model_type": "mpt", "n_heads": 4})", "`attn_config.alibi` is true"},
           Case{R"({"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 262144}})",
                "`dual_chunk_attention_config`"},
           Case{R"({"model_type": "qwen2", "use_logn_attn": true})", "`use_logn_attn`"},
           Case{R"({"model_type": "bert", "position_embedding_type": "relative_key"})", "`position_embedding_type`"},
           Case{R"({"model_type": "llama", "sliding_window": 4096})", "`sliding_window` is 4096"},
           Case{R"({"model_type": "llama", "sparse_attention_config": {"block": 64}})", "`sparse_attention_config`"},
           Case{R"({"num_attention_heads": 4, "my_attention_window": 3})", "`my_attention_window` is 3"},
           // Without model_type, what no plain decoder has.
           Case{R"({"num_attention_heads": 4, "hidden_size": 64, "type_vocab_size": 2})", "encoders have it"},
           Case{R"({"num_attention_heads": 4, "hidden_size": 64, "is_decoder": false})", "is_decoder is false"},
           Case{R"({"num_attention_heads": 4, "hidden_size": 64, "laurel_rank": 64})", "`laurel_rank`"},
           Case{R"({"num_attention_heads": 4, "hidden_size": 64, "logits_scaling": 8})", "`logits_scaling`"},
           Case{R"({"num_attention_heads": 4, "hidden_size": 64, "mamba_n_heads": 2, "mamba_d_state": 16})",
                "has no model_type (it has `mamba_d_state`, and no key says which layers have attention"},
       }) {
    const Error error = error_of([&, text = text] { config(text).layer(0); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << text;
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << text << "\n" << error.what();
  }
  // What is switched off, and what is not about attention, is let through.
  for (const std::string_view extra :
       {R"("alibi": false)", R"("index_topk": null)", R"("use_logn_attn": false)", R"("attention_chunk_size": null)",
        R"("attention_dropout": 0.1)", R"("time_step_limit": [NaN, -Infinity])",
        R"("a": "an \"Infinity\" in a string")", R"("sliding_window": 4096, "use_sliding_window": false)"}) {
    EXPECT_EQ(config(fmt::format(R"({{"model_type": "qwen2", "num_attention_heads": 4, "hidden_size": 64,
      "num_key_value_heads": 4, {}}})",
                                 extra))
                  .layer(0)
                  .heads,
              4)
        << extra;
  }
}

TEST(ModelConfig, IsRefusedWithTheKey) {
  struct Case {
    std::string_view text;
    std::string_view part;
  };
  for (const auto& [text, part] : {
           Case{R"({"peft_type": "LORA", "r": 8})", "of an adapter (LoRA)"},
           Case{R"({"d_model": 768, "n_layer": 24, "ssm_cfg": {}})", "mamba_ssm's own format"},
           Case{R"({"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8})", "the params.json of Mistral's"},
           Case{"{}", "doesn't say num_attention_heads"},
           Case{R"({"num_attention_heads": 4})", "doesn't say hidden_size"},
           Case{R"({"num_attention_heads": 4, "head_dim": 64, "kv_lora_rank": 512})", "doesn't say qk_nope_head_dim"},
           Case{R"({"num_attention_heads": "4"})", "num_attention_heads of config.json can't be used (it is a string"},
           Case{R"({"num_attention_heads": -4})", "it is a negative number"},
           Case{R"({"num_attention_heads": 4.5})", "it is 4.5, not a whole number"},
           Case{R"({"num_attention_heads": 70000})", "it is 70000"},
           Case{R"({"num_attention_heads": Infinity})", "can't be used (it is Infinity, which is not finite)"},
           Case{R"({"num_attention_heads": 3, "hidden_size": 64})", "3 heads don't divide"},
           Case{R"({"num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 3})", "3 K/V heads don't divide"},
           Case{R"({"num_attention_heads": 3, "head_dim": 8, "query_pre_attn_scalar": 0})", "query_pre_attn_scalar"},
           Case{R"({"num_attention_heads": 3, "head_dim": 8, "attention_multiplier": 1e-300})", "the scale of scores"},
           Case{R"({"num_attention_heads": 3, "head_dim": 8, "sliding_window": 0})", "sliding_window"},
           Case{R"({"model_type": ["llama"], "head_dim": 8})", "model_type of config.json can't be used (it is a list"},
           Case{R"({"model_type": 7, "head_dim": 8})", "model_type of config.json can't be used (it is a number"},
           Case{R"({"num_attention_heads": -4})", "can't be used (it is a negative number)"},
           Case{R"({"num_attention_heads": [4]})", "num_attention_heads of config.json can't be used (it is a list"},
           Case{R"({"num_attention_heads": {"a": 4}})", "can't be used (it is an object"},
           Case{R"({"num_attention_heads": NaN})", "can't be used (it is NaN, which is not finite)"},
           Case{R"({"num_attention_heads": 3, "kv_lora_rank": 64, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
             "v_head_dim": 8, "rope_scaling": 3})",
                "rope_scaling of config.json can't be used (it isn't an object"},
           Case{R"({"num_attention_heads": 3, "head_dim": 8, "layer_types": [7]})",
                "entry 0 is a number, not a string"},
           Case{R"({"model_type": "mamba2", "state_size": 16})", "doesn't say num_heads"},
           Case{R"({"model_type": "mamba2", "hidden_size": 65536, "expand": 32768, "state_size": 16, "num_heads": 8})",
                "32768 times 65536 is 2147483648, more than 65536"},
           Case{R"({"model_type": "mamba", "hidden_size": 65536, "expand": 65536, "state_size": 16})",
                "65536 times 65536 is 4294967296, more than 65536"},
           Case{R"({"model_type": "mamba", "hidden_size": 8, "state_size": 16, "time_step_limit": [1, 0]})",
                "time_step_limit"},
           Case{R"({"num_attention_heads": 3, "num_hidden_layers": 5000})", "more than 4096 layers"},
           Case{R"({"num_attention_heads": 3, "num_attention_heads": 3})", "names `num_attention_heads` twice"},
           Case{R"({"layer_types": ["full_attention"], "layer_types": ["mamba"]})", "names `layer_types` twice"},
           Case{R"({"rope_scaling": {"factor": 2}, "rope_scaling": {"type": "yarn"}})", "names `rope_scaling` twice"},
           Case{R"({"text_config": {"a": [1], "a": 1}})", "names `text_config.a` twice"},
           Case{"[1]", "it is a list, not an object"},
           Case{"7", "it is a number, not an object"},
           Case{"{\"a\": ", "isn't JSON"},
           Case{"", "isn't JSON"},
           Case{R"({"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]})", "nested deeper"},
       }) {
    const Error error = error_of([&, text = text] { config(text).layer({}); });
    EXPECT_EQ(error.code(), ErrorCode::kFile) << text;
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << text << "\n" << error.what();
  }
  const TemporaryFolder folder;
  EXPECT_EQ(error_of([&] { ModelConfig::open(folder.file("absent.json")); }).code(), ErrorCode::kFile);
  EXPECT_EQ(ModelConfig::open(folder.write("config.json", std::string(kLlama3))).layer({}).heads, 32);
}

// The text model's object counts, as in transformers; a top without model_type inside serves older files.
TEST(ModelConfig, ReadsTheTextModel) {
  const ModelConfig nested = config(R"({"model_type": "llava", "hidden_size": 7, "text_config": {"model_type": "llama",
    "num_key_value_heads": 8}})");
  EXPECT_EQ(nested.layer({}).head_dim, 128);  // 4096 / 32 by its class
  EXPECT_EQ(nested.layer({}).kv_heads, 8);
  const ModelConfig older = config(R"({"num_attention_heads": 4, "text_config": {"head_dim": 64}})");
  EXPECT_EQ(older.layer({}).heads, 4);
  EXPECT_EQ(older.layer({}).head_dim, 64);
}

}  // namespace
}  // namespace ringattn::testing
