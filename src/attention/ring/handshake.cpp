// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/handshake.hpp"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "base/error.hpp"

namespace ringattn {

std::uint64_t handshake(const Collective& collective, const std::vector<RankConfigEntry>& mine) {
  std::string text;
  for (const RankConfigEntry& identity : mine) text += identity.value + '\n';
  const std::vector<std::string> theirs = collective.gather(text);
  for (std::size_t rank = 1; rank < theirs.size(); ++rank) {
    std::size_t at = 0;
    std::size_t at_zero = 0;
    for (const RankConfigEntry& identity : mine) {
      const std::size_t end = theirs[rank].find('\n', at);
      const std::size_t end_zero = theirs[0].find('\n', at_zero);
      const std::string value = theirs[rank].substr(at, end - at);
      const std::string value_zero = theirs[0].substr(at_zero, end_zero - at_zero);
      if (value != value_zero) {
        // All ranks compare the same table, so all throw the same error.
        const MessageTemplate suggestion =
            identity.suggestion.empty()
                ? MessageTemplate{"Start the same program with the same job on the same model of machine; forcing one ",
                                  setting("kernel"), " may help."}
                : identity.suggestion;
        throw AgreedError(Error(ErrorCode::kUnsupported,
                                fmt::format("rank {} and rank 0 differ in {}", rank, identity.what),
                                fmt::format("{} against {}", value, value_zero), suggestion));
      }
      at = end + 1;
      at_zero = end_zero + 1;
    }
  }
  return XXH3_64bits(text.data(), text.size());
}

void begin_run(const Collective& collective, std::uint64_t hash, const std::string& job,
               const std::function<void()>& check) {
  std::optional<Error> error;
  try {
    check();
  } catch (...) {
    error = as_error(std::current_exception());
  }
  struct Mine {
    std::uint64_t hash;
    std::uint64_t failed;
  };
  const std::vector<Mine> all = collective.gather_values(Mine{hash, error ? 1U : 0U});
  if (std::ranges::any_of(all, [](const Mine& theirs) { return theirs.failed != 0; })) {
    agree(collective.world(), error ? &*error : nullptr, collective.timeouts().for_peer());
  }
  const auto other = std::ranges::find_if(all, [&](const Mine& theirs) { return theirs.hash != all.front().hash; });
  if (other == all.end()) return;
  const auto rank = static_cast<std::size_t>(other - all.begin());
  const std::vector<std::string> jobs = collective.gather(job);
  throw AgreedError(
      Error(ErrorCode::kUsage, fmt::format("rank {} and rank 0 run different jobs", rank),
            fmt::format("{} against {}", jobs[rank], jobs[0]),
            "Make the same calls in the same order on all ranks, and call backward() of their results in one order."));
}

}  // namespace ringattn
