// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn {

void agree(Bootstrap& world, const Error* error, const Deadline& deadline) {
  // One byte of code (0: no error), then the text.
  std::string mine(1, error == nullptr ? '\0' : static_cast<char>(error->code()));
  if (error != nullptr) mine += error->what();
  const std::vector<std::string> all = world.all_gather(mine, deadline);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::string& theirs = all[rank];
    if (theirs[0] == '\0') continue;
    throw AgreedError(static_cast<ErrorCode>(theirs[0]), theirs.substr(1), static_cast<int>(rank));
  }
}

}  // namespace ringattn
