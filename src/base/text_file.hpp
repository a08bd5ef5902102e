// SPDX-License-Identifier: Apache-2.0
// Reads and writes small text files: configurations, machine models, reports. Reads are bounded. A written file appears
// complete or not at all.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ringattn {

// Throws kFile when the file can't be read, is not a regular file, or is longer than `limit` bytes.
std::string read_text_file(const std::string& path, std::size_t limit = std::size_t{1} << 20);

// Throws kFile when `path` exists and `force` is not set, is not a regular file (a symbolic link included), or its
// directory doesn't exist. Programs call it before they start work of hours. `name` is the path's setting, e.g. "json".
void check_new_file(const std::string& path, bool force, std::string_view name);

// Writes a temporary file beside `path`, syncs it and renames it. Throws kFile in the cases of check_new_file(), and
// when writing fails. No file is left then.
void write_text_file(const std::string& path, std::string_view text, bool force, std::string_view name);

}  // namespace ringattn
