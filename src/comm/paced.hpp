// SPDX-License-Identifier: Apache-2.0
// A host transport slowed to a given link rate, to measure overlap on machines whose links are too fast to matter.
#pragma once

#include <memory>

#include "comm/transport.hpp"

namespace ringattn {

// Each round of an exchange is posted to `inner` only after the time in which a link of `bytes_per_second` transfers
// the bytes of the rounds before it. It finishes no earlier than its own bytes would on that link. Delayed rounds start
// only in progress() and wait(), like a transfer without a progress thread. RINGATTN_PACE uses it.
std::unique_ptr<Transport> make_paced_transport(std::unique_ptr<Transport> inner, double bytes_per_second);

}  // namespace ringattn
