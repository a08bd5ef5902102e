// SPDX-License-Identifier: Apache-2.0
// The attention or SSM of a model's layer, as the config.json says it that Hugging Face keeps beside the weights.
// Which of its keys mean what depends on the family of the model (model_families.hpp).
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

// What a layer computes. A name is also that of the op that computes it.
enum class LayerKind {
  kAttention,
  kMla,              // attention over latents
  kSsd,              // Mamba-2
  kSelectiveScan,    // Mamba-1
  kLinearAttention,  // with decays that are constants of its heads
  kGatedDelta,       // Gated DeltaNet or Kimi Delta Attention
};
std::string_view layer_kind_name(LayerKind kind);  // "attention", "mla", "ssd", …
// Whether a state takes the place of keys and values.
inline bool is_ssm(LayerKind kind) { return kind >= LayerKind::kSsd; }

// Kind and shape of a layer. Members that its kind doesn't use are 0.
struct ModelLayer {
  LayerKind kind = LayerKind::kAttention;
  int heads = 0;  // query heads; of SSM ops heads or, of kSelectiveScan, channels

  // Attention
  int kv_heads = 0;
  int head_dim = 0;    // q and k; for kMla without the rotary part
  int head_dim_v = 0;  // v
  int rope_dim = 0;    // kMla only, as the next
  int latent_dim = 0;
  double softmax_scale = 0.0;
  double softcap = 0.0;            // 0: off
  std::int64_t window_left = -1;   // keys before a row's own that it sees; -1: all
  std::int64_t window_right = -1;  // and after it; a causal row sees none, whatever stands here
  bool bidirectional = false;
  bool sinks = false;  // a learned logit a head joins the denominator
  ModelRope rope;      // of q and k; kMla: refused

  // Scans; the dim of a head is head_dim. kGatedDelta: heads are those of values, with dims of head_dim_v, and groups
  // the heads of queries and keys.
  int state_dim = 0;
  int groups = 0;
  bool key_decays = false;  // kGatedDelta: a decay for each key dim (KDA)
  int conv_width = 0;
  std::int64_t conv_channels = 0;
  std::vector<double> log_decays;                     // kLinearAttention: [heads]; its scale is softmax_scale
  std::optional<std::pair<double, double>> dt_limit;  // least and greatest dt, perhaps infinite; absent: none said

  bool is_ssm() const { return ringattn::is_ssm(kind); }
  // 1 / sqrt(dims that q and k have).
  double default_scale() const;

  bool operator==(const ModelLayer&) const = default;
};

// The reader of one file. Throws kFile, naming the key, where a value is missing or is none that it may be; and
// kUnsupported for a model whose attention can't be computed, naming its model_type or the key that says so.
class ModelConfig {
 public:
  // Reads the file.
  static ModelConfig open(const std::string& path);
  // `name` stands for the file in messages.
  ModelConfig(std::string_view text, std::string name);

  // A layer of the model, from 0 on; none is named: all of them, where they are alike. `wanted`: the kind that the
  // job computes, where it is known. For a model with attention and SSM it says which of them is meant, in a layer of
  // both too, and layers of the other are left aside. Throws kUsage, naming what differs, where layers differ and none
  // is named; for a layer that isn't there, or that has neither attention nor SSM; and kUnsupported for one whose
  // attention can't be computed.
  ModelLayer layer(std::optional<std::int64_t> layer, std::optional<LayerKind> wanted = {}) const;

  // Whether some layers have attention and some have SSM, or one has both.
  bool mixes_ops() const;

  // How a file without model_type is read, such as "as a plain decoder (causal, scale 1/sqrt(head_dim))"; empty for
  // one that has it.
  std::string assumed() const;

 private:
  struct Derived;

  std::string kind_of(std::int64_t layer) const;
  Derived derive(std::int64_t layer) const;
  std::vector<Derived> all() const;
  ModelLayer attention(std::int64_t layer, bool sliding) const;
  void set_mla_dims(ModelLayer& found) const;
  void set_dims(ModelLayer& found, std::int64_t layer, bool sliding) const;
  // A dim that this layer has for itself; absent: it has that of all layers.
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
