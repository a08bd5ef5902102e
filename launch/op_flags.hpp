// SPDX-License-Identifier: Apache-2.0
// Which flags of a job an op has nothing of.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "launch/config.hpp"

namespace ringattn {

struct UnknownFlag {
  std::string_view flag;
  std::string_view why;
};
std::span<const UnknownFlag> unknown_to(Op op);

// The first of them that a user gave, but for this one; null: none.
const UnknownFlag* first_unknown(const Config& config, Op op, std::string_view but_for = {});
// Refuses those that a user gave, but for this one. Throws kUsage.
void check_op(const Config& config, Op op, std::string_view but_for = {});

// Throws kUsage for a setting that steps over a cache of latents don't have, though latents have it.
void check_steps_of_latents(const Config& config);
// Why latents in rows are folded around the ring where their queries would make a step: a user gave such a setting.
// Empty: nobody did.
std::string why_rows_of_latents(const Config& config);

}  // namespace ringattn
