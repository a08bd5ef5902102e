// SPDX-License-Identifier: Apache-2.0
// Makes one allocation of a thread fail, for tests of the state after a failure in the middle of a call. Programs that
// link it replace operator new.
#pragma once

#include <cstdint>

namespace ringattn::testing {

// Whether allocations can be made to fail: clang's thread sanitizer brings operator new itself.
bool can_make_memory_scarce();

// While it lives, the calling thread's allocation number `index`, from 0, throws std::bad_alloc; the others succeed.
class ScarceMemory {
 public:
  explicit ScarceMemory(std::int64_t index);
  ~ScarceMemory();
  static void end();  // before that: from here on all succeed
  ScarceMemory(const ScarceMemory&) = delete;
  ScarceMemory& operator=(const ScarceMemory&) = delete;
};

}  // namespace ringattn::testing
