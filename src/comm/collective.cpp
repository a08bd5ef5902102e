// SPDX-License-Identifier: Apache-2.0
#include "comm/collective.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace ringattn {

namespace {

constexpr std::size_t kFragment = 2048;  // bytes of each rank that one all-gather carries

}  // namespace

std::vector<std::string> Collective::gather(std::string_view text) const {
  const std::vector<std::size_t> lengths = gather_values(text.size());
  const std::size_t longest = *std::ranges::max_element(lengths);
  std::vector<std::string> texts(static_cast<std::size_t>(size()));
  for (std::size_t at = 0; at < longest; at += kFragment) {
    const std::string_view fragment = at < text.size() ? text.substr(at, kFragment) : std::string_view();
    const std::vector<std::string> fragments = world_->all_gather(fragment, timeouts_.for_peer());
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      const std::size_t wanted = std::min(kFragment, lengths[rank] - std::min(at, lengths[rank]));
      if (fragments[rank].size() != wanted) {
        fail(ErrorCode::kPeer, "a rank sent another text than it had announced",
             fmt::format("{} bytes came from rank {}, and {} were to come", fragments[rank].size(), rank, wanted),
             "See whether all ranks run the same build.");
      }
      texts[rank] += fragments[rank];
    }
  }
  return texts;
}

}  // namespace ringattn
