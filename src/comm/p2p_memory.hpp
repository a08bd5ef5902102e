// SPDX-License-Identifier: Apache-2.0
// Inside transport `p2p`: how a rank describes its memory to others, and how they reach it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/cuda.hpp"
#include "comm/transport.hpp"

namespace ringattn {

// A place in a rank's device memory, as it travels.
struct P2pAddress {
  cudaIpcMemHandle_t handle{};   // of the allocation
  std::uint64_t allocation = 0;  // its number, never used again in its process
  std::uint64_t offset = 0;      // bytes from its begin
  std::uint64_t address = 0;     // in its own process
};

// What this rank lets others write to.
class P2pExports {
 public:
  explicit P2pExports(int device) : device_(device) {}

  // Throws kUsage for memory that can't be exported: not cudaMalloc's.
  P2pAddress describe(const std::byte* data, std::size_t bytes);

 private:
  struct Allocation {
    std::uint64_t number = 0;
    cudaIpcMemHandle_t handle{};
  };
  int device_;
  std::map<std::uintptr_t, Allocation> allocations_;  // by first byte
};

// What this rank has mapped of the others.
class P2pImports {
 public:
  explicit P2pImports(int device) : device_(device) {}
  ~P2pImports();
  P2pImports(const P2pImports&) = delete;
  P2pImports& operator=(const P2pImports&) = delete;

  // Where the place lies in this process; maps its allocation once. `neighbour`: the peer is a thread of this process.
  std::byte* resolve(int peer, bool neighbour, const P2pAddress& place);
  // Unmaps what `peer` has replaced by now: everything but the last allocation used. No push may be on its way.
  void release_old(int peer);

 private:
  struct Mapping {
    std::byte* base = nullptr;
    std::uint64_t last_use = 0;
  };
  int device_;
  std::uint64_t uses_ = 0;
  std::map<std::pair<int, std::uint64_t>, Mapping> mappings_;  // by peer and allocation
};

}  // namespace ringattn
