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

void check_rope_type(std::string_view text) { parse_choice(text, rope_type_names()); }
void check_rope_theta(std::string_view text) { parse_real(text, 1.0, 1e30); }
void check_rope_scaling(std::string_view text) {
  RopeParameters parameters;
  set_scaling(parameters, text);
}
void check_rope_length(std::string_view text) { parse_length(text); }
void check_rotary_factor(std::string_view text) { parse_real(text, 0.0, 1.0); }
void check_rope_pairs(std::string_view text) { parse_choice(text, kRopePairs); }
void check_rope_angles(std::string_view text) { parse_choice(text, kRopeAngles); }

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
