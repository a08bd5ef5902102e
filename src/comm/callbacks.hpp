// SPDX-License-Identifier: Apache-2.0
// A world that can meet, made of functions of the caller: of torch.distributed, of a scheduler, of a runtime of its
// own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn {

struct Callbacks {
  int rank = 0;
  int size = 1;
  // Every rank's bytes (a few KiB at most; lengths may differ), in order of rank. Collective. Should throw when
  // `seconds` have passed. What it throws ends the call that wanted it: an Error as it is, any other as kPeer with its
  // text.
  std::function<std::vector<std::string>(std::string_view bytes, double seconds)> all_gather;
  // Collective. Empty: an all-gather of nothing does.
  std::function<void(double seconds)> barrier;
};

// For make_tcp_transport() (comm/tcp/tcp.hpp), which calls them on the thread that it is called on, and not after it
// has returned. Throws kUsage for a rank outside of the world, or without an all_gather.
std::unique_ptr<Bootstrap> make_callback_bootstrap(Callbacks callbacks);

}  // namespace ringattn
