// SPDX-License-Identifier: Apache-2.0
// Failpoints: named points in the code at which a test stops or kills chosen ranks. Builds without RINGATTN_FAILPOINTS,
// such as releases, contain none of this.
#pragma once

namespace ringattn {

#if defined(RINGATTN_FAILPOINTS)
// Applies TEST_RINGATTN_FAILPOINT, "ACTION:RANKS:FAILPOINT", to the calling rank if it names this failpoint and this
// rank (RANKS: one, or several separated by commas). Actions: stop and kill (send the process that signal) and block
// (the thread, for ever). If TEST_RINGATTN_FAILPOINT_FILE is set, that empty file is created first, so its timestamp
// says when.
void failpoint(const char* name);
#else
inline void failpoint(const char*) {}
#endif

}  // namespace ringattn
