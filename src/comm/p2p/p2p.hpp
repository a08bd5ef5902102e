// SPDX-License-Identifier: Apache-2.0
// Transport `p2p`: copy engines write straight into the memory of peers on the same host; no multiprocessor works for a
// transfer. Present only where the build found CUDA.
//
// Push only. Receive spans lie in memory of allocate_device(): announce(), or else each post(), tells senders where
// their messages may be put (allocation, offset), through a mailbox in shared host memory. Ranks of other processes
// open an allocation once by CUDA IPC, ranks of this process use its address. What is sent may lie anywhere that the
// device can read.
//
// Flags are counters of messages between two ranks, in host memory that all devices and CPUs see, written and waited
// for by stream memory operations: `ready` by the receiver's stream in post(), `done` by the sender's behind the
// copies. CPUs read them to blame, and write them to release a stream when the world has failed.
//
// No hardware queue is ever stuck, however streams share queues (CUDA_DEVICE_MAX_CONNECTIONS=1), and while a call such
// as cudaFree waits for the whole device. There is an order of all operations in which each waits for earlier ones
// only, and every queue holds its operations in that order, so the earliest that is not done can proceed.
//
// - Ranks that are processes, each with a GPU of its own: the order is that of the program, which all ranks share. Per
//   exchange: `ready`, then the pushes (wait for `ready`, copy, `done`) by round, then the wait. Each rank enqueues in
//   this order, and its streams may wait for what a peer's host has not enqueued yet: no host waits for a peer. (For an
//   exchange that was not announced it does, as below.)
// - Ranks that are threads of one process may share a GPU, and a call that waits for the whole device would wait for
//   other ranks' streams. Here the order is that of host time, and a wait is enqueued only after the operation that
//   satisfies it: a push when the receiver has enqueued `ready` (`posted`, a counter between CPUs) and the pushes of
//   lower rounds that it waits for are enqueued (`pushed`, another); the wait of a stream when all pushes to this rank
//   are. So wait() blocks the host until the peers' hosts have come to their post(). Ranks that
//   share a GPU want a queue for each stream, 1 + lanes a rank, to overlap: set CUDA_DEVICE_MAX_CONNECTIONS (at most
//   32) before CUDA starts.
//
// Failure. The host's part of wait() has the deadline; the device's part gets the same length from the moment the
// stream comes to the wait (a counter that the stream writes), and progress() throws past it, as wait() does for the
// waits before it. abandon() makes this rank's streams go on by themselves, by writing the flags that they wait for.
// Memory that peers know of stays allocated until they have closed it: what was freed goes back to the device at the
// next all-gather, or with the transport.
#pragma once

#include <memory>

#include "comm/transport.hpp"

namespace ringattn {

struct P2pOptions {
  // Streams that carry this rank's pushes; each peer has one of them, and all serve a message where there are fewer
  // peers than lanes.
  int lanes = 2;
  double setup_seconds = 60.0;  // for peers to come and memory to be opened
};

// A transport of device memory beside `control`, a host transport of the same ranks, for this rank's memory on
// `device`. Collective. Throws an AgreedError (kUnsupported) where ranks are on several hosts, two processes share a
// GPU, or a rank can't write to a peer's memory, which is tried out.
std::unique_ptr<Transport> make_p2p_transport(std::unique_ptr<Transport> control, int device,
                                              const P2pOptions& options = {});

}  // namespace ringattn
