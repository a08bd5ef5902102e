// SPDX-License-Identifier: Apache-2.0
#include "io/model_families.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "io/layer_kinds.hpp"
#include "io/model_rules.hpp"

namespace ringattn {

namespace {

constexpr ModelKeyNames kGpt2Keys{.heads = "n_head", .hidden = "n_embd", .layers = "n_layer", .head_dim = ""};
constexpr ModelKeyNames kDerivedHeadDim{.head_dim = ""};
constexpr std::string_view kWindow = "sliding_window use_sliding_window";
constexpr std::string_view kQwen2Window = "sliding_window use_sliding_window max_window_layers";
constexpr std::string_view kGemmaReads =
    "sliding_window sliding_window_pattern _sliding_window_pattern query_pre_attn_scalar attn_logit_softcapping "
    "use_bidirectional_attention attention_k_eq_v";
constexpr std::string_view kMambaReads =
    "attn_layer_indices attn_layer_period attn_layer_offset mamba_chunk_size chunk_size "
    "attention_in_multiplier attention_out_multiplier attention_hidden_size attention_head_dim "
    "use_shared_attention_adapter";
constexpr std::string_view kEncoderDecoder =
    "it is an encoder-decoder, whose encoder, decoder and cross attention differ";
constexpr std::string_view kAlibi = "its scores have ALiBi biases";
constexpr std::string_view kRelativeBias = "its scores have biases by relative position";
constexpr std::string_view kIndexed = "its queries attend to tokens that an indexer chooses";

constexpr ModelFamily kFamilies[] = {
    // Full causal attention with scores times 1 / sqrt(head_dim), the same in all layers.
    {.names = "llama", .defaults = "hidden_size=4096 num_hidden_layers=32 num_attention_heads=32"},
    {.names = "arcee apertus bitnet cohere jais2 nanochat persimmon olmo olmo2 olmoe flex_olmo phi stablelm nemotron "
              "exaone internlm3 "
              "hunyuan_v1_dense hunyuan_v1_moe glm4_moe ernie4_5_moe glm4v glm4v_text glm4v_moe glm4v_moe_text "
              "aria_text"},
    {.names = "glm glm4", .defaults = "num_key_value_heads=2 head_dim=128"},
    {.names = "helium seed_oss ernie4_5 hy_v3 solar_open", .defaults = "head_dim=128"},
    {.names = "minimax_m2",
     .kind = minimax_m2_layers,
     .reads = "attn_type_list",
     .defaults = "num_key_value_heads=8 head_dim=128"},
    {.names = "qwen3_vl qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text",
     .defaults = "hidden_size=4096 num_hidden_layers=32 num_attention_heads=32 num_key_value_heads=32 head_dim=128"},
    {.names = "qwen3_omni_moe qwen3_omni_moe_text",
     .defaults = "hidden_size=2048 num_hidden_layers=28 num_attention_heads=28 num_key_value_heads=4"},
    {.names = "gpt_neox", .kv_heads = all_heads, .keys = kDerivedHeadDim},
    {.names = "opt biogpt", .kv_heads = all_heads, .keys = kDerivedHeadDim},
    {.names = "gpt2",
     .scale = gpt2_scale,
     .kv_heads = all_heads,
     .keys = kGpt2Keys,
     .reads = "scale_attn_weights scale_attn_by_inverse_layer_idx"},
    {.names = "gptj codegen", .kv_heads = all_heads, .keys = kGpt2Keys, .reads = "scale_attn_weights"},
    {.names = "gpt_bigcode",
     .scale = gpt2_scale,
     .kv_heads = bigcode_kv_heads,
     .keys = kGpt2Keys,
     .reads = "scale_attn_weights"},
    {.names = "falcon", .kv_heads = falcon_kv_heads, .keys = kDerivedHeadDim},
    {.names = "dbrx",
     .kv_heads = dbrx_kv_heads,
     .keys = {.heads = "n_heads", .hidden = "d_model", .layers = "n_layers", .head_dim = ""},
     .reads = "attn_config"},
    {.names = "mpt",
     .scale = mpt_scale,
     .kv_heads = mpt_kv_heads,
     .keys = {.heads = "n_heads", .hidden = "d_model", .layers = "n_layers", .head_dim = ""},
     .reads = "attn_config",
     .defaults = "attn_config.alibi=true"},
    // THUDM's chatglm2, chatglm3 and glm-4, whose code lies beside their weights; vLLM's chatglm.py.
    {.names = "chatglm",
     .kv_heads = chatglm_kv_heads,
     .keys = {.head_dim = "kv_channels"},
     .reads = "multi_query_attention"},
    // StepFun's Step3, by its configuration in vLLM (configs/step3_vl.py).
    {.names = "step3 step3_vl step3_text",
     .kv_heads = kv_groups,
     .reads = "num_attention_groups",
     .defaults = "head_dim=256"},
    // DeciLM and Llama-Nemotron, by nemotron_nas.py of vLLM and SGLang.
    {.names = "deci nemotron-nas", .kind = nas_layers, .kv_heads = nas_kv_heads},
    // MiniMax's M1 and Text-01, by the code beside their weights and the class of transformers.
    {.names = "minimax minimax_m1 minimax_text_01",
     .kind = minimax_layers,
     .traits = kLightning,
     .reads = "attn_type_list sliding_window "
              "full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor "
              "layernorm_full_attention_alpha layernorm_full_attention_beta layernorm_linear_attention_alpha "
              "layernorm_linear_attention_beta"},
    // Ring and Ling with linear attention, 2.0 to 2.6: the code beside their weights, and bailing_moe_linear.py of MLX.
    // Ling 3, with KDA: the class of transformers.
    {.names = "bailing_moe_linear bailing_hybrid",
     .kind = bailing_layers,
     .scale = yarn_scale,
     .traits = kMla | kLightning,
     .reads = "linear_rope linear_silu use_linear_silu use_qk_norm group_norm_size layer_group_size kda_safe_gate "
              "kda_lower_bound"},
    // flash-linear-attention's RetNet.
    {.names = "retnet",
     .kind = retnet_layers,
     .traits = kLightning,
     .keys = {.heads = "num_heads", .head_dim = ""},
     .reads = "attn_mode"},
    // Microsoft's Phi-3-small, by the code beside its weights and phi3small.py of MLX.
    {.names = "phi3small",
     .kind = phi3small_layers,
     .scale = phi3small_scale,
     .reads = "blocksparse_block_size blocksparse_homo_head_pattern blocksparse_num_local_blocks "
              "blocksparse_triton_kernel_block_size blocksparse_vert_stride dense_attention_every_n_layers "
              "mup_attn_multiplier"},

    // Windows.
    {.names = "mistral",
     .kind = windowed_layers,
     .reads = kWindow,
     .defaults =
         "hidden_size=4096 num_hidden_layers=32 num_attention_heads=32 num_key_value_heads=8 sliding_window=4096"},
    {.names = "ministral",
     .kind = windowed_layers,
     .reads = kWindow,
     .defaults = "num_key_value_heads=8 sliding_window=4096"},
    {.names = "ministral3",
     .kind = windowed_layers,
     .reads = kWindow,
     .defaults = "hidden_size=4096 num_hidden_layers=34 num_attention_heads=32 num_key_value_heads=8 head_dim=128"},
    {.names = "mixtral phimoe", .kind = windowed_layers, .reads = kWindow, .defaults = "num_key_value_heads=8"},
    {.names = "phi3 phi4_multimodal phi4mm", .kind = windowed_layers, .reads = kWindow},
    {.names = "starcoder2", .kind = windowed_layers, .reads = kWindow, .defaults = "num_key_value_heads=2"},
    {.names = "qwen3_moe",
     .kind = windowed_layers,
     .reads = kQwen2Window,
     .defaults = "use_sliding_window=false num_key_value_heads=4"},
    {.names = "qwen2",
     .kind = last_layers_windowed,
     .reads = kQwen2Window,
     .defaults = "use_sliding_window=false hidden_size=4096 num_hidden_layers=32 num_attention_heads=32 "
                 "num_key_value_heads=32 sliding_window=4096 max_window_layers=28"},
    {.names = "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
     .kind = last_layers_windowed,
     .reads = kQwen2Window,
     .defaults = "use_sliding_window=false hidden_size=8192 num_hidden_layers=80 num_attention_heads=64 "
                 "num_key_value_heads=8 sliding_window=4096 max_window_layers=80"},
    {.names = "qwen2_5_omni qwen2_5_omni_text",
     .kind = last_layers_windowed,
     .reads = kQwen2Window,
     .defaults = "use_sliding_window=false hidden_size=3584 num_hidden_layers=28 num_attention_heads=28 "
                 "num_key_value_heads=4 sliding_window=32768 max_window_layers=28"},
    {.names = "qwen3",
     .kind = last_layers_windowed,
     .reads = kQwen2Window,
     .defaults = "use_sliding_window=false hidden_size=4096 num_hidden_layers=32 num_attention_heads=32 "
                 "num_key_value_heads=32 head_dim=128 sliding_window=4096 max_window_layers=28"},
    {.names = "qwen2_moe",
     .kind = qwen2_moe_layers,
     .reads = kQwen2Window,
     .defaults = "use_sliding_window=false sliding_window=4096 max_window_layers=28"},
    {.names = "dots1",
     .kind = last_layers_windowed,
     .reads = kQwen2Window,
     .defaults = "sliding_window=4096 max_window_layers=62"},
    {.names = "smollm3",
     .kind = smollm3_layers,
     .reads = kQwen2Window,
     .defaults = "use_sliding_window=false num_key_value_heads=4"},
    {.names = "olmo3", .kind = every_nth_full<4>, .reads = kWindow, .defaults = "sliding_window=4096"},
    {.names = "cohere2",
     .kind = pattern_nth_full<4>,
     .keys = kDerivedHeadDim,
     .reads = "sliding_window sliding_window_pattern _sliding_window_pattern",
     .defaults = "sliding_window=4096"},
    {.names = "exaone4 exaone4_5 exaone4_5_text exaone_moe",
     .kind = pattern_nth_full<4>,
     .reads = "sliding_window sliding_window_pattern",
     .defaults = "sliding_window=4096"},
    {.names = "gpt_oss",
     .kind = every_nth_full<2>,
     .traits = kSinks,
     .reads = kWindow,
     .defaults = "num_key_value_heads=8 head_dim=64 sliding_window=128"},
    {.names = "granite_swa granitemoe_swa",
     .kind = every_fourth_full_from_first,
     .scale = multiplier_scale,
     .traits = kSinks,
     .reads = "sliding_window attention_multiplier",
     .defaults = "attention_multiplier=1 sliding_window=128"},
    {.names = "cwm",
     .kind = every_fourth_full_from_first,
     .reads = kWindow,
     .defaults = "num_key_value_heads=8 head_dim=128 sliding_window=8192"},
    {.names = "mimo_v2_flash",
     .kind = mimo_layers,
     .traits = kSwaDims,
     .window = WindowRule::kWholeBehind,
     .keys = {.window = "sliding_window_size sliding_window"},
     .reads = "sliding_window sliding_window_size attention_chunk_size attention_value_scale "
              "add_full_attention_sink_bias add_swa_attention_sink_bias swa_num_attention_heads",
     .defaults = "num_key_value_heads=4 head_dim=192 v_head_dim=128 sliding_window=129"},
    // gpt_neo does not scale its scores.
    {.names = "gpt_neo",
     .kind = gpt_neo_layers,
     .scale = unit_scale,
     .kv_heads = all_heads,
     .keys = {.heads = "num_heads", .window = "window_size", .head_dim = ""},
     .reads = "attention_types attention_layers window_size",
     .defaults = "window_size=256"},

    // Gemma, and models with its scales.
    {.names = "gemma",
     .traits = kGemmaBoth,
     .reads = kGemmaReads,
     .defaults = "hidden_size=3072 num_hidden_layers=28 num_attention_heads=16 num_key_value_heads=16 head_dim=256"},
    {.names = "gemma2 vaultgemma",
     .kind = every_nth_full<2>,
     .scale = query_scalar_scale,
     .reads = "sliding_window sliding_window_size query_pre_attn_scalar attn_logit_softcapping",
     .defaults = "hidden_size=2304 num_hidden_layers=26 num_attention_heads=8 num_key_value_heads=4 head_dim=256 "
                 "query_pre_attn_scalar=256 sliding_window=4096 attn_logit_softcapping=50"},
    {.names = "gemma3 gemma3_text",
     .kind = pattern_nth_full<6>,
     .scale = query_scalar_scale,
     .traits = kGemmaBoth,
     .reads = kGemmaReads,
     .defaults = "hidden_size=2304 num_hidden_layers=26 num_attention_heads=8 num_key_value_heads=4 head_dim=256 "
                 "query_pre_attn_scalar=256 sliding_window=4096"},
    {.names = "gemma3n gemma3n_text",
     .kind = every_nth_full<5>,
     .scale = unit_scale,
     .reads = "sliding_window query_pre_attn_scalar",
     .defaults = "hidden_size=2048 num_hidden_layers=35 num_attention_heads=8 num_key_value_heads=2 head_dim=256 "
                 "sliding_window=512"},
    {.names = "gemma4 gemma4_text gemma4_unified gemma4_unified_text",
     .kind = every_nth_full<6>,
     .scale = unit_scale,
     .traits = kGemmaBoth | kGlobalDims | kLastIsFull,
     .reads = kGemmaReads,
     .defaults = "hidden_size=2304 num_hidden_layers=30 num_attention_heads=8 num_key_value_heads=4 head_dim=256 "
                 "global_head_dim=512 sliding_window=512"},
    {.names = "embedding_gemma2 embedding_gemma2_text",
     .kind = pattern_nth_full<6>,
     .scale = unit_scale,
     .traits = kBidirectional | kGlobalDims | kLastIsFull,
     .window = WindowRule::kBothWays,
     .reads = "sliding_window sliding_window_pattern",
     .defaults = "hidden_size=512 num_hidden_layers=24 num_attention_heads=4 num_key_value_heads=2 head_dim=256 "
                 "global_head_dim=512 num_global_key_value_heads=1 sliding_window=512"},
    {.names = "granite granitemoe granitemoeshared",
     .scale = multiplier_scale,
     .reads = "attention_multiplier",
     .defaults = "attention_multiplier=1"},
    {.names = "hyperclovax", .scale = multiplier_scale, .reads = "attention_multiplier"},

    // Encoders.
    {.names = "bert roberta xlm-roberta camembert electra albert",
     .kv_heads = all_heads,
     .traits = kEncoder,
     .keys = kDerivedHeadDim},
    {.names = "eurobert nomic_bert gte jina_embeddings_v3", .traits = kBidirectional},
    {.names = "distilbert",
     .kv_heads = all_heads,
     .traits = kBidirectional,
     .keys = {.heads = "n_heads", .hidden = "dim", .layers = "n_layers", .head_dim = ""}},
    {.names = "modernbert",
     .kind = modernbert_layers,
     .kv_heads = all_heads,
     .traits = kBidirectional,
     .window = WindowRule::kHalfBothWays,
     .keys = {.window = "local_attention", .head_dim = ""},
     .reads = "local_attention global_attn_every_n_layers deterministic_flash_attn",
     .defaults = "local_attention=128"},
    {.names = "modernbert-decoder",
     .kind = modernbert_layers,
     .kv_heads = all_heads,
     .window = WindowRule::kHalfCausal,
     .keys = {.window = "local_attention", .head_dim = ""},
     .reads = "local_attention global_attn_every_n_layers sliding_window",
     .defaults = "local_attention=128"},

    // Layers of several kinds.
    {.names = "llama4 llama4_text",
     .kind = llama4_layers,
     .reads = "attention_chunk_size attn_temperature_tuning attn_scale",
     .defaults = "hidden_size=5120 num_hidden_layers=48 num_attention_heads=40 num_key_value_heads=8 head_dim=128 "
                 "attention_chunk_size=8192"},
    {.names = "mllama mllama_text_model",
     .kind = mllama_layers,
     .reads = "cross_attention_layers",
     .defaults = "hidden_size=4096 num_hidden_layers=40 num_attention_heads=32 num_key_value_heads=8"},
    {.names = "qwen3_next",
     .kind = interval_layers,
     .reads = "full_attention_interval attn_output_gate",
     .defaults = "num_key_value_heads=2 head_dim=256 "
                 "linear_num_value_heads=32 linear_num_key_heads=16 linear_key_head_dim=128 linear_value_head_dim=128"},
    {.names = "qwen3_5 qwen3_5_text",
     .kind = interval_layers,
     .reads = "full_attention_interval attn_output_gate",
     .defaults = "hidden_size=4096 num_hidden_layers=32 num_attention_heads=16 num_key_value_heads=4 head_dim=256 "
                 "linear_num_value_heads=32 linear_num_key_heads=16 linear_key_head_dim=128 linear_value_head_dim=128"},
    {.names = "qwen3_5_moe qwen3_5_moe_text",
     .kind = interval_layers,
     .reads = "full_attention_interval attn_output_gate",
     .defaults = "hidden_size=2048 num_hidden_layers=40 num_attention_heads=16 num_key_value_heads=2 head_dim=256 "
                 "linear_num_value_heads=32 linear_num_key_heads=16 linear_key_head_dim=128 linear_value_head_dim=128"},
    {.names = "olmo_hybrid", .kind = olmo_hybrid_layers},
    {.names = "lfm2 lfm2_moe lfm2_vl",
     .kind = lfm2_layers,
     .reads = "full_attn_idxs",
     .defaults = "num_key_value_heads=8"},
    {.names = "recurrent_gemma",
     .kind = recurrent_gemma_layers,
     .keys = {.window = "attention_window_size", .head_dim = ""},
     .reads = "attention_window_size",
     .defaults = "attention_window_size=2048"},
    {.names = "mamba falcon_mamba mamba2", .kind = mamba_layers, .traits = kMamba, .reads = kMambaReads},
    {.names = "jamba",
     .kind = jamba_layers,
     .traits = kMamba,
     .reads = kMambaReads,
     .defaults = "num_key_value_heads=8"},
    {.names = "bamba",
     .kind = bamba_layers,
     .traits = kMamba,
     .reads = kMambaReads,
     .defaults = "num_key_value_heads=8"},
    {.names = "granitemoehybrid",
     .kind = mamba_layers,
     .scale = multiplier_scale,
     .traits = kMamba,
     .reads = "attention_multiplier mamba_chunk_size",
     .defaults = "attention_multiplier=1"},
    {.names = "falcon_h1",
     .kind = hybrid_layers,
     .traits = kMamba,
     .reads = kMambaReads,
     .defaults = "num_key_value_heads=8"},
    {.names = "nemotron_h",
     .kind = nemotron_h_layers,
     .traits = kMamba,
     .keys = {.head_dim = "head_dim attention_head_dim"},
     .reads = kMambaReads,
     .defaults = "num_key_value_heads=8 head_dim=128"},
    {.names = "zamba2",
     .kind = zamba2_layers,
     .scale = half_head_scale,
     .traits = kMamba | kTwiceWide,
     .keys = kDerivedHeadDim,
     .reads = kMambaReads},

    // Multi-head latent attention.
    {.names = "deepseek_v2 deepseek_v3 kimi_k2 kimi_k25 longcat_flash youtu glm4_moe_lite minicpm3",
     .scale = yarn_scale,
     .traits = kMla},
    {.names = "mistral4",
     .scale = yarn_scale,
     .traits = kMla,
     .defaults = "rope_parameters.factor=128 rope_parameters.mscale_all_dim=1"},
    {.names = "kimi_linear", .kind = kimi_linear_layers, .traits = kMla, .reads = "linear_attn_config"},

    // Families that are known but not supported.
    {.names = "bloom", .refused = kAlibi},
    // Its 13B model has ALiBi and its 7B model rotary embeddings, but no key tells them apart.
    {.names = "baichuan", .refused = "its larger models' scores have ALiBi biases, and no key says so"},
    {.names = "t5 mt5 umt5 longt5 switch_transformers udop pop2piano", .refused = kRelativeBias},
    {.names = "deberta deberta-v2 mpnet", .refused = kRelativeBias},
    {.names = "whisper bart mbart pegasus marian m2m_100 blenderbot speech_to_text t5gemma t5gemma2 moonshine",
     .refused = kEncoderDecoder},
    {.names = "deepseek_v32 deepseek_v4 glm_moe_dsa", .refused = kIndexed},
    {.names = "big_bird longformer led bigbird_pegasus",
     .refused = "its attention is sparse, by blocks or global tokens"},
    {.names = "diffllama", .refused = "its attention is the difference of two"},
    {.names = "rwkv xlstm", .refused = "it has no attention"},
};

// The row for a file without model_type. A key that only one family has selects that family's row instead.
constexpr ModelFamily kUnlisted{
    .names = "",
    .kind = unlisted_layers,
    .scale = unlisted_scale,
    .reads =
        "sliding_window use_sliding_window max_window_layers sliding_window_pattern _sliding_window_pattern "
        "attn_logit_softcapping query_pre_attn_scalar attention_multiplier"};
constexpr ModelFamily kUnlistedMla{.names = "", .scale = yarn_scale, .traits = kMla};
struct KeyOfFamily {
  std::string_view key;
  std::string_view family;
};
constexpr KeyOfFamily kKeysOfFamilies[] = {
    {"linear_attn_config", "kimi_linear"},
    {"attn_type_list", "minimax"},
    {"full_attn_idxs", "lfm2"},
    {"cross_attention_layers", "mllama"},
    {"full_attention_interval", "qwen3_next"},
    {"attention_chunk_size", "llama4"},
    {"blocksparse_block_size", "phi3small"},
    {"hybrid_override_pattern", "nemotron_h"},
    {"layers_block_type", "nemotron_h"},
    {"mamba_num_heads", "nemotron_h"},
    {"attn_layer_period", "jamba"},
    {"mamba_n_heads", "bamba"},
    {"mamba_d_state", "mamba"},
    {"state_size", "mamba"},
    {"multi_query_group_num", "chatglm"},
    {"num_attention_groups", "step3"},
    {"block_configs", "nemotron-nas"},
    {"num_key_value_heads_per_layer", "deci"},
    {"num_kv_heads", "falcon"},
    {"new_decoder_architecture", "falcon"},
};

const ModelFamily* family_of(std::string_view type) {
  for (const ModelFamily& family : kFamilies) {
    if (any_word(family.names, [&](std::string_view name) { return name == type; })) return &family;
  }
  return nullptr;
}

}  // namespace

std::string assumed_family(const ModelKeys& keys) {
  if (!keys.model_type().empty()) return {};
  for (const auto& [key, family] : kKeysOfFamilies) {
    if (keys.has(key))
      return fmt::format("by the rules of model_type {}, for its key {}", in_quotes(family), in_quotes(key));
  }
  if (keys.has("kv_lora_rank")) return "as a decoder with multi-head latent attention (causal)";
  const std::string_view scalar = keys.first_name("attention_multiplier query_pre_attn_scalar");
  return fmt::format("as a plain decoder (causal, scale {})", !keys.has(scalar) ? "1/sqrt(head_dim)"
                                                              : scalar == "attention_multiplier"
                                                                  ? "attention_multiplier"
                                                                  : "1/sqrt(query_pre_attn_scalar)");
}

const ModelFamily& model_family(const ModelKeys& keys) {
  const std::string& type = keys.model_type();
  if (type.empty()) {
    for (const auto& [key, family] : kKeysOfFamilies) {
      if (keys.has(key)) return *family_of(family);
    }
    return keys.has("kv_lora_rank") ? kUnlistedMla : kUnlisted;
  }
  const ModelFamily* const family = family_of(type);
  if (family == nullptr) {
    fail(ErrorCode::kUnsupported, fmt::format("model_type {} of {} is not known", in_quotes(type), keys.name()),
         "what its keys mean for its attention can't be told", "Give the dims, the scale and the window themselves.");
  }
  if (family->refused.empty()) return *family;
  fail(ErrorCode::kUnsupported, fmt::format("the attention of {} can't be computed", keys.name()),
       fmt::format("its model_type is {}; {}", in_quotes(type), family->refused),
       "Give the dims themselves for attention to all tokens.");
}

}  // namespace ringattn
