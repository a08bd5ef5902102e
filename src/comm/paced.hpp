// SPDX-License-Identifier: Apache-2.0
// A host transport slowed to a given link rate, to measure overlap on machines whose links are too fast to matter.
#pragma once

#include <memory>

#include "comm/transport.hpp"

namespace ringattn {

// Each round of an exchange is handed to `inner` only once the bytes of the rounds before it would have passed a link
// of `bytes_per_second`, and completes no earlier than its own bytes would have. Held-back rounds start in progress()
// and wait() alone, as an unpolled transfer would. RINGATTN_PACE uses it.
std::unique_ptr<Transport> make_paced_transport(std::unique_ptr<Transport> inner, double bytes_per_second);

}  // namespace ringattn
