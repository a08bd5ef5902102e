// SPDX-License-Identifier: Apache-2.0
// What was built: version, source revision, compiler, and the linker's build id.
#pragma once

#include <string>
#include <string_view>

namespace ringattn {

std::string_view version();       // "0.3.0"
std::string_view git_revision();  // short hash of the source, or "unknown" outside a checkout
bool git_dirty();                 // the source differed from git_revision()
std::string_view compiler();      // e.g. "GNU 12.2.0"
std::string_view build_type();

// The build id, in hex, of the binary that holds this library: the program, or the shared library that a program of any
// language has loaded. Equal exactly for equal binaries; empty if the linker wrote none.
std::string build_id();

}  // namespace ringattn
