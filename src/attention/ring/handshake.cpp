// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/handshake.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace ringattn {

void handshake(const Collective& collective, const std::vector<RankConfigEntry>& mine) {
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
        throw AgreedError(Error(ErrorCode::kUnsupported,
                                fmt::format("rank {} and rank 0 differ in {}", rank, identity.what),
                                fmt::format("{} against {}", value, value_zero),
                                {"Start the same program with the same job on the same model of machine; forcing one ",
                                 setting("kernel"), " may help."}));
      }
      at = end + 1;
      at_zero = end_zero + 1;
    }
  }
}

}  // namespace ringattn
