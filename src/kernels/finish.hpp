// SPDX-License-Identifier: Apache-2.0
// Waiting for a backend's work in which nobody else has a part.
#pragma once

#include "base/device_timeouts.hpp"
#include "kernels/backend.hpp"

namespace ringattn {

// Returns when `stream` has passed what was enqueued on it. `deadline`: one of DeviceTimeouts. Throws kPeer past it.
inline void finish(Backend& backend, Stream stream, const Deadline& deadline) {
  backend.synchronize(stream, deadline,
                      [&deadline] { DeviceTimeouts::check(deadline, "no other rank has a part in it"); });
}

}  // namespace ringattn
