// SPDX-License-Identifier: Apache-2.0
// The library's messages in the words of the program's user: a setting is a flag, a command is what to type.
#pragma once

#include <string>

#include "base/error.hpp"

namespace ringattn {

// Settings as "--kv-heads 2", commands as "`ringattn info`".
std::string program_text(const Wording& wording);

// The whole message of an error.
std::string program_text(const Error& error);

}  // namespace ringattn
