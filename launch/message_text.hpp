// SPDX-License-Identifier: Apache-2.0
// The library's messages in the words of the program's user: a setting is a flag, a command is what to type.
#pragma once

#include <string>

#include "base/error.hpp"

namespace ringattn {

struct Config;

// Settings as "--kv-heads 2", commands as "`ringattn info`".
std::string program_text(const MessageTemplate& wording);

// The whole message of an error.
std::string program_text(const Error& error);

// The same for a user of this configuration, who reads of a setting where it was given: a variable of the environment
// as "RINGATTN_KV_HEADS=2", a key of the config file as "kv-heads = 2 in job.toml".
std::string program_text(const Error& error, const Config& config);

}  // namespace ringattn
