// SPDX-License-Identifier: Apache-2.0
// The attention and the scans of a model, as the config.json says them that Hugging Face keeps beside the weights. Each
// value is asked for by itself, so a config needs to say only what is wanted of it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace ringattn {

// Values stand at the top of the file or, in models of text and images, in its `text_config`. All functions throw
// kFile, naming the key, where a value is missing that they can't do without, or is none that it may be.
class ModelConfig {
 public:
  // Reads the file. Throws kFile.
  static ModelConfig open(const std::string& path);
  // `name` stands for the file in messages.
  ModelConfig(std::string_view text, std::string name);

  // Whether keys and values are expanded from latents (kv_lora_rank).
  bool is_latent() const;

  // Throws kUnsupported for a model whose queries attend to chosen tokens alone (index_topk): that isn't computed.
  void check_attends_to_all() const;

  int heads() const;     // num_attention_heads
  int kv_heads() const;  // num_key_value_heads; absent: heads()
  int head_dim() const;  // head_dim; absent: hidden_size / heads()

  // Of latents. `head_dim` is the rotary part's in such configs and says nothing.
  int latent_dim() const;    // kv_lora_rank
  int nope_dim() const;      // qk_nope_head_dim
  int rope_dim() const;      // qk_rope_head_dim
  int latent_dim_v() const;  // v_head_dim

  // Of state space layers, by the names of Mamba, Mamba-2, of Bamba, Granite and Falcon-H1, or of Nemotron-H.
  bool has_attention() const;   // num_attention_heads
  bool has_scans() const;       // state_size, mamba_d_state or ssm_state_size
  bool scans_channels() const;  // of Mamba-1, which has no heads
  int scan_heads() const;       // or channels: intermediate_size, or expand · hidden_size
  int scan_head_dim() const;    // "auto" and none: mamba_expand · hidden_size / heads
  int scan_state_dim() const;
  int scan_groups() const;  // absent: 1
  int scan_conv_channels() const;
  int scan_conv_width() const;  // of the convolution in front: mamba_d_conv or conv_kernel; absent: 4
  // time_step_limit, whose sides are infinite where the config says so; absent: nothing is said of it.
  std::optional<std::pair<double, double>> dt_limit() const;
  // Whether a layer of a model of both kinds is one that scans: by hybrid_override_pattern, layer_types or
  // attn_layer_indices. Absent: the config doesn't say. Throws kUsage for a layer that is neither, or isn't there.
  std::optional<bool> layer_scans(std::int64_t layer) const;

  // The keys that a row sees, its own among them; absent: all. Layers may differ: by layer_types, by max_window_layers,
  // by sliding_window_pattern, or in turn (gemma2). Throws kUsage where they do and `layer` isn't given, or isn't
  // there.
  std::optional<std::int64_t> sliding_window(std::optional<std::int64_t> layer) const;
  double softcap() const;  // attn_logit_softcapping; 0: off
  // query_pre_attn_scalar^-0.5 or, of latents, 1/√(nope + rope) times the square of what YaRN multiplies
  // (mscale_all_dim and factor of rope_scaling). Absent: the default.
  std::optional<double> softmax_scale() const;

 private:
  // A number, a string, or the words for anything else: "null", "true".
  struct Other {
    std::string text;
  };
  using Value = std::variant<double, std::string, Other>;
  class Reader;

  const Value* find(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;
  std::optional<int> count(std::string_view key) const;
  int needed(std::string_view key) const;
  // The first of these that the config says.
  std::optional<int> first_of(std::initializer_list<std::string_view> keys) const;
  bool is_true(std::string_view key) const;
  [[noreturn]] void refuse(std::string_view key, std::string_view why) const;
  bool slides(std::optional<std::int64_t> layer) const;
  std::int64_t named_layer(std::optional<std::int64_t> layer, std::string_view differ) const;

  std::string name_;
  std::map<std::string, Value, std::less<>> values_;  // by dotted key: "rope_scaling.factor"
  std::vector<std::string> layer_types_;
  std::optional<std::vector<double>> attention_layers_;  // attn_layer_indices
  std::vector<std::optional<double>> dt_limit_;          // time_step_limit; null and infinite ones without a value
};

}  // namespace ringattn
