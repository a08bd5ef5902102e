// SPDX-License-Identifier: Apache-2.0
// Checks which kernels and transports work together. Every op asks this at the start of its construction.
#pragma once

#include "attention/files/top_k_blocks.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// The kernel request of a job over `transport`: with several ranks, only kernels whose memory the transport can move.
KernelRequest compatible_request(const KernelRequest& request, const Transport& transport);

// Where top-k block masks of such a job are computed: on the rank's own device, if a device kernel runs the job.
TopKDevice top_k_device(const KernelRequest& request, const Transport& transport);

// Throws kUnsupported if the transport of several ranks can't move the backend's memory.
void check_compatible(const KernelEntry& kernel, const Backend& backend, const Transport& transport);

// Checks Options::checksum for a backend's memory. Throws kUnsupported for device memory.
void check_checksum(const Backend& backend);

}  // namespace ringattn
