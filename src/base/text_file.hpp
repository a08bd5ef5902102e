// SPDX-License-Identifier: Apache-2.0
// Small text files: configurations, machine models, reports. Reading is bounded; writing is whole or not at all.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ringattn {

// Throws kFile when the file can't be read, is no regular file or pipe, or is longer than `limit` bytes.
std::string read_text_file(const std::string& path, std::size_t limit = std::size_t{1} << 20);

// Whether something that a new file would replace is there already: a regular file.
bool file_exists(const std::string& path);

// Throws kFile when `path` exists and `force` is not set, is a directory, or its directory doesn't exist. What a
// program asks before it starts to work for hours. `flag` names the path in the message, e.g. "--json".
void check_new_file(const std::string& path, bool force, std::string_view flag);

// Writes a temporary file beside `path`, syncs it and renames it; pipes and devices are written to directly. Throws
// kFile, and leaves nothing behind, when that fails, or when `path` exists and `force` is not set.
void write_text_file(const std::string& path, std::string_view text, bool force, std::string_view flag);

}  // namespace ringattn
