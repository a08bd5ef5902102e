// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: device memory shared between ranks. A rank exports the allocations that it receives into and
// opens its peers' allocations: by CUDA IPC across processes, by plain pointers within one process.
//
// Every exported allocation is held here, so that it can't be freed while a peer has it mapped. Once it has no other
// owner, the next all-gather makes the peers close it and then frees it. Splits share their parent's memory.
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

// The description of an allocation that its owner sends to the ranks that push into it.
struct ExportedMemory {
  std::uint64_t id = 0;
  std::byte* base = nullptr;  // address in the exporting process
  std::size_t bytes = 0;
  int device = 0;  // CUDA index in the exporting process
  cudaIpcMemHandle_t handle{};
};

class P2pMemory {
 public:
  P2pMemory(int rank, int device, std::vector<DevicePeer> peers);
  // Closes and frees everything, unless leak() was called.
  ~P2pMemory();
  P2pMemory(const P2pMemory&) = delete;
  P2pMemory& operator=(const P2pMemory&) = delete;

  int device() const { return device_; }
  // Returns true if two of the ranks below `size` are threads of one process.
  bool any_share_a_process(int size) const;

  // Holds an allocation from now on, and returns its description for `peer`.
  ExportedMemory export_to(int peer, const std::shared_ptr<const DeviceAllocation>& allocation);
  // Opens a peer's allocation, unless it is already open.
  void import_from(int peer, const ExportedMemory& memory);
  // The local address of a range of a peer's allocation. Throws kInternal if the peer has not exported that range.
  std::byte* address(int peer, std::uint64_t id, std::uint64_t offset, std::uint64_t bytes) const;

  // Exported allocations without other owners.
  std::vector<std::uint64_t> dead() const;
  void close(int peer, std::uint64_t id);
  // The ranks below `size` have closed their mappings of `dead`.
  void closed_by(int size, const std::vector<std::uint64_t>& dead);

  bool exports_to_processes() const;
  // Closes all imported allocations.
  void close_all();
  // Keeps everything until the process ends.
  void leak();

 private:
  struct Export {
    std::shared_ptr<const DeviceAllocation> allocation;
    cudaIpcMemHandle_t handle{};
    std::set<int> exported_to;
  };
  struct Import {
    std::byte* base = nullptr;  // address in this process
    std::size_t bytes = 0;
    bool opened = false;  // by CUDA IPC
  };

  bool in_this_process(int peer) const;

  const int rank_;
  const int device_;
  const std::vector<DevicePeer> peers_;
  std::map<std::uint64_t, Export> exports_;                  // by allocation id
  std::map<std::pair<int, std::uint64_t>, Import> imports_;  // by (peer, allocation id)
};

}  // namespace ringattn
