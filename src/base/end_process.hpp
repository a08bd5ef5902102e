// SPDX-License-Identifier: Apache-2.0
// Ends a process that can't unwind its stack any more, because a peer or a driver may hang in a destructor.
#pragma once

namespace ringattn {

// Exits with `code` at once. Nothing is unwound and no buffer is flushed. Unfinished files of this process are removed
// (base/unfinished_file.hpp), and its launcher is told (base/outcome.hpp).
[[noreturn]] void end_process(int code) noexcept;

}  // namespace ringattn
