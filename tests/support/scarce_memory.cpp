// SPDX-License-Identifier: Apache-2.0
#include "tests/support/scarce_memory.hpp"

#include <cstdlib>
#include <new>

// Allocations that the calling thread may still make before one of it fails; negative: none of it will.
static thread_local std::int64_t left_to_make = -1;

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define RINGATTN_NEW_IS_TAKEN
#endif
#endif
#ifndef RINGATTN_NEW_IS_TAKEN

static void* allocated(std::size_t bytes) {
  if (left_to_make >= 0 && left_to_make-- == 0) throw std::bad_alloc();
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void* operator new(std::size_t bytes) { return allocated(bytes); }
void* operator new[](std::size_t bytes) { return allocated(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace ringattn::testing {

bool can_make_memory_scarce() {
#ifdef RINGATTN_NEW_IS_TAKEN
  return false;
#else
  return true;
#endif
}

ScarceMemory::ScarceMemory(std::int64_t index) { left_to_make = index; }
ScarceMemory::~ScarceMemory() { end(); }
void ScarceMemory::end() { left_to_make = -1; }

}  // namespace ringattn::testing
