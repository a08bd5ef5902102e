// SPDX-License-Identifier: Apache-2.0
// Named places at which a test stops or kills a chosen rank. Builds without RINGATTN_FAILPOINTS, releases among them,
// hold nothing of it.
#pragma once

namespace ringattn {

#if defined(RINGATTN_FAILPOINTS)
// Does to the calling rank what the environment's TEST_RINGATTN_FAILPOINT says of this name, "ACTION:RANKS:FAILPOINT"
// (RANKS: one, or several between commas). Actions: stop and kill (its process, by a signal) and block (its thread, for
// ever). Before that it makes the empty file that TEST_RINGATTN_FAILPOINT_FILE names, if it does: its time says when.
void failpoint(const char* name);
#else
inline void failpoint(const char*) {}
#endif

}  // namespace ringattn
