// SPDX-License-Identifier: Apache-2.0
#include "base/memory.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>

#include "base/error.hpp"
#include "base/host.hpp"

namespace ringattn {

namespace {

std::atomic<bool> host_memory_kept{false};
std::atomic<std::size_t> allocated{0};  // bytes of live buffers

// Reserves bytes that are about to be allocated, or returns false if all buffers together would not fit this host. The
// system itself would report that only on the first write, by killing the process.
bool fit(std::size_t bytes) {
  static const std::size_t usable = usable_bytes();
  if (bytes > usable || allocated.fetch_add(bytes) > usable - bytes) {
    if (bytes <= usable) allocated -= bytes;
    return false;
  }
  return true;
}

// The rows of one head lie far apart in caches and shards, so with small pages every few rows need another TLB entry.
// Most systems use pages of 2 MiB only on request. If the system refuses, memory is only slower to read.
void ask_for_huge_pages([[maybe_unused]] std::byte* data, [[maybe_unused]] std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  // A buffer of twice the size contains a whole huge page, wherever it begins.
  if (bytes >= 2 * kHugePage) static_cast<void>(madvise(data, bytes, MADV_HUGEPAGE));
#endif
}

MessageTemplate how_to_need_less() {
  return {"Use more hosts or fewer tokens, for attention also a smaller ", setting("block"), "; ", command("plan"),
          " says what a rank needs."};
}

}  // namespace

Buffer allocate_host(std::size_t bytes) {
  constexpr std::size_t kAlignment = 4096;
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    fail(ErrorCode::kMemory, fmt::format("can't allocate {} bytes", bytes), "more than the address space holds",
         how_to_need_less());
  }
  const std::size_t rounded = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (!fit(rounded)) {
    fail(ErrorCode::kMemory, fmt::format("can't allocate {} bytes of host memory", bytes),
         fmt::format("with what this process holds already it is more than the {} that it may use", usable_bytes()),
         how_to_need_less());
  }
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  if (data == nullptr) {
    allocated -= rounded;
    fail(ErrorCode::kMemory, fmt::format("can't allocate {} bytes of host memory", bytes),
         "the system has no more to give", how_to_need_less());
  }
  ask_for_huge_pages(data, rounded);
  return {data, bytes, MemoryKind::kHost, [rounded](std::byte* p) {
            if (host_memory_kept) return;
            std::free(p);
            allocated -= rounded;
          }};
}

void keep_host_memory() noexcept { host_memory_kept = true; }

}  // namespace ringattn
