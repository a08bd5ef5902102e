// SPDX-License-Identifier: Apache-2.0
// A pulse that counts its signs, for tests that what takes long gives them.
#pragma once

#include <atomic>

#include "base/pulse.hpp"

namespace ringattn::testing {

class CountingPulse final : public Pulse {
 public:
  CountingPulse() : Pulse(0) {}

  int signs() const { return signs_; }

 private:
  void exchange() override { ++signs_; }

  std::atomic<int> signs_{0};
};

}  // namespace ringattn::testing
