// SPDX-License-Identifier: Apache-2.0
// Text out of files in messages. A file may hold megabytes where a name is expected, and any bytes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ringattn {

// The text in backquotes for a message of one line: at most 80 bytes of it, with other than printable ASCII as \xNN
std::string in_quotes(std::string_view text);

// The text itself, or its first `bytes` bytes and an ellipsis.
std::string shortened(std::string_view text, std::size_t bytes = 400);

}  // namespace ringattn
