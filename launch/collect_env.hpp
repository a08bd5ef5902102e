// SPDX-License-Identifier: Apache-2.0
// `ringattn collect-env`: the facts that a bug report needs. It reads no flags, no configuration and no environment
// variables of flags, so that it works even if these are wrong.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ringattn {

inline constexpr std::string_view kCollectEnvCommand = "collect-env";
inline constexpr std::string_view kCollectEnvSummary =
    "print versions, devices, links, build and environment for a bug report";

std::string collect_env_help();

// `arguments`: those after the subcommand. Throws kUsage for any, and kFile.
void collect_env_main(const std::vector<std::string>& arguments);

}  // namespace ringattn
