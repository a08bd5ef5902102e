// SPDX-License-Identifier: Apache-2.0
// Makes transport `p2p`: tests whether the ranks can write to each other's memory, and agrees on the result.
#include <fmt/format.h>

#include <thread>

#include "base/device_timeouts.hpp"
#include "base/failpoint.hpp"
#include "base/gpu.hpp"
#include "comm/collective.hpp"
#include "comm/device_peers.hpp"
#include "comm/p2p/p2p_transport.hpp"

namespace ringattn {

namespace {

[[noreturn]] void refuse(const MessageTemplate& why) {
  throw AgreedError(Error(ErrorCode::kUnsupported, "p2p can't join these ranks", why,
                          {"Use ", setting("transport", "nccl"), ", or leave it out."}));
}

// Every rank checks the same data, so all ranks throw the same error.
void check_peers(const std::vector<DevicePeer>& peers) {
  for (std::size_t i = 0; i < peers.size(); ++i) {
    if (peers[i].host != peers[0].host || peers[i].boot != peers[0].boot) {
      refuse(fmt::format("rank 0 is on {}, rank {} on another host, {}", peers[0].host, i, peers[i].host));
    }
    if (peers[i].gpu.empty()) refuse(fmt::format("rank {} has no GPU", i));
    for (std::size_t j = 0; j < i; ++j) {
      if (peers[i].gpu == peers[j].gpu && peers[i].process != peers[j].process) {
        refuse(fmt::format("ranks {} and {} are two processes on one GPU, {}", j, i, peers[i].gpu));
      }
    }
  }
}

// Tests that a stream of this device can write a counter and wait for it.
void probe_counters(const P2pSegment& segment, int rank, const CudaStream& stream, double seconds) {
  RankCounters& counters = segment.rank(rank);
  MemoryOperations operations = segment.operations();
  operations.write(counters.reached, 1);
  operations.wait(counters.reached, 1);
  operations.write(counters.reached, 0);
  operations.write(counters.passed, 1);
  operations.enqueue(stream.get());
  const Deadline deadline = DeviceTimeouts::for_probe(seconds);
  while (counters.passed.now() != 1) {
    if (deadline.expired()) {
      fail(ErrorCode::kUnsupported, "the GPU does not write to shared host memory",
           fmt::format("nothing arrived within {:g} s", deadline.seconds()),
           {"Use ", setting("transport", "nccl"), "."});
    }
    std::this_thread::yield();
  }
  counters.passed.value.store(0);
}

// Tests that each rank can write its number into the memory of all others.
void probe_memory(Bootstrap& control, P2pMemory& memory, const CudaStream& stream, const Deadline& deadline) {
  const int rank = control.rank();
  const int size = control.size();
  const auto bytes = static_cast<std::size_t>(size) * sizeof(int);
  const Collective collective(control, Timeouts::derived(deadline.seconds()));
  Buffer slots;
  std::string mine;
  collective.run_collectively([&] {
    slots = allocate_device(bytes, memory.device());
    check_cuda(cudaMemsetAsync(slots.data(), 0xff, bytes, stream.get()), "cudaMemsetAsync");
    await_stream(stream.get(), DeviceTimeouts::for_probe(deadline.seconds()));
    ExportedMemory exported;
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      exported = memory.export_to(peer, find_device_allocation(slots.data(), bytes));
    }
    mine.assign(reinterpret_cast<const char*>(&exported), sizeof exported);
  });
  const std::vector<std::string> all = control.all_gather(mine, deadline);
  std::vector<ExportedMemory> theirs(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) theirs[i] = gathered_value<ExportedMemory>(all[i]);
  collective.run_collectively([&] {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const ExportedMemory& exported = theirs[static_cast<std::size_t>(peer)];
      memory.import_from(peer, exported);
      std::byte* slot = memory.address(peer, exported.id, static_cast<std::uint64_t>(rank) * sizeof(int), sizeof(int));
      check_cuda(cudaMemcpyAsync(slot, &rank, sizeof rank, cudaMemcpyDefault, stream.get()), "cudaMemcpyAsync");
    }
    await_stream(stream.get(), DeviceTimeouts::for_probe(deadline.seconds()));
  });
  collective.run_collectively([&] {
    std::vector<int> found(static_cast<std::size_t>(size));
    check_cuda(cudaMemcpyAsync(found.data(), slots.data(), bytes, cudaMemcpyDefault, stream.get()), "cudaMemcpyAsync");
    await_stream(stream.get(), DeviceTimeouts::for_probe(deadline.seconds()));
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank || found[static_cast<std::size_t>(peer)] == peer) continue;
      fail(ErrorCode::kUnsupported, fmt::format("rank {} can't write to the GPU of rank {}", peer, rank),
           "what it wrote did not arrive", {"Use ", setting("transport", "nccl"), "."});
    }
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank) memory.close(peer, theirs[static_cast<std::size_t>(peer)].id);
    }
  });
  memory.closed_by(size, {theirs[static_cast<std::size_t>(rank)].id});
}

}  // namespace

std::unique_ptr<Transport> make_p2p_transport(std::unique_ptr<Transport> control, int device,
                                              const P2pOptions& options) {
  if (options.lanes < 1) {
    fail(ErrorCode::kUsage, "p2p can't work without lanes", fmt::format("{} were asked for", options.lanes),
         "Ask for one at least.");
  }
  const Collective collective(*control, Timeouts(options.setup_seconds));
  const Deadline deadline = collective.timeouts().for_peer();
  const std::vector<DevicePeer> peers = gather_device_peers(*control, device, deadline);
  check_peers(peers);
  failpoint("joining");
  try {
    collective.run_collectively(check_memory_operations);
    auto segment = std::make_unique<P2pSegment>(*control, deadline);
    auto memory = std::make_shared<P2pMemory>(control->rank(), device, peers);
    {
      const DeviceGuard guard(device);
      const CudaStream stream;
      collective.run_collectively([&] { probe_counters(*segment, control->rank(), stream, options.setup_seconds); });
      if (control->size() > 1) probe_memory(*control, *memory, stream, deadline);
    }
    return std::make_unique<P2pTransport>(std::move(control), std::move(segment), std::move(memory),
                                          name_device_peers(peers), options);
  } catch (const AgreedError& error) {
    refuse(error.message());
  }
}

}  // namespace ringattn
