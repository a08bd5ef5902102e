// SPDX-License-Identifier: Apache-2.0
// The row of the gated delta rule in the table of ops.
#include <cmath>
#include <memory>

#include "base/error.hpp"
#include "ops/common/values.hpp"
#include "ops/gated_delta/gated_delta_op_job.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kDeltaFileTensors[] = {{"q", "[tokens, key_heads, key_dim]"},
                                          {"k", "[tokens, key_heads, key_dim]"},
                                          {"v", "[tokens, heads, value_dim]"},
                                          {"log_decay", "[tokens, heads] or [tokens, heads, key_dim]"},
                                          {"beta", "[tokens, heads]"},
                                          {"initial_state", "[sequences, heads, key_dim, value_dim]", true},
                                          {"cu_seqlens", "[sequences + 1]", true}};
constexpr std::string_view kDeltaNotes[] = {
    "log_decay of a head is Gated DeltaNet's, of each key dim Kimi Delta Attention's",
    "with state instead of initial_state, it is a decode step"};
constexpr std::string_view kDeltaSettings[] = {"q-len", "head-dim", "head-dim-v", "final-states", "trace"};
constexpr std::string_view kDeltaDecays[] = {"head", "token", "dim"};
constexpr std::string_view kAutoScale = "auto";

int parse_key_heads(std::string_view text) { return static_cast<int>(parse_integer(text, 0, 1 << 16)); }

// 0 for "auto", the default of GatedDeltaSpec. linear_attention has the same setting, and its check accepts 0.
float parse_delta_scale(std::string_view text) {
  if (text == kAutoScale) return 0.0F;
  const double scale = parse_real(text, -1e30, 1e30);
  if (std::abs(scale) < 1e-30) {
    fail(ErrorCode::kUsage, {setting("scale", text), " with a gated delta rule"}, "out would be zeros",
         "Leave it out for 1 / sqrt(head_dim), or give another number.");
  }
  return static_cast<float>(scale);
}

constexpr SettingRow kDeltaOwn[] = {
    {.name = "key-heads",
     .value = "N",
     .fallback = "0",
     .help = "heads of q and k, which the heads of v share; 0: as many as of v",
     .check = [](std::string_view text) { parse_key_heads(text); }},
    {.name = "decay",
     .kind = SettingKind::kText,
     .value = "KIND",
     .fallback = "head",
     .help =
         "log-decays of synthetic input: one per token and head (head, token; Gated DeltaNet), or per token, head and "
         "dim (Kimi Delta Attention)",
     .check = [](std::string_view text) { parse_choice(text, kDeltaDecays); }},
    {.name = "qk-norm",
     .kind = SettingKind::kText,
     .value = "off|on",
     .fallback = "off",
     .help = "divide rows of q and k by sqrt(sum of squares + 1e-6)",
     .check = [](std::string_view text) { parse_switch(text); }},
    {.name = "scale",
     .kind = SettingKind::kText,
     .value = "X",
     .fallback = kAutoScale,
     .help = "factor of out; auto: 1 / sqrt(head_dim)",
     .check = [](std::string_view text) { parse_delta_scale(text); }}};

std::unique_ptr<OpJob> make_gated_delta_job(const OpRequest& request) {
  const Settings& settings = request.settings;
  const auto own = [&](std::string_view name) -> const std::string& { return settings.own.find(name)->second; };
  for (const std::string_view name : {"key-heads", "decay"}) {
    if (!request.from_file() || !request.sources.chosen(name)) continue;
    fail(ErrorCode::kUsage, {setting(name, own(name)), " with a file"}, "the shapes of its tensors say it",
         "Leave one of them out.");
  }
  GatedDeltaSpec spec;
  spec.dtype = settings.dtype;
  spec.value_heads = settings.heads;
  spec.key_heads = parse_key_heads(own("key-heads"));
  if (spec.key_heads == 0) spec.key_heads = spec.value_heads;
  spec.key_dim = settings.head_dim;
  spec.value_dim = settings.head_dim_v.value_or(settings.head_dim);
  spec.key_decays = own("decay") == "dim";
  spec.qk_l2norm = parse_switch(own("qk-norm"));
  spec.scale = parse_delta_scale(own("scale"));
  return std::make_unique<GatedDeltaOpJob>(GatedDeltaInput(request, spec), request.timeline);
}

// Both models divide q and k by their norms in the rule.
void fill_gated_delta(const ModelLayer& layer, const Settings&, const FillSetting& fill) {
  Fill{fill}("heads", layer.heads)("key-heads", layer.groups)("head-dim", layer.head_dim)("head-dim-v",
                                                                                          layer.head_dim_v);
  Fill{fill}("decay", layer.key_decays ? "dim" : "head")("qk-norm", "on");
}

}  // namespace

extern const OpEntry kGatedDeltaOp;
const OpEntry kGatedDeltaOp{
    .name = "gated_delta",
    .help = "the gated delta rule of Gated DeltaNet (GDN) and Kimi Delta Attention (KDA)",
    .file = "a file with q, k, v, log_decay and beta",
    .tensors = kDeltaFileTensors,
    .tensor_notes = kDeltaNotes,
    .settings = kDeltaSettings,
    .own_settings = kDeltaOwn,
    .layers = layer_bit(LayerKind::kGatedDelta),
    .fill = fill_gated_delta,
    .recognizes = [](const TensorFile& opened) { return holds_gated_delta(opened.file, opened.request.names); },
    .make = make_gated_delta_job};

}  // namespace ringattn
