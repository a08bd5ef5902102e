// SPDX-License-Identifier: Apache-2.0
// Identifies the build: version, source revision, compiler, and the linker's build id.
#pragma once

#include <string>
#include <string_view>

namespace ringattn {

std::string_view version();       // "0.3.0"
std::string_view git_revision();  // short commit hash, or "unknown" outside a checkout
bool git_dirty();                 // the source differed from git_revision()
std::string_view compiler();      // e.g. "GNU 12.2.0"
std::string_view build_type();

// The build id, in hex, of the binary that holds this library: the program, or the shared library that a program in any
// language has loaded. Two binaries are equal exactly if their ids are. Empty if the linker wrote none.
std::string build_id();

}  // namespace ringattn
