// SPDX-License-Identifier: Apache-2.0
// Quotes text from files in messages. A file may hold megabytes where a name is expected, and any bytes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ringattn {

// The text in backquotes, for a one-line message: at most its first 80 bytes. Bytes other than printable ASCII become
// \xNN.
std::string in_quotes(std::string_view text);

// The text itself if it has at most `bytes` bytes, else its first `bytes` bytes and an ellipsis.
std::string shortened(std::string_view text, std::size_t bytes = 400);

}  // namespace ringattn
