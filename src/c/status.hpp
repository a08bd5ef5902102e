// SPDX-License-Identifier: Apache-2.0
// The border of the C interface: what is thrown inside becomes a status, and its words are kept for the thread. And
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

// Keeps the exception that is being handled as this thread's last failure. Called in a catch block.
ringattn_status keep_failure() noexcept;

// Whether this process was forked from one that had used the library. It has none of that one's threads, for which
// work would wait for ever, and half of its connections.
bool is_forked() noexcept;

// Notes that this process uses the library. Throws kUnsupported where is_forked().
void check_process();

// What a `destroy` function does. What a process has inherited belongs to the one that it was forked from.
template <class Object>
void destroy(Object* object) {
  if (!is_forked()) delete object;
}

// Runs `body`, and returns what became of it.
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

// Throws kUsage: a pointer that a function needs is null.
void need(const void* pointer, const char* name);

// Throws kUsage where a struct's size can't be that of any version: less than in the first, or more than here.
void check_size(const char* name, std::uint64_t size, std::size_t first, std::size_t now);

// A struct of the caller's, with the members that its header didn't have cleared. `first`: the struct's size in the
// first version that had it. Throws kUsage for null and for sizes that don't fit.
template <class Struct>
Struct read_struct(const char* name, const Struct* given, std::size_t first) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  need(given, name);
  check_size(name, given->size, first, sizeof(Struct));
  Struct whole{};
  std::memcpy(&whole, given, given->size);
  return whole;
}

// The other way: as much of `whole` as the caller's struct has room for.
template <class Struct>
void write_struct(const char* name, Struct whole, Struct* wanted, std::size_t first) {
  need(wanted, name);
  const std::uint64_t size = wanted->size;
  check_size(name, size, first, sizeof(Struct));
  whole.size = size;
  std::memcpy(wanted, &whole, size);
}

}  // namespace ringattn::c
