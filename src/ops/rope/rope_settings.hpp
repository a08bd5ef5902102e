// SPDX-License-Identifier: Apache-2.0
// The settings of RoPE that several ops share. Each op lists their rows in its own_settings.
#pragma once

#include <cstdint>
#include <string_view>

#include "io/model_rope.hpp"
#include "kernels/rope/rope.hpp"
#include "ops/jobs/op_entry.hpp"
#include "ops/jobs/settings.hpp"

namespace ringattn {

inline constexpr std::string_view kNoRopeScaling = "none";  // the default of rope-scaling

// Throw BadValue.
void check_rope_type(std::string_view text);
void check_rope_theta(std::string_view text);
void check_rope_scaling(std::string_view text);
void check_rope_length(std::string_view text);
void check_rotary_factor(std::string_view text);
void check_rope_pairs(std::string_view text);
void check_rope_angles(std::string_view text);

inline constexpr SettingRow kRopeSettings[] = {
    {.name = "rope-type",
     .kind = SettingKind::kText,
     .value = "TYPE",
     .fallback = "default",
     .help = "default, linear, dynamic, yarn, longrope, llama3 or proportional, as in a model's rope_parameters",
     .check = check_rope_type},
    {.name = "rope-theta",
     .value = "X",
     .fallback = "10000",
     .help = "base of the frequencies, theta^(-2i / rotary_dim)",
     .check = check_rope_theta},
    {.name = "rope-scaling",
     .kind = SettingKind::kText,
     .value = "LIST",
     .fallback = kNoRopeScaling,
     .help = "other rope_parameters of the type, e.g. factor=8,low_freq_factor=1,high_freq_factor=4",
     .check = check_rope_scaling},
    {.name = "rope-length",
     .kind = SettingKind::kSize,
     .value = "TOKENS",
     .fallback = "0",
     .help = "longest sequence, for which dynamic and longrope fix their frequencies; 0: none",
     .check = check_rope_length},
    {.name = "rotary-factor",
     .value = "X",
     .fallback = "1",
     .help = "part of head_dim that is rotated (partial_rotary_factor)",
     .check = check_rotary_factor},
    {.name = "rope-pairs",
     .kind = SettingKind::kText,
     .value = "KIND",
     .fallback = "half",
     .help = "half: i with i + rotary_dim / 2, as in Llama; interleaved: 2i with 2i + 1, as in GPT-J",
     .check = check_rope_pairs},
    {.name = "rope-angles",
     .kind = SettingKind::kText,
     .value = "KIND",
     .fallback = "fp32",
     .help = "fp32: position times frequency as transformers rounds it; exact: in fp64, for millions of positions",
     .check = check_rope_angles}};

// The RoPE that these settings describe. Throws BadValue and kUsage.
RopeSpec rope_spec_of(const Settings& settings, Dtype dtype, std::int64_t head_dim);

// Fills these settings with the values of a model. Throws kUnsupported for a RoPE that can't be computed.
void fill_rope_settings(const ModelRope& rope, const FillSetting& fill);

}  // namespace ringattn
