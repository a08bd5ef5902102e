// SPDX-License-Identifier: Apache-2.0
// The row of MLA in the table of ops.
#include "ops/attention/shared_entry.hpp"
#include "ops/mla/mla_tensors.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"q", "[tokens, heads, head_dim + rope_dim]"},
                                 {"latent", "[tokens, latent_dim]"},
                                 {"k_rope", "[tokens, rope_dim]"},
                                 {"w_uk", "[heads, head_dim, latent_dim]", true},
                                 {"w_uv", "[heads, head_dim_v, latent_dim]", true},
                                 {"cu_seqlens_q", "[sequences + 1]", true},
                                 {"cu_seqlens_k", "[sequences + 1]", true},
                                 {"q_offset", "[sequences]", true},
                                 {"sinks", "[heads]", true}};

constexpr std::string_view kNotes[] = {
    "kv_b_proj replaces w_uk and w_uv; latent_fp8 or latent_pages replace latent, k_rope",
    "without w_uk, q is already absorbed; without w_uv, out stays in the latent space"};

constexpr std::string_view kSettings[] = {
    "page-order", "q-len",        "page-size", "head-dim", "head-dim-v",    "rope-dim",    "latent-dim", "cache-format",
    "mask",       "query-offset", "window",    "form",     "softmax-scale", "softcap",     "layout",     "stripe",
    "block",      "overlap",      "trace",     "checksum", "decode",        "compute-only"};

constexpr SettingDefault kDefaults[] = {{"heads", "16"}};

void fill_mla(const ModelLayer& layer, const Settings& settings, const FillSetting& fill) {
  Fill{fill}("heads", layer.heads)("head-dim", layer.head_dim)("rope-dim", layer.rope_dim);
  Fill{fill}("latent-dim", layer.latent_dim)("head-dim-v", layer.head_dim_v);
  fill_scores(layer, settings, fill);
}

bool recognizes_mla(const TensorFile& opened) { return holds_latents(opened.file, opened.request.names); }

}  // namespace

extern const OpEntry kMlaOp;
const OpEntry kMlaOp{.name = "mla",
                     .help = "multi-head latent attention (DeepSeek)",
                     .file = "a file with latents",
                     .tensors = kTensors,
                     .tensor_notes = kNotes,
                     .settings = kSettings,
                     .defaults = kDefaults,
                     .layers = layer_bit(LayerKind::kMla),
                     .fill = fill_mla,
                     .recognizes = recognizes_mla,
                     .make = make_attention_job<Op::kMla>};

}  // namespace ringattn
