// SPDX-License-Identifier: Apache-2.0
// Transport `p2p`: the GPU's copy engines write directly into the memory of peers on the same host, so no SM works for
// a transfer. Present only if the build found CUDA.
//
// Push only. Receive spans lie in memory from allocate_device(). announce(), or otherwise each post(), tells the
// senders where their messages may be written (allocation, offset), through a mailbox in shared host memory. Ranks of
// other processes open an allocation once by CUDA IPC, and ranks of this process use its address. Send spans may lie in
// any memory that the device can read.
//
// Flags are counters of the messages between two ranks. They lie in host memory that all devices and CPUs can access,
// and stream memory operations write them and wait for them. The receiver's stream writes `ready` in post(). The
// sender's stream writes `done` after the copies. CPUs read the counters to find out which peer is late, and write them
// to release a stream after the world has failed.
//
// Deadlock freedom. No hardware queue gets stuck, even if streams share queues (CUDA_DEVICE_MAX_CONNECTIONS=1) or a
// call such as cudaFree waits for the whole device. There is a total order of all operations in which each waits only
// for earlier ones. Every queue holds its operations in that order, so the earliest unfinished operation can always
// proceed.
//
// - Ranks are processes, each with its own GPU: the order is program order, which all ranks share. Per exchange it
//   is `ready`, then the pushes by round (wait for `ready`, copy, `done`), then the wait. Each rank enqueues in this
//   order, and its streams may wait for operations that a peer's host has not enqueued yet, so no host waits for a
//   peer. Exchanges that were not announced are the exception: there the host waits, as below.
// - Ranks are threads of one process: they may share a GPU, and a call that waits for the whole device would wait for
//   other ranks' streams. Here the order is host time: a wait is enqueued only after the operation that satisfies it.
//   A push is enqueued once the receiver has enqueued `ready` (CPU counter `posted`) and the pushes of lower rounds
//   that it waits for are enqueued (CPU counter `pushed`). The wait of a stream is enqueued once all pushes to this
//   rank are. So wait() blocks the host until the peers' hosts have called post(). Ranks that share a GPU need one
//   hardware queue per stream (1 + lanes per rank) to overlap: set CUDA_DEVICE_MAX_CONNECTIONS (at most 32) before
//   CUDA starts.
//
// Failure. The deadline of wait() applies to the host's part. The device's part gets the same length from the moment
// the stream reaches the wait (a counter that the stream writes). After that progress() throws, and so does a later
// wait(). abandon() releases this rank's streams by writing the flags that they wait for. Memory exported to peers
// stays allocated until they have closed it: freed memory returns to the device at the next all-gather, or when the
// transport is destroyed.
#pragma once

#include <memory>

#include "comm/transport.hpp"

namespace ringattn {

struct P2pOptions {
  // Streams for this rank's pushes. Each peer is assigned to one. If there are fewer receivers than lanes, all lanes
  // serve each large message.
  int lanes = 2;
  double setup_seconds = 60.0;  // time limit for peers to come and memory to be opened
};

// A transport of device memory for this rank's memory on `device`. `control` is a host transport of the same ranks.
// Collective. Throws an AgreedError (kUnsupported) if ranks are on several hosts, two processes share a GPU, or a rank
// can't write to a peer's memory, which is tested.
std::unique_ptr<Transport> make_p2p_transport(std::unique_ptr<Transport> control, int device,
                                              const P2pOptions& options = {});

}  // namespace ringattn
