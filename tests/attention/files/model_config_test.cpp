// SPDX-License-Identifier: Apache-2.0
// Configs as Hugging Face writes them: what a layer's attention is, and what is refused with the key's name.
#include "attention/files/model_config.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {
namespace {

ModelConfig config(std::string_view text) { return {text, "config.json"}; }

// head_dim is that of the rotary part, as Hugging Face has it for these models.
constexpr std::string_view kDeepSeekV2Lite = R"({
  "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "head_dim": 64, "hidden_size": 2048,
  "kv_lora_rank": 512, "q_lora_rank": null, "num_attention_heads": 16, "num_key_value_heads": 16,
  "num_hidden_layers": 27, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                   "original_max_position_embeddings": 4096, "type": "yarn"},
  "rope_theta": 10000, "tie_word_embeddings": false})";
constexpr std::string_view kDeepSeekV3 = R"({
  "model_type": "deepseek_v3", "hidden_size": 7168, "kv_lora_rank": 512, "q_lora_rank": 1536, "head_dim": 64,
  "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64, "v_head_dim": 128, "quantization_config": {"weight_block_size": [128, 128]},
  "rope_scaling": {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}})";
constexpr std::string_view kLlama3 = R"({
  "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
  "num_hidden_layers": 32, "rope_scaling": null, "eos_token_id": [128001, 128009], "rms_norm_eps": 1e-05})";
constexpr std::string_view kGemma2 = R"({
  "model_type": "gemma2", "hidden_size": 2304, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
  "num_hidden_layers": 26, "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
  "final_logit_softcapping": 30.0})";
constexpr std::string_view kQwen2 = R"({
  "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
  "num_hidden_layers": 28, "max_window_layers": 21, "sliding_window": 131072, "use_sliding_window": true})";

TEST(ModelConfig, OfDeepSeekSaysTheLatents) {
  const ModelConfig lite = config(kDeepSeekV2Lite);
  EXPECT_TRUE(lite.is_latent());
  EXPECT_EQ(lite.heads(), 16);
  EXPECT_EQ(lite.latent_dim(), 512);
  EXPECT_EQ(lite.nope_dim(), 128);
  EXPECT_EQ(lite.rope_dim(), 64);
  EXPECT_EQ(lite.latent_dim_v(), 128);
  EXPECT_EQ(lite.sliding_window({}), std::nullopt);
  // YaRN's factor multiplies queries and keys alike.
  const double lite_mscale = 0.1 * 0.707 * std::log(40.0) + 1.0;
  EXPECT_DOUBLE_EQ(lite.softmax_scale().value(), lite_mscale * lite_mscale / std::sqrt(192.0));
  const ModelConfig v3 = config(kDeepSeekV3);
  EXPECT_EQ(v3.heads(), 128);
  EXPECT_NEAR(v3.softmax_scale().value(), 0.1352337788608801, 1e-12);  // (0.1 · ln 40 + 1)² / √192
}

TEST(ModelConfig, OfAttentionSaysHeads) {
  const ModelConfig llama = config(kLlama3);
  EXPECT_FALSE(llama.is_latent());
  EXPECT_EQ(llama.heads(), 32);
  EXPECT_EQ(llama.kv_heads(), 8);
  EXPECT_EQ(llama.head_dim(), 128);  // hidden_size / heads
  EXPECT_EQ(llama.sliding_window({}), std::nullopt);
  EXPECT_EQ(llama.softcap(), 0.0);
  EXPECT_EQ(llama.softmax_scale(), std::nullopt);
  EXPECT_EQ(config(R"({"num_attention_heads": 6})").kv_heads(), 6);
  EXPECT_EQ(config(R"({"num_attention_heads": 6, "num_key_value_heads": null})").kv_heads(), 6);
}

