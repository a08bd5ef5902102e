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

// The error that a rank has reported, and whether its message is shown unchanged. Throws kPeer if the text is not an
// error. That is not an AgreedError, because other ranks may have received something else.
struct ReportedError {
  Error error;
  bool keep_message;
};

ReportedError read_reported_error(int rank, std::string_view text) {
  const char kind = text.empty() ? '\0' : text.front();
  if ((kind == 'p' || kind == 'n') && is_packed_error(text.substr(1))) {
    ReportedError reported{unpack_error(text.substr(1)), kind == 'p'};
    if (reported.error.location() != nullptr) return reported;
  }
  fail(ErrorCode::kPeer, fmt::format("rank {} failed and did not say how", rank), "its report is not an error",
       "See its own message, and whether all ranks run the same build.");
}

// Bounded like everything that a bootstrap gathers: an error may quote the contents of a file.
constexpr std::size_t kMaxReportBytes = 8192;

}  // namespace

void agree(Bootstrap& world, const Error* error, const Deadline& deadline) {
  // Ranks without an error contribute nothing, the others a hash that tells messages apart. Then only one rank sends
  // its text: if all of many ranks failed, each rank would otherwise receive as many texts.
  const std::string mark =
      error == nullptr ? std::string() : fmt::format("{:x}", std::hash<std::string_view>()(error->what()));
  const std::vector<std::string> failed = world.all_gather(mark, deadline);
  const auto first = std::ranges::find_if(failed, [](const std::string& theirs) { return !theirs.empty(); });
  if (first == failed.end()) return;
  const bool alike = std::ranges::count(failed, *first) == static_cast<std::ptrdiff_t>(failed.size());

  const auto rank = static_cast<int>(first - failed.begin());
  std::string mine;
  if (world.rank() == rank) {
    const bool located = error->location() != nullptr;  // some of the ranks have agreed on it before
    Error reported = *error;
    if (!located) reported.set_location({rank, host_name()});
    mine = ((located || alike ? 'p' : 'n') + pack_error(reported)).substr(0, kMaxReportBytes);
  }
  const std::vector<std::string> texts = world.all_gather(mine, deadline);
  const ReportedError reported = read_reported_error(rank, texts[static_cast<std::size_t>(rank)]);
  if (reported.keep_message) throw AgreedError(reported.error);
  const ErrorLocation& location = *reported.error.location();
  throw AgreedError(
      error_at_location(reported.error, location, fmt::format("rank {} on {}: ", location.rank, location.host)));
}

}  // namespace ringattn
