// SPDX-License-Identifier: Apache-2.0
// The end of a process that can't unwind any more: a peer or a driver may hang in a destructor.
#pragma once

namespace ringattn {

// Leaves with `code` at once. Nothing is unwound and no buffer is flushed; unfinished files of this process are removed
// (base/unfinished_file.hpp), and its launcher is told (base/outcome.hpp).
[[noreturn]] void end_process(int code) noexcept;

}  // namespace ringattn
