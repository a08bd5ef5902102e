// SPDX-License-Identifier: Apache-2.0
// Quotes text from a file in a message. Where a name is expected, a file may hold megabytes of arbitrary bytes.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ringattn {

// Returns the text in backquotes, for a one-line message: its first 80 bytes, and an ellipsis if there are more.
// Backquotes and bytes that are not printable ASCII become \xNN.
std::string in_quotes(std::string_view text);

// Returns the text, cut after `bytes` bytes. A text that was cut ends with an ellipsis.
std::string shortened(std::string_view text, std::size_t bytes = 400);

}  // namespace ringattn
