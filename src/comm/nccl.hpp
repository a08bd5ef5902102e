// SPDX-License-Identifier: Apache-2.0
// Transport `nccl`: NCCL's grouped sends and receives, one group per round, also across hosts. Present only if the
// build found CUDA and nccl.h. NCCL itself is opened at run time.
//
// Ranks first tell each other over the control transport that they have posted an exchange, and only then enqueue it
// with NCCL. So an NCCL kernel never spins on an SM for a rank that doesn't come, and a passed deadline can name that
// rank. The communicator is non-blocking: no NCCL call blocks the host longer than a poll. wait() blocks the host until
// the exchange is enqueued. The deadline of the device's part starts when the stream reaches the wait.
//
// NCCL requires the operations of a communicator to be in the same order on all ranks. All groups go to one stream that
// the transport owns, in the order of post(), after an event of the caller's stream. A caller may therefore post on
// several streams, as an SSM layer does, if all ranks post in the same order.
//
// Every message goes directly from its owner to each rank that needs it (Route::kDirect). Within a host, NVLink
// connects all GPUs, so forwarding blocks around a ring would only add steps. One group with all peers uses all of
// NCCL's channels, where a ring step has one peer. NVLink multicast stays off (NCCL_NVLS_ENABLE=0 unless the
// environment sets it): sends don't use it, and no result comes from a reduction.
#pragma once

#include <memory>
#include <string>

#include "comm/transport.hpp"

namespace ringattn {

// Why NCCL can't be used in this process; empty if it can. Opens it.
std::string why_no_nccl();

struct NcclOptions {
  // Thread blocks of an NCCL kernel, which other kernels can't use meanwhile. 0: NCCL's default.
  int max_ctas = 0;
  double setup_seconds = 60.0;  // time limit for creating the communicator
};

// A transport of device memory for this rank's memory on `device`. `control` is a host transport of the same ranks.
// Collective. Throws an AgreedError (kUnsupported) if two ranks share a GPU or NCCL can't connect the ranks.
std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> control, int device,
                                               const NcclOptions& options = {});

}  // namespace ringattn
