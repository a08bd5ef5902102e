// SPDX-License-Identifier: Apache-2.0
// Frequencies of RoPE from its parameters, with the names and formulas of Hugging Face's rope_parameters
// (transformers/modeling_rope_utils.py). Frequencies are computed in fp32 step by step, as there. Powers are correctly
// rounded, while PyTorch's depend on the CPU and are within 1 ulp. Logarithms and powers are computed in this project's
// double-double arithmetic, not by libm. With `exact` all steps are fp64.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/rope/rope.hpp"

namespace ringattn {

enum class RopeType : std::uint8_t { kDefault, kLinear, kDynamic, kYarn, kLongrope, kLlama3, kProportional };

// "default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional".
std::string_view rope_type_name(RopeType type);
std::span<const std::string_view> rope_type_names();  // in the order of RopeType

struct RopeParameters {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double partial_rotary_factor = 1.0;      // rotary_dim = ⌊head_dim · this⌋; proportional: the part of the pairs
  std::optional<double> factor;            // all types except the default one
  std::optional<double> attention_factor;  // yarn, longrope
  std::optional<double> original_max_position_embeddings;   // yarn, longrope, llama3
  std::optional<double> max_position_embeddings;            // dynamic
  std::optional<double> beta_fast, beta_slow;               // yarn: 32 and 1
  std::optional<double> mscale, mscale_all_dim;             // yarn
  std::optional<double> low_freq_factor, high_freq_factor;  // llama3
  bool truncate = true;                                     // yarn
  std::vector<double> short_factor, long_factor;            // longrope: [pairs]
  std::vector<std::int64_t> mrope_section;                  // pairs of each axis; empty: one axis
  bool mrope_interleaved = false;                           // pairs of the axes alternate
  // The sequence length for which dynamic and longrope choose their frequencies. These types are refused without it,
  // because the bits of keys that are in a cache would change as their sequence grows.
  std::optional<std::int64_t> length;

  bool operator==(const RopeParameters&) const = default;
};

// Sets a parameter by its Hugging Face name, or "length", from text: a number, true, false, or numbers with ':' between
// them. Returns whether there is such a parameter and it takes the text.
bool set_rope_parameter(RopeParameters& parameters, std::string_view name, std::string_view text);
// The same for pairs that are separated by ',', e.g. "factor=8,low_freq_factor=1". Returns the first pair that was
// rejected, or an empty text if all were accepted.
std::string_view set_rope_parameters(RopeParameters& parameters, std::string_view text);
std::string_view rope_parameter_names();  // with ", " between them

// Throws kUsage, naming the parameter, if one is missing, contradicts the others, or isn't used by the type.
RopeSpec make_rope_spec(const RopeParameters& parameters, Dtype dtype, int head_dim, RopePairs pairs, bool exact);

}  // namespace ringattn
