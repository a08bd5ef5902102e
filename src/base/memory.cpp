// SPDX-License-Identifier: Apache-2.0
#include "base/memory.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <limits>

#include "base/error.hpp"

namespace ringattn {

Buffer allocate_host(std::size_t bytes) {
  constexpr std::size_t kAlignment = 4096;
  constexpr std::string_view kAdvice =
      "Use more hosts, fewer tokens, or a smaller --block; `ringattn plan` says what a rank needs.";
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    fail(ErrorCode::kMemory, fmt::format("can't allocate {} bytes", bytes), "more than the address space holds",
         kAdvice);
  }
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded));
  if (data == nullptr) {
    fail(ErrorCode::kMemory, fmt::format("can't allocate {} bytes of host memory", bytes),
         "the system has no more to give", kAdvice);
  }
  return {data, bytes, MemoryKind::kHost, [](std::byte* p) { std::free(p); }};
}

}  // namespace ringattn
