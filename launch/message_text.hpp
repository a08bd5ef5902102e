// SPDX-License-Identifier: Apache-2.0
// Spells the library's messages for the program's user: a setting becomes a flag, a command becomes a command line.
#pragma once

#include <string>

#include "base/error.hpp"

namespace ringattn {

struct Config;

// Settings as "--kv-heads 2", commands as "`ringattn info`".
std::string program_text(const MessageTemplate& wording);

// The whole message of an error.
std::string program_text(const Error& error);

// The same for a user of this configuration. A setting is spelled as it was given: an environment variable as
// "RINGATTN_KV_HEADS=2", a key of the config file as "kv-heads = 2 in job.toml".
std::string program_text(const Error& error, const Config& config);

}  // namespace ringattn