TEST(ModelConfig, OfGemmaHasAWindowInEveryOtherLayer) {
  const ModelConfig gemma = config(kGemma2);
  EXPECT_EQ(gemma.head_dim(), 256);  // not hidden_size / heads
  EXPECT_EQ(gemma.softcap(), 50.0);
  EXPECT_EQ(gemma.softmax_scale(), 1.0 / 16.0);
  EXPECT_EQ(gemma.sliding_window(0), 4096);
  EXPECT_EQ(gemma.sliding_window(1), std::nullopt);
  const Error unnamed = error_of([&] { gemma.sliding_window({}); });
  EXPECT_EQ(unnamed.code(), ErrorCode::kUsage);
  EXPECT_NE(std::string(unnamed.what()).find("layers of several kinds"), std::string::npos) << unnamed.what();
  const Error beyond = error_of([&] { gemma.sliding_window(26); });
  EXPECT_NE(std::string(beyond.what()).find("layers 0 to 25"), std::string::npos) << beyond.what();
}

TEST(ModelConfig, OfQwenHasAWindowInItsLastLayers) {
  const ModelConfig qwen = config(kQwen2);
  EXPECT_EQ(qwen.sliding_window(20), std::nullopt);
  EXPECT_EQ(qwen.sliding_window(21), 131072);
  std::string off(kQwen2);
  off.replace(off.find("true"), 4, "false");
  EXPECT_EQ(config(off).sliding_window({}), std::nullopt);
  std::string none(kQwen2);
  none.replace(none.find("\"max_window_layers\": 21"), 23, "\"max_window_layers\": 28");
  EXPECT_EQ(config(none).sliding_window({}), std::nullopt);
}

TEST(ModelConfig, OfListedLayersGoesByThem) {
  const ModelConfig listed = config(R"({"sliding_window": 128, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "linear_attention"]})");
  EXPECT_EQ(listed.sliding_window(0), 128);
  EXPECT_EQ(listed.sliding_window(1), std::nullopt);
  EXPECT_NE(std::string(error_of([&] { listed.sliding_window(2); }).what()).find("`linear_attention`"),
            std::string::npos);
  EXPECT_EQ(error_of([&] { listed.sliding_window(3); }).code(), ErrorCode::kUsage);
  EXPECT_EQ(config(R"({"sliding_window": 4096})").sliding_window({}), 4096);  // Mistral: all layers
  const ModelConfig pattern = config(R"({"text_config": {"sliding_window": 512, "sliding_window_pattern": 6}})");
  EXPECT_EQ(pattern.sliding_window(4), 512);
  EXPECT_EQ(pattern.sliding_window(5), std::nullopt);
}

// Shapes only, as Hugging Face writes them.
constexpr std::string_view kMamba2 = R"({"model_type": "mamba2", "num_heads": 80, "head_dim": 64, "state_size": 128,
  "n_groups": 1, "conv_kernel": 3, "hidden_size": 2560, "expand": 2, "time_step_limit": [0.0, Infinity]})";
constexpr std::string_view kGranite = R"({"model_type": "granitemoehybrid", "hidden_size": 1536, "mamba_n_heads": 48,
  "mamba_d_head": "auto", "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 128, "num_attention_heads": 12,
  "num_key_value_heads": 4, "num_hidden_layers": 3, "layer_types": ["mamba", "mamba", "attention"]})";
constexpr std::string_view kBamba = R"({"model_type": "bamba", "hidden_size": 4096, "mamba_n_heads": 128,
  "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_conv": 2, "mamba_d_state": 256, "num_attention_heads": 32,
  "intermediate_size": 14336, "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]})";
constexpr std::string_view kNemotron = R"({"model_type": "nemotron_h", "hidden_size": 4480, "mamba_num_heads": 128,
  "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "num_attention_heads": 40, "head_dim": 128,
  "hybrid_override_pattern": "M-M*-", "time_step_limit": [0.0, {"__float__": "Infinity"}]})";

