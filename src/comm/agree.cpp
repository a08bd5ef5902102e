// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "comm/transport.hpp"

namespace ringattn {

void agree(Bootstrap& world, const Error* error, const Deadline& deadline) {
  // One byte of code (0: no error), then the text.
  std::string mine(1, error == nullptr ? '\0' : static_cast<char>(error->code()));
  if (error != nullptr) mine += error->what();
  for (const std::string& theirs : world.all_gather(mine, deadline)) {
    if (theirs[0] != '\0') throw AgreedError(static_cast<ErrorCode>(theirs[0]), theirs.substr(1));
  }
}

}  // namespace ringattn
