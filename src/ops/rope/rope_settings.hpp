// SPDX-License-Identifier: Apache-2.0
// The settings of RoPE that ops of the program share, each of which has its row in their own_settings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "io/model_rope.hpp"
#include "kernels/rope/rope.hpp"
#include "ops/common/op_entry.hpp"
#include "ops/common/settings.hpp"

namespace ringattn {

inline constexpr std::string_view kNoRopeScaling = "none";  // the default of rope-scaling
inline constexpr std::size_t kRopeSettingCount = 7;
extern const SettingRow kRopeSettings[kRopeSettingCount];

// The RoPE that they mean. Throws BadValue and kUsage.
RopeSpec rope_spec_of(const Settings& settings, Dtype dtype, std::int64_t head_dim);

// Gives them the values of a model. Throws kUnsupported for a RoPE that can't be computed.
void fill_rope_settings(const ModelRope& rope, const FillSetting& fill);

}  // namespace ringattn
