// SPDX-License-Identifier: Apache-2.0
// Tests by the flag that they show the effect of.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "tests/cli/tool.hpp"

namespace ringattn::testing {

using Effects = std::map<std::string_view, std::function<void()>, std::less<>>;

// Effects of flags that belong to single ops.
const Effects& op_effects();

// Output of a successful run.
std::string out_of(const Words& words, const Variables& variables = {});

}  // namespace ringattn::testing
