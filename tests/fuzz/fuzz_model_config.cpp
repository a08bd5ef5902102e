// SPDX-License-Identifier: Apache-2.0
// Any bytes as a model's config.json: refused with one message, or layers whose dims are in range.
#include <cmath>
#include <optional>

#include "base/error.hpp"
#include "io/model_config.hpp"
#include "tests/fuzz/fuzz_target.hpp"

namespace ringattn::testing {

namespace {

constexpr int kMaxCount = 1 << 16;

void check_count(int value, const char* what) { fuzz_check(value >= 1 && value <= kMaxCount, what); }

void check_layer(const ModelLayer& layer) {
  check_count(layer.heads, "heads are in range");
  if (layer.is_ssm()) {
    check_count(layer.state_dim, "states are in range");
    check_count(layer.groups, "groups are in range");
    check_count(layer.conv_width, "widths are in range");
    fuzz_check(layer.heads % layer.groups == 0, "groups divide the heads");
    fuzz_check(layer.conv_channels >= 1, "channels are positive");
    fuzz_check(!layer.dt_limit || layer.dt_limit->first <= layer.dt_limit->second, "limits are in order");
    return;
  }
  check_count(layer.kv_heads, "K/V heads are in range");
  check_count(layer.head_dim, "head_dim is in range");
  check_count(layer.head_dim_v, "head_dim_v is in range");
  fuzz_check(layer.heads % layer.kv_heads == 0, "K/V heads divide the heads");
  fuzz_check(layer.softmax_scale >= 1e-30 && layer.softmax_scale <= 1e30, "the scale is a positive number");
  fuzz_check(layer.softcap >= 0.0 && std::isfinite(layer.softcap), "the cap is a number");
  fuzz_check(layer.window_left >= -1 && layer.window_right >= -1, "windows are lengths, or -1");
  if (layer.kind == LayerKind::kMla) {
    check_count(layer.latent_dim, "latent_dim is in range");
    check_count(layer.rope_dim, "rope_dim is in range");
  }
}

void check_refusal(const Error& error) {
  const std::string_view message = error.what();
  fuzz_check(
      error.code() == ErrorCode::kFile || error.code() == ErrorCode::kUnsupported || error.code() == ErrorCode::kUsage,
      "refusals are about the file, its model or the layer", message);
  fuzz_check(message.find_first_of(std::string_view("\n\r\0", 3)) == std::string_view::npos && message.size() < 1000,
             "a message is one line", message);
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  return {
      R"({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 4, "rope_scaling": null, "eos_token_id": [128001, 128009], "rms_norm_eps": 1e-05})",
      R"({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376,
        "num_attention_heads": 32, "num_hidden_layers": 6, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "sliding_window": 1024, "use_bidirectional_attention": true}})",
      R"({"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 32,
        "num_hidden_layers": 6, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "sliding_window": 1024})",
      R"({"model_type": "deepseek_v3", "kv_lora_rank": 512, "num_attention_heads": 128, "num_hidden_layers": 3,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_scaling": {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}})",
      R"({"model_type": "granitemoehybrid", "hidden_size": 1536, "mamba_n_heads": 48, "mamba_d_head": "auto",
        "mamba_expand": 2, "mamba_d_state": 128, "num_attention_heads": 12, "attention_multiplier": 0.0078125,
        "layer_types": ["mamba", "attention"], "time_step_limit": [0.0, Infinity]})",
      R"({"model_type": "nemotron_h", "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128,
        "n_groups": 8, "num_attention_heads": 40, "head_dim": 128, "hybrid_override_pattern": "M-M*-"})",
      R"({"model_type": "jamba", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 8,
        "attn_layer_offset": 4, "attn_layer_period": 8, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2})",
      R"({"model_type": "nemotron-nas", "hidden_size": 8192, "num_attention_heads": 64, "block_configs": [
        {"attention": {"n_heads_in_group": 8, "no_op": false}}, {"attention": {"no_op": true}}]})",
      R"({"model_type": "gpt_neo", "hidden_size": 64, "num_heads": 4, "num_layers": 4, "window_size": 256,
        "attention_types": [[["global", "local"], 2]]})",
      R"({"model_type": "kimi_linear", "num_attention_heads": 32, "num_hidden_layers": 4, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}})",
      R"({"model_type": "exaone4", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 4,
        "sliding_window": 4096, "sliding_window_pattern": "LLLG"})",
      R"({"num_attention_heads": 4, "head_dim": 64, "sliding_window": 128, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "linear_attention"]})"};
}

std::vector<std::string> fuzz_words() {
  std::vector<std::string> words{"{",     "}",    "[",     "]",       ",",    ":",         "\"",       "\\",
                                 "null",  "true", "false", "-1",      "1e9",  "0",         "Infinity", "NaN",
                                 "65536", "{}",   "[]",    "\\u0000", "\xff", "\"mamba\"", "\"auto\""};
  for (const char* key : {"model_type",
                          "text_config",
                          "num_attention_heads",
                          "num_key_value_heads",
                          "hidden_size",
                          "head_dim",
                          "num_hidden_layers",
                          "sliding_window",
                          "layer_types",
                          "kv_lora_rank",
                          "mamba_n_heads",
                          "mamba_d_ssm",
                          "state_size",
                          "expand",
                          "attn_type_list",
                          "full_attn_idxs",
                          "cross_attention_layers",
                          "no_rope_layers",
                          "num_key_value_heads_per_layer",
                          "attention_chunk_size",
                          "max_window_layers",
                          "use_sliding_window",
                          "query_pre_attn_scalar",
                          "attention_multiplier",
                          "attn_logit_softcapping",
                          "layers_block_type"}) {
    words.push_back(std::string("\"") + key + "\": ");
  }
  for (const char* type : {"mamba2", "falcon", "falcon_h1", "zamba2", "qwen2", "qwen3_next", "minimax", "mllama",
                           "llama4", "phi3small", "modernbert", "recurrent_gemma", "smollm3", "gpt2", "mpt", "deci"}) {
    words.push_back(std::string("\"model_type\": \"") + type + "\",");
  }
  return words;
}

}  // namespace ringattn::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ringattn;
  using namespace ringattn::testing;
  std::optional<ModelConfig> config;
  try {
    config.emplace(std::string_view(reinterpret_cast<const char*>(data), size), "FILE");
  } catch (const Error& error) {
    check_refusal(error);
    return 0;
  }
  for (const std::optional<LayerKind> wanted :
       {std::optional<LayerKind>(), std::optional(LayerKind::kAttention), std::optional(LayerKind::kSsd)}) {
    for (std::int64_t layer = -1; layer < 8; ++layer) {
      try {
        check_layer(config->layer(layer < 0 ? std::nullopt : std::optional(layer), wanted));
      } catch (const Error& error) {
        check_refusal(error);
      }
    }
  }
  return 0;
}
