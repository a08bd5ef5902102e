// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <optional>
#include <string>
#include <vector>

#include "base/host.hpp"
#include "comm/failure.hpp"
#include "comm/transport.hpp"

namespace ringattn {

void agree(Bootstrap& world, const Error* error, const Deadline& deadline) {
  std::string mine;  // nothing from ranks without an error
  if (error != nullptr) {
    const bool placed = error->place() != nullptr;  // agreed on by some of the ranks before
    Error told = *error;
    if (!placed) told.set_place({world.rank(), host_name()});
    mine = (placed ? 'p' : 'n') + pack_error(told);
  }
  const std::vector<std::string> all = world.all_gather(mine, deadline);
  std::optional<Error> first;
  bool placed = false;
  bool alike = true;
  for (const std::string& theirs : all) {
    const std::optional<Error> other =
        theirs.empty() ? std::nullopt : std::optional(unpack_error(std::string_view(theirs).substr(1)));
    if (other && !first) {
      first = other;
      placed = theirs.front() == 'p';
    }
    alike = alike && other && other->message() == first->message();
  }
  if (!first) return;
  if (placed || alike) throw AgreedError(*first);
  const ErrorPlace& place = *first->place();
  throw AgreedError(placed_error(*first, place, fmt::format("rank {} on {}: ", place.rank, place.host)));
}

}  // namespace ringattn
