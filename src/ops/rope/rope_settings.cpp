// SPDX-License-Identifier: Apache-2.0
#include "ops/rope/rope_settings.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "kernels/rope/rope_frequencies.hpp"
#include "ops/common/values.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kRopePairs[] = {"half", "interleaved"};
constexpr std::string_view kRopeAngles[] = {"fp32", "exact"};

// Parameters that have no setting of their own, as "factor=8,low_freq_factor=1".
void set_scaling(RopeParameters& parameters, std::string_view text) {
  if (text == kNoRopeScaling || set_rope_parameters(parameters, text).empty()) return;
  throw BadValue{
      fmt::format("none, or pairs such as factor=8,low_freq_factor=1 of {}; numbers of a list have ':' between them",
                  rope_parameter_names())};
}

std::int64_t parse_length(std::string_view text) { return parse_size_value(text, "tokens", 0, std::int64_t{1} << 40); }

}  // namespace

const SettingRow kRopeSettings[kRopeSettingCount] = {
    {.name = "rope-type",
     .kind = SettingKind::kText,
     .value = "TYPE",
     .fallback = "default",
     .help = "default, linear, dynamic, yarn, longrope, llama3 or proportional, as in a model's rope_parameters",
     .check = [](std::string_view text) { parse_choice(text, rope_type_names()); }},
    {.name = "rope-theta",
     .value = "X",
     .fallback = "10000",
     .help = "base of the frequencies, theta^(-2i / rotary_dim)",
     .check = [](std::string_view text) { parse_real(text, 1.0, 1e30); }},
    {.name = "rope-scaling",
     .kind = SettingKind::kText,
     .value = "LIST",
     .fallback = kNoRopeScaling,
     .help = "other rope_parameters of the type, e.g. factor=8,low_freq_factor=1,high_freq_factor=4",
     .check =
         [](std::string_view text) {
           RopeParameters parameters;
           set_scaling(parameters, text);
         }},
    {.name = "rope-length",
     .kind = SettingKind::kSize,
     .value = "TOKENS",
     .fallback = "0",
     .help = "longest sequence, for which dynamic and longrope fix their frequencies; 0: none",
     .check = [](std::string_view text) { parse_length(text); }},
    {.name = "rotary-factor",
     .value = "X",
     .fallback = "1",
     .help = "part of head_dim that is rotated (partial_rotary_factor)",
     .check = [](std::string_view text) { parse_real(text, 0.0, 1.0); }},
    {.name = "rope-pairs",
     .kind = SettingKind::kText,
     .value = "KIND",
     .fallback = "half",
     .help = "half: i with i + rotary_dim / 2, as in Llama; interleaved: 2i with 2i + 1, as in GPT-J",
     .check = [](std::string_view text) { parse_choice(text, kRopePairs); }},
    {.name = "rope-angles",
     .kind = SettingKind::kText,
     .value = "KIND",
     .fallback = "fp32",
     .help = "fp32: position times frequency as transformers rounds it; exact: in fp64, for millions of positions",
     .check = [](std::string_view text) { parse_choice(text, kRopeAngles); }}};

RopeSpec rope_spec_of(const Settings& settings, Dtype dtype, std::int64_t head_dim) {
  const auto own = [&](std::string_view name) -> const std::string& { return settings.own.find(name)->second; };
  RopeParameters parameters;
  set_scaling(parameters, own("rope-scaling"));
  parameters.type = static_cast<RopeType>(parse_choice(own("rope-type"), rope_type_names()));
  parameters.theta = parse_real(own("rope-theta"));
  parameters.partial_rotary_factor = parse_real(own("rotary-factor"));
  if (const std::int64_t length = parse_length(own("rope-length")); length > 0) parameters.length = length;
  return make_rope_spec(parameters, dtype, static_cast<int>(head_dim),
                        static_cast<RopePairs>(parse_choice(own("rope-pairs"), kRopePairs)),
                        parse_choice(own("rope-angles"), kRopeAngles) == 1);
}

void fill_rope_settings(const ModelRope& rope, const FillSetting& fill) {
  if (!rope.refusal.empty()) {
    fail(ErrorCode::kUnsupported, "the RoPE of the model's layer can't be computed", rope.refusal,
         "Give its type and parameters themselves.");
  }
  Fill{fill}("rope-type", rope.type)("rope-theta", rope.theta)("rotary-factor", rope.rotary_factor);
  Fill{fill}("rope-pairs", rope.interleaved ? "interleaved" : "half");
  if (!rope.scaling.empty()) Fill{fill}("rope-scaling", rope.scaling);
}

}  // namespace ringattn
