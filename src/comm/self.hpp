// SPDX-License-Identifier: Apache-2.0
// Transport `self`: a world of one rank, without communication.
#pragma once

#include <memory>

#include "comm/transport.hpp"

namespace ringattn {

// `memory` is the kind of memory that the job's backend uses, and `device` its device.
std::unique_ptr<Transport> make_self_transport(MemoryKind memory = MemoryKind::kHost, int device = 0);

}  // namespace ringattn
