// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: device memory across ranks. A rank exports the allocations that it receives into, and opens
// those of its peers: by CUDA IPC across processes, by plain pointers inside one.
//
// Every allocation that a peer was told of is held here, so that it can't go back to the device under a peer's mapping.
// Once nobody else holds it, the next all-gather lets the peers close it and then frees it. Splits share their parent's
// memory.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/gpu.hpp"
#include "comm/device_peers.hpp"

namespace ringattn {

// What a rank says of an allocation to those who push into it.
struct ExportedMemory {
  std::uint64_t id = 0;
  std::byte* base = nullptr;  // in the exporter
  std::size_t bytes = 0;
  int device = 0;  // in the exporter
  cudaIpcMemHandle_t handle{};
};

class P2pMemory {
 public:
  P2pMemory(int rank, int device, std::vector<DevicePeer> peers);
  // Closes and frees, unless told to leak.
  ~P2pMemory();
  P2pMemory(const P2pMemory&) = delete;
  P2pMemory& operator=(const P2pMemory&) = delete;

  int device() const { return device_; }
  // Whether two of the ranks below `size` are threads of one process.
  bool any_share_a_process(int size) const;

  // Holds an allocation from now on and describes it for `peer`.
  ExportedMemory export_to(int peer, const std::shared_ptr<const DeviceAllocation>& allocation);
  // Opens a peer's allocation, unless it is open.
  void import_from(int peer, const ExportedMemory& memory);
  // Where this process finds the bytes; throws kInternal where they are outside of what the peer has exported.
  std::byte* address(int peer, std::uint64_t id, std::uint64_t offset, std::uint64_t bytes) const;

  // Exported allocations that nobody else holds any more.
  std::vector<std::uint64_t> dead() const;
  void close(int peer, std::uint64_t id);
  // The ranks below `size` have closed their mappings of the dead.
  void closed_by(int size, const std::vector<std::uint64_t>& dead);

  bool exports_to_processes() const;
  // Closes all that was opened.
  void close_all();
  // Keeps everything for the life of the process.
  void leak();

 private:
  struct Export {
    std::shared_ptr<const DeviceAllocation> allocation;
    cudaIpcMemHandle_t handle{};
    std::set<int> told;
  };
  struct Import {
    std::byte* base = nullptr;  // here
    std::size_t bytes = 0;
    bool opened = false;  // by CUDA IPC
  };

  bool in_this_process(int peer) const;

  const int rank_;
  const int device_;
  const std::vector<DevicePeer> peers_;
  std::map<std::uint64_t, Export> exports_;                  // by id
  std::map<std::pair<int, std::uint64_t>, Import> imports_;  // by peer and id
};

}  // namespace ringattn
