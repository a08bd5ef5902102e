// SPDX-License-Identifier: Apache-2.0
// Which kernels and transports fit each other: what every front door asks before it has made anything of them.
#pragma once

#include "attention/files/top_k_blocks.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// The request of a job over `transport`: of several ranks, those kernels alone whose memory the transport moves.
KernelRequest compatible_request(const KernelRequest& request, const Transport& transport);

// Where the blocks of such a job are chosen: on the rank's own device, if a kernel of a device folds it.
TopKDevice top_k_device(const KernelRequest& request, const Transport& transport);

// Throws kUnsupported where the transport, of several ranks, can't move what lies in the backend's memory.
void check_compatible(const KernelEntry& kernel, const Backend& backend, const Transport& transport);

// Options::checksum in a backend's memory. Throws kUnsupported for device memory.
void check_checksum(const Backend& backend);

}  // namespace ringattn
