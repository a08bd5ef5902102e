// SPDX-License-Identifier: Apache-2.0
// Rules for the kinds of a model's layers if its config.json has no layer_types. They follow the defaults of the
// classes of transformers, or the model's own code. Layers are counted from 0.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "io/model_keys.hpp"

namespace ringattn {

inline constexpr std::string_view kFullAttention = "full_attention";
inline constexpr std::string_view kSlidingAttention = "sliding_attention";
inline constexpr std::string_view kLinearAttentionLayer = "linear_attention";
inline constexpr std::string_view kChunkedAttention = "chunked_attention";
inline constexpr std::string_view kCrossAttention = "cross_attention";
inline constexpr std::string_view kBlockSparse = "block_sparse_attention";
inline constexpr std::string_view kMambaLayer = "mamba";
inline constexpr std::string_view kHybridLayer = "hybrid";  // attention and an SSM

// True if windows are in use: the key has a number, and use_sliding_window, if present, is true.
bool has_window(const ModelKeys& keys, std::string_view key = "sliding_window");

std::string full_layers(const ModelKeys& keys, std::int64_t layer);  // all
// Every layer has a window if the file has one.
std::string windowed_layers(const ModelKeys& keys, std::int64_t layer);
// The last layer of each `period` layers is full, and the others have a window. `keyed`: sliding_window_pattern or
// _sliding_window_pattern gives another period, or a pattern such as LLLG.
std::string periodic_layers(const ModelKeys& keys, std::int64_t layer, std::int64_t period, bool keyed);
template <int kPeriod>
std::string every_nth_full(const ModelKeys& keys, std::int64_t layer) {
  return periodic_layers(keys, layer, kPeriod, false);
}
template <int kPeriod>
std::string pattern_nth_full(const ModelKeys& keys, std::int64_t layer) {
  return periodic_layers(keys, layer, kPeriod, true);
}
std::string mimo_layers(const ModelKeys& keys, std::int64_t layer);                   // hybrid_layer_pattern
std::string every_fourth_full_from_first(const ModelKeys& keys, std::int64_t layer);  // CWM, Granite SWA
std::string modernbert_layers(const ModelKeys& keys, std::int64_t layer);             // global_attn_every_n_layers
std::string last_layers_windowed(const ModelKeys& keys, std::int64_t layer);  // from max_window_layers on: Qwen2
std::string qwen2_moe_layers(const ModelKeys& keys, std::int64_t layer);
std::string smollm3_layers(const ModelKeys& keys, std::int64_t layer);   // without rotary embedding: windowed
std::string unlisted_layers(const ModelKeys& keys, std::int64_t layer);  // files without model_type

std::string interval_layers(const ModelKeys& keys, std::int64_t layer);  // full_attention_interval: Qwen3-Next
std::string olmo_hybrid_layers(const ModelKeys& keys, std::int64_t layer);
std::string llama4_layers(const ModelKeys& keys, std::int64_t layer);      // no_rope_layers, attention_chunk_size
std::string mllama_layers(const ModelKeys& keys, std::int64_t layer);      // cross_attention_layers
std::string lfm2_layers(const ModelKeys& keys, std::int64_t layer);        // full_attn_idxs
std::string minimax_m2_layers(const ModelKeys& keys, std::int64_t layer);  // full, unless attn_type_list says otherwise
std::string minimax_layers(const ModelKeys& keys, std::int64_t layer);     // attn_type_list
std::string bailing_layers(const ModelKeys& keys, std::int64_t layer);     // layer_group_size: Ring and Ling
std::string retnet_layers(const ModelKeys& keys, std::int64_t layer);      // all
std::string kimi_linear_layers(const ModelKeys& keys, std::int64_t layer);      // linear_attn_config
std::string phi3small_layers(const ModelKeys& keys, std::int64_t layer);        // dense_attention_every_n_layers
std::string gpt_neo_layers(const ModelKeys& keys, std::int64_t layer);          // attention_types
std::string recurrent_gemma_layers(const ModelKeys& keys, std::int64_t layer);  // block_types
std::string nas_layers(const ModelKeys& keys, std::int64_t layer);              // block_configs

std::string mamba_layers(const ModelKeys& keys, std::int64_t layer);       // all
std::string hybrid_layers(const ModelKeys& keys, std::int64_t layer);      // all
std::string jamba_layers(const ModelKeys& keys, std::int64_t layer);       // attn_layer_period, attn_layer_offset
std::string bamba_layers(const ModelKeys& keys, std::int64_t layer);       // attn_layer_indices
std::string nemotron_h_layers(const ModelKeys& keys, std::int64_t layer);  // hybrid_override_pattern
std::string zamba2_layers(const ModelKeys& keys, std::int64_t layer);

// The file's list with one entry per layer, under any of its names; nullptr: it has none.
struct LayerList {
  std::string_view key;
  const JsonNode* list = nullptr;
};
LayerList layer_types_of(const ModelKeys& keys);

// The number of layers by `count_keys`, or the length of a list with one entry per layer; absent: the file has neither.
std::optional<std::int64_t> layer_count(const ModelKeys& keys, std::string_view count_keys);

}  // namespace ringattn
