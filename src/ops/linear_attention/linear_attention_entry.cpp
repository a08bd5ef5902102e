// SPDX-License-Identifier: Apache-2.0
// The row of linear attention in the table of ops. Its jobs are SSM jobs (ops/ssm) with log-decays.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/size.hpp"
#include "ops/common/values.hpp"
#include "ops/rope/rope_settings.hpp"
#include "ops/ssm/ssm_entry.hpp"
#include "ops/ssm/ssm_op_job.hpp"
#include "ops/ssm/ssm_tensors.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kLinearAttentionTensors[] = {{"q", "[tokens, heads, dim]"},
                                                {"k", "[tokens, heads, dim]"},
                                                {"v", "[tokens, heads, dim_v]"},
                                                {"log_decay", "[heads], [tokens, heads] or [tokens, heads, dim]"},
                                                {"initial_state", "[sequences, heads, dim_v, dim]", true},
                                                {"q_offset", "[sequences]", true},
                                                {"cu_seqlens", "[sequences + 1]", true}};
constexpr std::string_view kStepNote[] = {
    "with state instead of initial_state, it is a decode step",
    "q_offset: position of each sequence's first token, where q and k are rotated"};
constexpr std::string_view kLinearAttentionSettings[] = {"q-len", "head-dim", "head-dim-v", "final-states", "trace"};

constexpr std::string_view kDecayKinds[] = {"head", "token", "dim"};
constexpr std::string_view kDefaultScale = "auto";
constexpr std::string_view kNoLogDecays = "none";

std::optional<float> parse_scale(std::string_view text) {
  if (text == kDefaultScale) return std::nullopt;
  try {
    const double scale = parse_real(text, -1e30, 1e30);
    if (scale == 0.0 || std::abs(scale) >= 1e-30) return static_cast<float>(scale);
  } catch (const BadValue&) {  // the same refusal
  }
  throw BadValue{"auto, which is 1 / sqrt(head_dim), 0, or a number of at least 1e-30"};
}

// Empty for "none".
std::vector<float> parse_log_decays(std::string_view text) {
  std::vector<float> values;
  if (text == kNoLogDecays) return values;
  while (true) {
    const std::size_t comma = text.find(',');
    values.push_back(static_cast<float>(parse_real(text.substr(0, comma), -1e30, 1e30)));
    if (comma == std::string_view::npos) return values;
    text.remove_prefix(comma + 1);
  }
}

constexpr SettingRow kDecayRows[] = {
    {.name = "decay",
     .kind = SettingKind::kText,
     .value = "KIND",
     .fallback = "head",
     .help = "log-decays of synthetic input: one per head, per token and head, or per token, head and dim",
     .check = [](std::string_view text) { parse_choice(text, kDecayKinds); }},
    {.name = "log-decays",
     .kind = SettingKind::kText,
     .value = "LIST",
     .fallback = kNoLogDecays,
     .help = "log-decays of the heads of synthetic input, with ',' between them; a model's config has them",
     .check = [](std::string_view text) { parse_log_decays(text); }},
    {.name = "scale",
     .kind = SettingKind::kText,
     .value = "X",
     .fallback = kDefaultScale,
     .help = "factor of out; auto: 1 / sqrt(head_dim)",
     .check = [](std::string_view text) { parse_scale(text); }},
    {.name = "rope",
     .kind = SettingKind::kText,
     .value = "on|off",
     .fallback = "off",
     .help = "rotate q and k by their tokens' positions first, as the rope settings say",
     .check = [](std::string_view text) { parse_switch(text); }}};

constexpr auto kOwnRows = [] {
  std::array<SettingRow, std::size(kDecayRows) + std::size(kRopeSettings)> rows{};
  const auto rest = std::copy(std::begin(kDecayRows), std::end(kDecayRows), rows.begin());
  std::copy(std::begin(kRopeSettings), std::end(kRopeSettings), rest);
  return rows;
}();

std::unique_ptr<OpJob> make_linear_attention_job(const OpRequest& request) {
  const auto& own = request.settings.own;
  for (const std::string_view name : {"decay", "log-decays"}) {
    if (!request.from_file() || !request.sources.chosen(name)) continue;
    fail(ErrorCode::kUsage, {setting(name, own.find(name)->second), " with a file"}, "its log_decay says it",
         "Leave one of them out.");
  }
  SsmInput input = make_ssm_input(Op::kLinearAttention, request);
  const SsmSpec& spec = input.job().spec;
  if (std::vector<float> decays = parse_log_decays(own.at("log-decays")); !request.from_file() && !decays.empty()) {
    if (spec.decay != SsmDecay::kHead || std::ssize(decays) != spec.heads) {
      fail(ErrorCode::kUsage, fmt::format("{} of heads", counted(decays.size(), "log-decay")),
           fmt::format("the layer has {}, with a decay per {}", counted(static_cast<std::uint64_t>(spec.heads), "head"),
                       own.at("decay")),
           {"Give ", setting("log-decays"), " one for each head, with a decay per head."});
    }
    input.set_log_decays(std::move(decays));
  }
  input.set_scale(parse_scale(own.at("scale")).value_or(1.0F / std::sqrt(static_cast<float>(spec.state_dim))));
  std::optional<RopeSpec> rope;
  if (parse_switch(own.at("rope"))) {
    rope = rope_spec_of(request.settings, spec.dtype, spec.state_dim);
  } else {
    for (const SettingRow& row : kRopeSettings) {
      if (!request.sources.chosen(row.name)) continue;
      fail(ErrorCode::kUsage, {setting(row.name, own.find(row.name)->second), " without RoPE"},
           "q and k are not rotated", {"Use ", setting("rope", "on"), ", or leave it out."});
    }
  }
  input.set_rope(std::move(rope));
  return std::make_unique<SsmOpJob>(std::move(input), request.timeline);
}

void fill_linear_attention(const ModelLayer& layer, const Settings&, const FillSetting& fill) {
  Fill{fill}("heads", layer.heads)("head-dim", layer.head_dim)("head-dim-v", layer.head_dim_v);
  fill("log-decays", fmt::format("{:.9g}", fmt::join(layer.log_decays, ",")));
  fill("scale", fmt::format("{:.9g}", layer.softmax_scale));
  const bool rotates = layer.rope.type != "none";
  fill("rope", rotates ? "on" : "off");
  if (rotates) fill_rope_settings(layer.rope, fill);
}

}  // namespace

extern const OpEntry kLinearAttentionOp;
const OpEntry kLinearAttentionOp{.name = "linear_attention",
                                 .help = "attention with a state and decays: lightning, RetNet, GLA",
                                 .file = "a file with q, k, v and log_decay",
                                 .tensors = kLinearAttentionTensors,
                                 .tensor_notes = kStepNote,
                                 .settings = kLinearAttentionSettings,
                                 .own_settings = kOwnRows,
                                 .layers = layer_bit(LayerKind::kLinearAttention),
                                 .fill = fill_linear_attention,
                                 .recognizes = holds_linear_attention,
                                 .make = make_linear_attention_job};

SsmDecay linear_decay(const Settings& settings) {
  constexpr SsmDecay kDecays[] = {SsmDecay::kHead, SsmDecay::kToken, SsmDecay::kDim};
  return kDecays[parse_choice(settings.own.find("decay")->second, kDecayKinds)];
}

}  // namespace ringattn
