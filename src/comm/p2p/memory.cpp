// SPDX-License-Identifier: Apache-2.0
#include "comm/p2p/memory.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/cuda.hpp"
#include "base/error.hpp"

namespace ringattn {

P2pMemory::P2pMemory(int rank, int device, std::vector<DevicePeer> peers)
    : rank_(rank), device_(device), peers_(std::move(peers)) {}

P2pMemory::~P2pMemory() { close_all(); }

bool P2pMemory::in_this_process(int peer) const {
  return peers_[static_cast<std::size_t>(peer)].process == peers_[static_cast<std::size_t>(rank_)].process;
}

bool P2pMemory::any_share_a_process(int size) const {
  std::set<std::string> processes;
  for (int peer = 0; peer < size; ++peer) {
    if (!processes.insert(peers_[static_cast<std::size_t>(peer)].process).second) return true;
  }
  return false;
}

ExportedMemory P2pMemory::export_to(int peer, const std::shared_ptr<const DeviceAllocation>& allocation) {
  Export& entry = exports_[allocation->id];
  if (entry.allocation == nullptr) entry.allocation = allocation;
  if (!in_this_process(peer) && std::none_of(entry.exported_to.begin(), entry.exported_to.end(),
                                             [this](int other) { return !in_this_process(other); })) {
    const DeviceGuard guard(device_);
    check_cuda(cudaIpcGetMemHandle(&entry.handle, allocation->base), "cudaIpcGetMemHandle");
  }
  entry.exported_to.insert(peer);
  return {allocation->id, allocation->base, allocation->bytes, allocation->device, entry.handle};
}

void P2pMemory::import_from(int peer, const ExportedMemory& memory) {
  if (imports_.contains({peer, memory.id})) return;
  const DeviceGuard guard(device_);
  Import entry{memory.base, memory.bytes, false};
  if (!in_this_process(peer)) {
    void* base = nullptr;
    check_cuda(cudaIpcOpenMemHandle(&base, memory.handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    entry = {static_cast<std::byte*>(base), memory.bytes, true};
  } else if (memory.device != device_) {
    const cudaError_t result = cudaDeviceEnablePeerAccess(memory.device, 0);
    if (result == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
    } else {
      check_cuda(result, "cudaDeviceEnablePeerAccess");
    }
  }
  imports_[{peer, memory.id}] = entry;
}

std::byte* P2pMemory::address(int peer, std::uint64_t id, std::uint64_t offset, std::uint64_t bytes) const {
  const auto found = imports_.find({peer, id});
  if (found == imports_.end() || offset > found->second.bytes || bytes > found->second.bytes - offset) {
    fail(ErrorCode::kInternal, fmt::format("rank {} can't push to rank {}", rank_, peer),
         fmt::format("{} bytes at {} of allocation {} are not exported", bytes, offset, id));
  }
  return found->second.base + offset;
}

std::vector<std::uint64_t> P2pMemory::dead() const {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, entry] : exports_) {
    if (entry.allocation.use_count() == 1) ids.push_back(id);
  }
  return ids;
}

void P2pMemory::close(int peer, std::uint64_t id) {
  const auto found = imports_.find({peer, id});
  if (found == imports_.end()) return;
  if (found->second.opened) {
    const DeviceGuard guard(device_);
    cudaIpcCloseMemHandle(found->second.base);
  }
  imports_.erase(found);
}

void P2pMemory::closed_by(int size, const std::vector<std::uint64_t>& dead) {
  for (const std::uint64_t id : dead) {
    const auto found = exports_.find(id);
    if (found == exports_.end()) continue;
    std::set<int>& exported_to = found->second.exported_to;
    exported_to.erase(exported_to.begin(), exported_to.lower_bound(size));
    if (exported_to.empty()) exports_.erase(found);
  }
}

bool P2pMemory::exports_to_processes() const {
  return std::any_of(exports_.begin(), exports_.end(), [this](const auto& entry) {
    const std::set<int>& exported_to = entry.second.exported_to;
    return std::any_of(exported_to.begin(), exported_to.end(), [this](int peer) { return !in_this_process(peer); });
  });
}

void P2pMemory::close_all() {
  for (const auto& [key, entry] : imports_) {
    if (entry.opened) cudaIpcCloseMemHandle(entry.base);
  }
  imports_.clear();
}

void P2pMemory::leak() {
  imports_.clear();
  static_cast<void>(new auto(std::move(exports_)));
  exports_.clear();
}

}  // namespace ringattn
