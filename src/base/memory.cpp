// SPDX-License-Identifier: Apache-2.0
#include "base/memory.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <limits>

#include "base/error.hpp"

namespace ringattn {

namespace {

std::atomic<bool> kept{false};

Wording how_to_need_less() {
  return {"Use more hosts, fewer tokens, or a smaller ", setting("block"), "; ", command("plan"),
          " says what a rank needs."};
}

}  // namespace

Buffer allocate_host(std::size_t bytes) {
  constexpr std::size_t kAlignment = 4096;
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    fail(ErrorCode::kMemory, fmt::format("can't allocate {} bytes", bytes), "more than the address space holds",
         how_to_need_less());
  }
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded));
  if (data == nullptr) {
    fail(ErrorCode::kMemory, fmt::format("can't allocate {} bytes of host memory", bytes),
         "the system has no more to give", how_to_need_less());
  }
  return {data, bytes, MemoryKind::kHost, [](std::byte* p) {
            if (!kept) std::free(p);
          }};
}

void keep_host_memory() noexcept { kept = true; }

}  // namespace ringattn