TEST(ModelConfig, OfScansSaysTheirDims) {
  struct Case {
    std::string_view text;
    int heads, dim, state, groups, width;
  };
  for (const auto& [text, heads, dim, state, groups, width] :
       {Case{kMamba2, 80, 64, 128, 1, 3}, Case{kGranite, 48, 64, 128, 1, 4}, Case{kBamba, 128, 64, 256, 1, 2},
        Case{kNemotron, 128, 80, 128, 8, 4}}) {
    const ModelConfig model = config(text);
    EXPECT_TRUE(model.has_scans() && !model.scans_channels()) << text;
    EXPECT_EQ(model.scan_heads(), heads) << text;
    EXPECT_EQ(model.scan_head_dim(), dim) << text;
    EXPECT_EQ(model.scan_state_dim(), state) << text;
    EXPECT_EQ(model.scan_groups(), groups) << text;
    EXPECT_EQ(model.scan_conv_width(), width) << text;
  }
  EXPECT_FALSE(config(kMamba2).has_attention());
  EXPECT_EQ(config(kNemotron).head_dim(), 128);  // of its attention
  const ModelConfig first = config(R"({"state_size": 16, "hidden_size": 768, "expand": 2})");
  EXPECT_TRUE(first.scans_channels());
  EXPECT_EQ(first.scan_heads(), 1536);
  const Error headless = error_of([] { config(R"({"model_type": "mamba2", "state_size": 16})").scans_channels(); });
  EXPECT_NE(std::string(headless.what()).find("doesn't say num_heads"), std::string::npos) << headless.what();
  EXPECT_FALSE(config(kLlama3).has_scans());
  EXPECT_EQ(error_of([] {
              config(R"({"mamba_n_heads": 7, "mamba_d_state": 16, "hidden_size": 64})").scan_head_dim();
            }).code(),
            ErrorCode::kFile);
}

TEST(ModelConfig, ReadsLimitsWithInfinities) {
  const std::pair<double, double> usual{0.0, INFINITY};
  EXPECT_EQ(config(kMamba2).dt_limit(), usual);
  EXPECT_EQ(config(kNemotron).dt_limit(), usual);
  EXPECT_EQ(config(kBamba).dt_limit(), std::nullopt);
  EXPECT_EQ(config(R"({"time_step_limit": [0.001, 0.1]})").dt_limit(), (std::pair{0.001, 0.1}));
  for (const std::string_view bad : {"[1, 0]", "[0.0]", "[0, 1, 2]"}) {
    EXPECT_EQ(error_of([&] { config(fmt::format(R"({{"time_step_limit": {}}})", bad)).dt_limit(); }).code(),
              ErrorCode::kFile)
        << bad;
  }
}

TEST(ModelConfig, OfHybridsTellsItsLayersApart) {
  EXPECT_EQ(config(kGranite).layer_scans(0), true);
  EXPECT_EQ(config(kGranite).layer_scans(2), false);
  EXPECT_EQ(config(kBamba).layer_scans(8), true);
  EXPECT_EQ(config(kBamba).layer_scans(9), false);
  EXPECT_EQ(config(kNemotron).layer_scans(2), true);
  EXPECT_EQ(config(kNemotron).layer_scans(3), false);
  EXPECT_EQ(config(kMamba2).layer_scans(3), std::nullopt);
  const Error neither = error_of([] { config(kNemotron).layer_scans(1); });
  EXPECT_EQ(neither.code(), ErrorCode::kUsage);
  EXPECT_NE(std::string(neither.what()).find("neither attention nor a scan"), std::string::npos) << neither.what();
  for (const std::string_view text : {kGranite, kBamba, kNemotron}) {
    EXPECT_EQ(error_of([&] { config(text).layer_scans(60); }).code(), ErrorCode::kUsage) << text;
  }
}

TEST(ModelConfig, MayHoldInfinitiesInWhatIsNotAsked) {
  for (const std::string_view limit :
       {"[0.0, Infinity]", "[NaN, -Infinity]", R"({"__float__": "Infinity"})", R"("an \"Infinity\" in a string")"}) {
    EXPECT_EQ(config(fmt::format(R"({{"time_step_limit": {}, "num_attention_heads": 4}})", limit)).heads(), 4) << limit;
  }
  EXPECT_EQ(error_of([] { config(R"({"num_attention_heads": Infinity})").heads(); }).code(), ErrorCode::kFile);
}

