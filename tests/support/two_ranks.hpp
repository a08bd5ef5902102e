// SPDX-License-Identifier: Apache-2.0
// Two ranks of this process on its GPUs. They share a GPU if there is only one.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "comm/world.hpp"

namespace ringattn::testing {

// A world of two threads over a transport of device memory. An exception of either thread fails the test.
inline void in_two_ranks(const std::string& transport, const std::function<void(Transport&)>& rank_main) {
  WorldRequest request;
  request.transport = transport;
  request.memory = WantedMemory::kDevice;
  request.ranks = 2;
  std::string failure;
  run_world(
      request,
      [&](Transport& world) {
        rank_main(world);
        return 0;
      },
      [&](const Error& error) { failure = error.what(); });
  EXPECT_EQ(failure, "") << transport;
}

}  // namespace ringattn::testing
