// SPDX-License-Identifier: Apache-2.0
// Small text files: configurations, machine models, reports. Reading is bounded; writing is whole or not at all.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ringattn {

// Throws kFile when the file can't be read, is no regular file, or is longer than `limit` bytes.
std::string read_text_file(const std::string& path, std::size_t limit = std::size_t{1} << 20);

// Throws kFile when `path` exists and `force` is not set, is no regular file (a link, too), or its directory doesn't
// exist. What a program asks before it starts to work for hours. `name` is the path's setting, e.g. "json".
void check_new_file(const std::string& path, bool force, std::string_view name);

// Writes a temporary file beside `path`, syncs it and renames it. Throws kFile, and leaves nothing behind, when
// that fails, and where check_new_file() does.
void write_text_file(const std::string& path, std::string_view text, bool force, std::string_view name);

}  // namespace ringattn
