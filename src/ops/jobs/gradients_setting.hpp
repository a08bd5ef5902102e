// SPDX-License-Identifier: Apache-2.0
// The setting that ops of gradients share.
#pragma once

#include <array>
#include <string_view>

#include "ops/common/values.hpp"
#include "ops/jobs/op_entry.hpp"

namespace ringattn {

inline constexpr std::array<std::string_view, 2> kGradientDtypes{"input", "fp32"};
inline constexpr SettingRow kGradientsSetting{
    .name = "gradients",
    .kind = SettingKind::kText,
    .value = "DTYPE",
    .fallback = "input",
    .help = "dtype of the gradients: input (that of the rows) or fp32",
    .check = [](std::string_view text) { parse_choice(text, kGradientDtypes); }};

}  // namespace ringattn
