// SPDX-License-Identifier: Apache-2.0
// Sizes as users write them: tokens or bytes with the suffixes k, m, g = 1024, 1024², 1024³.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ringattn {

// Accepts "4096", "8k", "2M". Returns nothing for other text, a sign, a fraction, or a number above 2^63 − 1.
std::optional<std::int64_t> parse_size(std::string_view text);

// For messages: "512 B", "1.5 MiB".
std::string format_bytes(double bytes);

// "1 byte", "2 bytes".
std::string counted(std::uint64_t count, std::string_view what);

}  // namespace ringattn
