// SPDX-License-Identifier: Apache-2.0
// The attention or SSM of a model's layer, from the config.json that Hugging Face keeps beside the weights. The meaning
// of its keys depends on the model's family (model_families.hpp).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/model_rope.hpp"

namespace ringattn {

class ModelKeys;
struct ModelFamily;

// What a layer computes. Its name is also the name of the op.
enum class LayerKind {
  kAttention,
  kMla,              // attention over latents
  kSsd,              // Mamba-2
  kSelectiveScan,    // Mamba-1
  kLinearAttention,  // with constant decays per head
  kGatedDelta,       // Gated DeltaNet or Kimi Delta Attention
};
std::string_view layer_kind_name(LayerKind kind);  // "attention", "mla", "ssd", …
// Whether the layer has a state instead of keys and values.
inline bool is_ssm(LayerKind kind) { return kind >= LayerKind::kSsd; }

// Kind and shape of a layer. Members that its kind doesn't use are 0.
struct ModelLayer {
  LayerKind kind = LayerKind::kAttention;
  int heads = 0;  // query heads; SSM ops: heads; kSelectiveScan: channels

  // Attention
  int kv_heads = 0;
  int head_dim = 0;    // q and k; for kMla without the rotary part
  int head_dim_v = 0;  // v
  int rope_dim = 0;    // kMla only
  int latent_dim = 0;
  double softmax_scale = 0.0;
  double softcap = 0.0;            // 0: off
  std::int64_t window_left = -1;   // keys before a row's own that it sees; -1: all
  std::int64_t window_right = -1;  // keys after it; causal rows see none, whatever the value
  bool bidirectional = false;
  bool sinks = false;  // each head has a learned logit in the softmax denominator
  ModelRope rope;      // of q and k; kMla: refused

  // Scans. The dim of a head is head_dim. kGatedDelta: `heads` are value heads with head_dim_v dims, and `groups` is
  // the number of query and key heads.
  int state_dim = 0;
  int groups = 0;
  bool key_decays = false;  // kGatedDelta: a decay for each key dim (KDA)
  int conv_width = 0;
  std::int64_t conv_channels = 0;
  std::vector<double> log_decays;                     // kLinearAttention: [heads]; its scale is softmax_scale
  std::optional<std::pair<double, double>> dt_limit;  // minimum and maximum of dt, perhaps infinite; absent: not given

  bool is_ssm() const { return ringattn::is_ssm(kind); }
  // 1 / sqrt(number of dims of q and k).
  double default_scale() const;

  bool operator==(const ModelLayer&) const = default;
};

// The reader of one file. Throws kFile, naming the key, if a value is missing or invalid. Throws kUnsupported, naming
// the model_type or the key, for a model whose attention can't be computed.
class ModelConfig {
 public:
  // Reads the file.
  static ModelConfig open(const std::string& path);
  // `name` stands for the file in messages.
  ModelConfig(std::string_view text, std::string name);

  // A layer of the model, counted from 0. If none is named, all layers must be alike. `wanted`: the kind that the job
  // computes, if it is known. In a model with attention and SSM it selects one of the two, even in a layer that has
  // both, and layers of the other kind are ignored. Throws kUsage if layers differ and none is named (the message says
  // how they differ), and for a layer that does not exist or has neither attention nor SSM. Throws kUnsupported for a
  // layer whose attention can't be computed.
  ModelLayer layer(std::optional<std::int64_t> layer, std::optional<LayerKind> wanted = {}) const;

  // Whether some layers have attention and others an SSM, or one layer has both.
  bool mixes_ops() const;

  // How a file without model_type is interpreted, such as "as a plain decoder (causal, scale 1/sqrt(head_dim))"; empty
  // for a file that has one.
  std::string assumed() const;

 private:
  struct Derived;

  std::string kind_of(std::int64_t layer) const;
  Derived derive(std::int64_t layer) const;
  std::vector<Derived> all() const;
  ModelLayer attention(std::int64_t layer, bool sliding) const;
  void set_mla_dims(ModelLayer& found) const;
  void set_dims(ModelLayer& found, std::int64_t layer, bool sliding) const;
  // A dim that differs for this layer; absent: it has the dim of all layers.
  std::optional<std::int64_t> dim_of(std::int64_t layer, bool sliding, std::string_view key) const;
  void set_window(ModelLayer& layer) const;
  ModelLayer ssm() const;
  ModelLayer linear_attention(std::int64_t layer) const;
  std::optional<ModelLayer> gated_delta() const;
  ModelLayer one_of(const std::vector<Derived>& layers, std::optional<LayerKind> wanted) const;

  std::shared_ptr<ModelKeys> keys_;
  const ModelFamily* family_;
  std::optional<std::int64_t> layers_;
};

}  // namespace ringattn
