// SPDX-License-Identifier: Apache-2.0
// Error handling of the C API: converts exceptions to a status and keeps their text for the thread. Reads and writes
// structs of callers that were compiled with other versions of the header.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "c/ringattn.h"

namespace ringattn::c {

// Stores the exception that is being handled as this thread's last failure. Called in a catch block.
ringattn_status keep_failure() noexcept;

// True if this process was forked from one that had used the library. Such a process lacks the library's threads, so
// work would never end, and shares its connections.
bool is_forked() noexcept;

// Records that this process uses the library. Throws kUnsupported if is_forked().
void check_process();

// Implements `destroy` functions. Objects inherited by fork() are not destroyed; they belong to the parent.
template <class Object>
void destroy(Object* object) {
  if (!is_forked()) delete object;
}

// Runs `body`. Converts exceptions to a status.
template <class Body>
ringattn_status guarded(const Body& body) noexcept {
  try {
    check_process();
    begin_interruptible();
    body();
    return RINGATTN_OK;
  } catch (...) {
    return keep_failure();
  }
}

// Throws kUsage if a required pointer is null.
void need(const void* pointer, const char* name);

// Throws kUsage if a struct's size is smaller than in its first version or larger than in this one.
void check_size(const char* name, std::uint64_t size, std::size_t first, std::size_t now);

// Copies a struct of the caller, and clears members that its header lacks. `first`: size of the struct in its first
// version. Throws kUsage for null and invalid sizes.
template <class Struct>
Struct read_struct(const char* name, const Struct* given, std::size_t first) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  need(given, name);
  check_size(name, given->size, first, sizeof(Struct));
  Struct whole{};
  std::memcpy(&whole, given, given->size);
  return whole;
}

// Copies the members of `whole` that the caller's header has.
template <class Struct>
void write_struct(const char* name, Struct whole, Struct* wanted, std::size_t first) {
  need(wanted, name);
  const std::uint64_t size = wanted->size;
  check_size(name, size, first, sizeof(Struct));
  whole.size = size;
  std::memcpy(wanted, &whole, size);
}

}  // namespace ringattn::c
