// SPDX-License-Identifier: Apache-2.0
// Transport `nccl`: NCCL's grouped sends and receives, one group a round, also across hosts. Present only where the
// build found CUDA and NCCL.
//
// Ranks first tell each other over the control transport that they have posted; NCCL hears of an exchange only then, so
// a kernel of NCCL never spins on a multiprocessor for a rank that doesn't come, and a deadline can name the rank. The
// communicator is a non-blocking one: no call of NCCL keeps the host longer than a poll. wait() blocks the host until
// the exchange is enqueued; the device's part has the deadline's length from the moment the stream comes to the wait.
//
// NCCL wants the operations of a communicator in the same order on all ranks. All groups go to one stream of the
// transport's own, in the order of post(), behind an event of the caller's stream; so a caller may post on several
// streams, as a scan does, where all ranks post in one order.
//
// Every message goes straight from its owner to whoever needs it (Route::kDirect): inside a host the links join all
// GPUs, so handing parts on around a ring would only add steps; and one group with all peers uses all of NCCL's
// channels, where a ring's step has one peer. NVLink multicast stays off (NCCL_NVLS_ENABLE=0 unless the environment
// says otherwise): no result comes from a reduction, and sends don't use it.
#pragma once

#include <memory>

#include "comm/transport.hpp"

namespace ringattn {

struct NcclOptions {
  // Of a kernel of NCCL, its thread blocks, which kernels beside it lack; 0: as many as NCCL thinks best.
  int max_ctas = 0;
  double setup_seconds = 60.0;  // for the communicator
};

// A transport of device memory beside `control`, a host transport of the same ranks, for this rank's memory on
// `device`. Collective. Throws an AgreedError (kUnsupported) where two ranks share a GPU or NCCL can't join the ranks.
std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> control, int device,
                                               const NcclOptions& options = {});

}  // namespace ringattn
