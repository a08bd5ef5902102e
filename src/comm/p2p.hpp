// SPDX-License-Identifier: Apache-2.0
// Transport `p2p`: copy engines write to peers' memory on one host, and use no multiprocessor. Ranks are processes,
// each with a GPU of its own (memory mapped through CUDA IPC), or threads of one process, which may share GPUs.
//
// Push only. Receive spans lie in memory of cudaMalloc (base/gpu.hpp), which the receiver exports; sources may be any
// device memory. A receiver tells its senders by a host message where the spans of an exchange go, and by a flag when
// its stream has come to post(), so that the memory is free. A sender waits for that flag on a stream of its own,
// copies, and raises a flag behind the data, for which the receiver's stream waits. Flags lie in pinned memory that all
// ranks share: GPUs wait for and write them by stream memory operations, CPUs read them for blame and write them to
// release the streams of a broken world.
//
// Streams share hardware queues, so a rank's operations, read in the order in which they are enqueued, must not wait
// for what comes later: an exchange's ready flags are enqueued before its pushes, those before the waits for its data,
// and a push waits for another rank's ready flag of the same exchange and for pushes of earlier rounds only. By
// induction over exchanges and rounds nobody waits for ever, with a single queue too. Ranks that share a GPU would wait
// in each other's queues: there the hosts do the waiting, and a push or a wait is enqueued when it need not wait any
// more.
#pragma once

#include <memory>

#include "comm/transport.hpp"

namespace ringattn {

struct P2pOptions {
  // Streams for pushes. Two keep a copy engine busy while another one starts; each takes a hardware queue.
  int lanes = 2;
};

// Collective over `control`, a world of host memory with the same ranks, which the transport keeps for bootstrap, small
// messages and failures. Throws an AgreedError (kUnsupported) where the ranks are on several hosts, two processes share
// a GPU, or peers' memory can't be written. All exchanges in flight are posted on one stream.
std::unique_ptr<Transport> make_p2p_transport(std::unique_ptr<Transport> control, int device,
                                              const P2pOptions& options = {});

}  // namespace ringattn
