// SPDX-License-Identifier: Apache-2.0
// Named ranges on the host's timeline for profilers that read NVTX, such as Nsight Systems. They are on if
// RINGATTN_RANGES is 1 and the build has CUDA, whose headers NVTX is part of.
#pragma once

#include <cstdint>

#include "base/environment.hpp"

namespace ringattn {

// The range that begins here ends with this object, on the same thread. While ranges are off it only reads a flag.
class NamedRange {
 public:
  // "ringattn.<op>.<call>"
  NamedRange(const char* op, const char* call) : on_(environment().ranges) {
    if (on_) begin(op, call);
  }
  // "ringattn.ring.<step> <block>"
  NamedRange(const char* step, std::int64_t block) : on_(environment().ranges) {
    if (on_) begin(step, block);
  }
  ~NamedRange() {
    if (on_) end();
  }
  NamedRange(const NamedRange&) = delete;
  NamedRange& operator=(const NamedRange&) = delete;

 private:
  static void begin(const char* op, const char* call);
  static void begin(const char* step, std::int64_t block);
  static void end();

  bool on_;
};

}  // namespace ringattn
