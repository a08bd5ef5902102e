// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/host.hpp"
#include "comm/failure.hpp"
#include "comm/transport.hpp"

namespace ringattn {

void agree(Bootstrap& world, const Error* error, const Deadline& deadline) {
  // Nothing from ranks without an error, and of the others what tells messages apart. The text then comes from one:
  // where all of many ranks fail, theirs would be as many for each of them.
  const std::string mark =
      error == nullptr ? std::string() : fmt::format("{:x}", std::hash<std::string_view>()(error->what()));
  const std::vector<std::string> failed = world.all_gather(mark, deadline);
  const auto first = std::ranges::find_if(failed, [](const std::string& theirs) { return !theirs.empty(); });
  if (first == failed.end()) return;
  const bool alike = std::ranges::count(failed, *first) == static_cast<std::ptrdiff_t>(failed.size());

  const auto rank = static_cast<int>(first - failed.begin());
  std::string mine;
  if (world.rank() == rank) {
    const bool placed = error->place() != nullptr;  // agreed on by some of the ranks before
    Error told = *error;
    if (!placed) told.set_place({rank, host_name()});
    mine = (placed || alike ? 'p' : 'n') + pack_error(told);
  }
  const std::vector<std::string> texts = world.all_gather(mine, deadline);
  const std::string& text = texts[static_cast<std::size_t>(rank)];
  const Error agreed = unpack_error(std::string_view(text).substr(1));
  if (text.front() == 'p') throw AgreedError(agreed);
  const ErrorPlace& place = *agreed.place();
  throw AgreedError(placed_error(agreed, place, fmt::format("rank {} on {}: ", place.rank, place.host)));
}

}  // namespace ringattn
