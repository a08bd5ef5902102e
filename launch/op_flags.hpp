// SPDX-License-Identifier: Apache-2.0
// Which flags of a job belong to an op.
#pragma once

#include <string>
#include <string_view>

#include "launch/config.hpp"

namespace ringattn {

inline bool belongs_to(const FlagRow& row, Op op) { return (row.ops >> static_cast<unsigned>(op) & 1U) != 0; }

// The op of that name, an older name included. Throws BadValue with all names.
Op parse_op(std::string_view text);

// True if the user chose the flag's value. A default that --print-config wrote into the config file is not a choice.
bool chosen(const Config& config, std::string_view flag);

// The first flag that the user gave and that does not belong to `op`, except `but_for`; null: none.
const FlagRow* first_unknown(const Config& config, Op op, std::string_view but_for = {});
// Throws kUsage where first_unknown() finds a flag.
void check_op(const Config& config, Op op, std::string_view but_for = {});

// Throws kUsage for a flag that MLA takes but not its decode step over a cache.
void check_mla_decode(const Config& config);
// Why MLA runs on the ring although its few queries would make a decode step: the user gave a flag that only the ring
// takes. Empty: no such flag was given.
std::string why_mla_not_decoded(const Config& config);

}  // namespace ringattn
