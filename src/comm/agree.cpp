// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include "comm/transport.hpp"

namespace ringattn {

void agree(Bootstrap& world, const Error* error, const Deadline& deadline) {
  const std::vector<std::string> failed = world.all_gather(error == nullptr ? "" : "!", deadline);
  const auto first = std::ranges::find_if(failed, [](const std::string& mark) { return !mark.empty(); });
  if (first == failed.end()) return;
  // The text of one: where all of many ranks fail, theirs would be as many for each of them.
  const auto rank = static_cast<int>(first - failed.begin());
  const bool speaks = error != nullptr && world.rank() == rank;
  const std::string text =
      world.all_gather(speaks ? pack_error(*error) : std::string(), deadline)[first - failed.begin()];
  throw AgreedError(unpack_error(text), rank);
}

}  // namespace ringattn
