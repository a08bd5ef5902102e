// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn {

void agree(Bootstrap& world, const Error* error, const Deadline& deadline) {
  // Nothing from ranks without an error.
  const std::string mine = error == nullptr ? std::string() : pack_error(*error);
  const std::vector<std::string> all = world.all_gather(mine, deadline);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) throw AgreedError(unpack_error(all[rank]), static_cast<int>(rank));
  }
}

}  // namespace ringattn
