// SPDX-License-Identifier: Apache-2.0
// From a world of host memory to one of device memory: places the ranks on GPUs and makes the device transport that a
// request means, or says why there is none.
#pragma once

#include <memory>

#include "comm/world.hpp"

namespace ringattn {

struct DeviceWorld {
  std::unique_ptr<Transport> transport;  // nullptr: the host's world is the answer
  MessageTemplate reason;                // "forced", or what was passed over and why; empty: there was no choice
};

// The transport of device memory for the ranks of `host`, with a world split from it as its control channel.
// Collective. Throws an AgreedError (kUnsupported) when what was forced, or the memory that was asked for, can't be
// had.
DeviceWorld make_device_world(Transport& host, const WorldRequest& request);

// The same with the GPU that this rank's caller names: a transport beside `host`, which outlives it, p2p where that can
// be, else nccl. Collective. Throws an AgreedError (kUnsupported) that says why neither can.
std::unique_ptr<Transport> make_device_transport(Transport& host, int device, double setup_seconds);

}  // namespace ringattn
