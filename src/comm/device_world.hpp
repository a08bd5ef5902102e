// SPDX-License-Identifier: Apache-2.0
// Turns a host world into a device world: assigns GPUs to ranks and makes the device transport that a request asks for,
// or says why there is none.
#pragma once

#include <memory>

#include "comm/world.hpp"

namespace ringattn {

struct DeviceWorld {
  std::unique_ptr<Transport> transport;  // nullptr: use the host transport
  MessageTemplate reason;  // "forced", or the candidates that were rejected and why; empty: there was no choice
};

// The device transport for the ranks of `host`. Its control channel is a world split from `host`. Collective. Throws an
// AgreedError (kUnsupported) when the forced transport, or the requested kind of memory, is not available.
DeviceWorld make_device_world(Transport& host, const WorldRequest& request);

// The same for the GPU that this rank's caller names. `host` outlives the transport. p2p is used if possible, else
// nccl. Collective. Throws an AgreedError (kUnsupported) that says why neither works.
std::unique_ptr<Transport> make_device_transport(Transport& host, int device, double setup_seconds);

}  // namespace ringattn
