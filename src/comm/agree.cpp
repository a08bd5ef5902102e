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

namespace {

// The error that a rank has told of, and whether its message stands for itself. Throws kPeer where the text is none:
// that is no agreement, as other ranks may have been told something else.
struct Told {
  Error error;
  bool as_it_is;
};

Told read_told(int rank, std::string_view text) {
  const char kind = text.empty() ? '\0' : text.front();
  if ((kind == 'p' || kind == 'n') && is_packed_error(text.substr(1))) {
    Told told{unpack_error(text.substr(1)), kind == 'p'};
    if (told.error.location() != nullptr) return told;
  }
  fail(ErrorCode::kPeer, fmt::format("rank {} failed and did not say how", rank), "what it told is no error",
       "See its own message, and whether all ranks run the same build.");
}

// Bounded, as what a bootstrap gathers is: an error may name what a file holds.
constexpr std::size_t kMaxToldBytes = 8192;

}  // namespace

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
    const bool located = error->location() != nullptr;  // agreed on by some of the ranks before
    Error told = *error;
    if (!located) told.set_location({rank, host_name()});
    mine = ((located || alike ? 'p' : 'n') + pack_error(told)).substr(0, kMaxToldBytes);
  }
  const std::vector<std::string> texts = world.all_gather(mine, deadline);
  const Told told = read_told(rank, texts[static_cast<std::size_t>(rank)]);
  if (told.as_it_is) throw AgreedError(told.error);
  const ErrorLocation& location = *told.error.location();
  throw AgreedError(
      error_at_location(told.error, location, fmt::format("rank {} on {}: ", location.rank, location.host)));
}

}  // namespace ringattn
