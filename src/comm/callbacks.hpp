// SPDX-License-Identifier: Apache-2.0
// A bootstrap made of the caller's functions: of torch.distributed, of a scheduler, or of the caller's own runtime.
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
  // Returns every rank's bytes (a few KiB at most, lengths may differ) in rank order. Collective. Should throw when
  // `seconds` have passed. Its exceptions end the call that needed it: an Error passes unchanged, any other exception
  // becomes kPeer with its text.
  std::function<std::vector<std::string>(std::string_view bytes, double seconds)> all_gather;
  // Collective. If empty, an all-gather of empty texts is used.
  std::function<void(double seconds)> barrier;
};

// For make_tcp_transport() (comm/tcp/tcp.hpp). It calls the functions on the thread that calls it, and not after it has
// returned. Throws kUsage for a rank outside the world, or without an all_gather.
std::unique_ptr<Bootstrap> make_callback_bootstrap(Callbacks callbacks);

}  // namespace ringattn
