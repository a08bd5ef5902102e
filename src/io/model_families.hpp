// SPDX-License-Identifier: Apache-2.0
// The meaning of a config.json for the attention of a layer, by model family. One row per model_type; its rules say
// where a value comes from. Sources: the configuration and modeling files of transformers (5.24), and for models with
// their own code the source in the row's comment.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "io/layer_kinds.hpp"
#include "io/model_keys.hpp"
#include "io/model_rules.hpp"

namespace ringattn {

// The kind of a layer, by its name in layer_types, such as "full_attention" or "mamba".
using LayerKindRule = std::string (*)(const ModelKeys& keys, std::int64_t layer);

// The factor by which scores are multiplied. `head_dim`: dims of q and k.
using ScaleRule = double (*)(const ModelKeys& keys, std::int64_t head_dim, std::int64_t layer);

using KvHeadsRule = std::int64_t (*)(const ModelKeys& keys, std::int64_t heads, std::int64_t layer);

// The keys that the row at position p sees in a layer with window W.
enum class WindowRule : char {
  kCausal,        // p - W + 1 to p
  kHalfCausal,    // p - W / 2 + 1 to p
  kHalfBothWays,  // p - W / 2 to p + W / 2
  kBothWays,      // p - W to p + W
  kWholeBehind,   // p - W to p, if the file has sliding_window_size
};

// Names of keys. Of several, separated by spaces, the first that the file has is used.
struct ModelKeyNames {
  std::string_view heads = "num_attention_heads";
  std::string_view hidden = "hidden_size";
  std::string_view layers = "num_hidden_layers num_layers";
  std::string_view window = "sliding_window";
  std::string_view head_dim = "head_dim";  // empty: always hidden / heads
};

enum ModelTraits : std::uint32_t {
  kMla = 1U << 0,            // keys and values are expanded from latents if the file has kv_lora_rank
  kMamba = 1U << 1,          // layers called linear_attention are Mamba's
  kEncoder = 1U << 2,        // bidirectional, unless is_decoder says otherwise
  kBidirectional = 1U << 3,  // always
  kGemmaBoth = 1U << 4,      // use_bidirectional_attention makes the layers bidirectional
  kSinks = 1U << 5,          // each head has a learned logit in the softmax denominator, in every layer
  kGlobalDims = 1U << 6,     // full layers have global_head_dim and num_global_key_value_heads
  kLastIsFull = 1U << 7,
  kSwaDims = 1U << 9,     // layers with windows have swa_* dims, and sinks of their own
  kLightning = 1U << 10,  // layers called linear_attention are lightning attention
  kTwiceWide = 1U << 8,   // heads share 2 * hidden_size
};

struct ModelFamily {
  std::string_view names;            // values of model_type, separated by spaces
  LayerKindRule kind = full_layers;  // used if the file has no layer_types
  ScaleRule scale = head_dim_scale;
  KvHeadsRule kv_heads = plain_kv_heads;
  std::uint32_t traits = 0;
  WindowRule window = WindowRule::kCausal;
  ModelKeyNames keys = {};
  // The keys with names like attention's that the rules read. Other keys with such names are refused.
  std::string_view reads = {};
  std::string_view defaults = {};  // the class's values for keys that files omit: "key=number key=number"
  std::string_view refused = {};   // why no layer of the family can be computed; empty: layers can be computed

  bool is(ModelTraits trait) const { return (traits & trait) != 0; }
};

// The family of the file, by its model_type or, without one, by keys that only one family has. Throws kUnsupported for
// a model_type without a row, and for a family that can't be computed.
const ModelFamily& model_family(const ModelKeys& keys);

// How a file without model_type is interpreted, such as "as a plain decoder (causal, scale 1/sqrt(head_dim))"; empty
// for a file that has one.
std::string assumed_family(const ModelKeys& keys);

// Throws kUnsupported for a key that changes the file's attention and that the family's rules do not read, and for a
// file without model_type that has keys of other families. Throws kFile for a file of another format.
void check_attention_keys(const ModelKeys& keys, const ModelFamily& family);

}  // namespace ringattn
