// SPDX-License-Identifier: Apache-2.0
// Waits for work of a backend that does not involve other ranks.
#pragma once

#include "base/device_timeouts.hpp"
#include "kernels/common/backend.hpp"

namespace ringattn {

// Returns when `stream` has passed all enqueued work. `deadline` is one of DeviceTimeouts. Throws kPeer after it.
inline void finish(Backend& backend, Stream stream, const Deadline& deadline) {
  backend.synchronize(stream, deadline,
                      [&deadline] { DeviceTimeouts::check(deadline, "no other rank has a part in it"); });
}

}  // namespace ringattn