TEST(ModelConfig, OfSparseAttentionIsRefused) {
  config(R"({"num_attention_heads": 4, "index_topk": null})").check_attends_to_all();
  const Error error = error_of([] { config(R"({"index_topk": 2048})").check_attends_to_all(); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(error.what()).find("index_topk = 2048"), std::string::npos) << error.what();
}

// Of lists, too, what stands at the top counts, wherever it stands.
TEST(ModelConfig, TakesListsOfTheTopFirst) {
  const std::string_view top = R"("layer_types": ["mamba", "full_attention"])";
  const std::string_view text = R"("text_config": {"layer_types": ["full_attention", "mamba"]})";
  for (const bool first : {false, true}) {
    const ModelConfig both = config(fmt::format("{{{}, {}}}", first ? top : text, first ? text : top));
    EXPECT_EQ(both.layer_scans(0), true) << first;
    EXPECT_EQ(both.layer_scans(1), false) << first;
  }
}

TEST(ModelConfig, IsRefusedWithTheKey) {
  struct Case {
    std::string_view text;
    std::string_view part;
  };
  const auto use = [](const ModelConfig& read) {
    read.heads();
    read.kv_heads();
    read.head_dim();
    read.softcap();
    read.softmax_scale();
    read.sliding_window({});
    if (read.is_latent()) read.nope_dim();
  };
  for (const auto& [text, part] : {
           Case{"{}", "doesn't say num_attention_heads"},
           Case{R"({"num_attention_heads": 4})", "doesn't say hidden_size"},
           Case{R"({"num_attention_heads": 4, "head_dim": 64, "kv_lora_rank": 512})", "doesn't say qk_nope_head_dim"},
           Case{R"({"num_attention_heads": "4"})", "num_attention_heads of config.json can't be used (it is a string"},
           Case{R"({"num_attention_heads": -4})", "it is a negative number"},
           Case{R"({"num_attention_heads": 4.5})", "it is 4.5, not a whole number"},
           Case{R"({"num_attention_heads": 70000})", "it is 70000"},
           Case{R"({"num_attention_heads": 3, "hidden_size": 64})", "3 heads don't divide"},
           Case{R"({"num_attention_heads": 3, "head_dim": 8, "query_pre_attn_scalar": 0})", "query_pre_attn_scalar"},
           Case{R"({"num_attention_heads": 3, "head_dim": 8, "sliding_window": 0})", "sliding_window"},
           Case{R"({"num_attention_heads": [4]})", "num_attention_heads of config.json can't be used (it is a list"},
           Case{R"({"num_attention_heads": {"a": 4}})", "can't be used (it is an object"},
           Case{R"({"num_attention_heads": 3, "head_dim": 8, "kv_lora_rank": NaN})", "doesn't say qk_nope_head_dim"},
           Case{R"({"num_attention_heads": 3, "head_dim": 8, "kv_lora_rank": 64, "rope_scaling": 3})",
                "rope_scaling of config.json can't be used (it isn't an object"},
           Case{R"({"num_attention_heads": 3, "head_dim": 8, "sliding_window": []})", "can't be used (it is a list"},
           Case{R"({"num_attention_heads": 3, "num_attention_heads": 3})", "names `num_attention_heads` twice"},
           Case{R"({"layer_types": ["full_attention"], "layer_types": ["mamba"]})", "names `layer_types` twice"},
           Case{R"({"rope_scaling": {"factor": 2}, "rope_scaling": {"type": "yarn"}})", "names `rope_scaling` twice"},
           Case{R"({"rope_scaling": 1, "rope_scaling": {}})", "names `rope_scaling` twice"},
           Case{R"({"text_config": {"a": [1], "a": 1}})", "names `text_config.a` twice"},
           Case{"[1]", "it is a list, not an object"},
           Case{"7", "it is a number, not an object"},
           Case{"{\"a\": ", "isn't JSON"},
           Case{"", "isn't JSON"},
           Case{R"({"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]})", "nested deeper"},
       }) {
    const Error error = error_of([&, text = text] { use(config(text)); });
    EXPECT_EQ(error.code(), ErrorCode::kFile) << text;
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << text << "\n" << error.what();
  }
  const TemporaryFolder folder;
  EXPECT_EQ(error_of([&] { ModelConfig::open(folder.file("absent.json")); }).code(), ErrorCode::kFile);
  EXPECT_EQ(ModelConfig::open(folder.write("config.json", std::string(kLlama3))).heads(), 32);
}

}  // namespace
}  // namespace ringattn::testing
