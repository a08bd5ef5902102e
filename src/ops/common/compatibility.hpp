// SPDX-License-Identifier: Apache-2.0
// Which kernels and transports work together. Each op calls these functions first when it is constructed.
#pragma once

#include "comm/transport.hpp"
#include "kernels/common/backend.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

// Returns the kernel request for a job over `transport`. With several ranks, a request that names neither a backend nor
// a kernel becomes a request for the backend whose memory the transport moves.
KernelRequest compatible_request(const KernelRequest& request, const Transport& transport);

// Throws kUnsupported if there are several ranks and the transport can't move the backend's memory.
void check_compatible(const KernelEntry& kernel, const Backend& backend, const Transport& transport);

// Checks Options::checksum for a backend's memory. Throws kUnsupported for device memory.
void check_checksum(const Backend& backend);

}  // namespace ringattn
