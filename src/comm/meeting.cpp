// SPDX-License-Identifier: Apache-2.0
#include "comm/meeting.hpp"

#include <algorithm>

namespace ringattn {

namespace {

constexpr std::size_t kPiece = 2048;  // what a bootstrap gathers at once

}  // namespace

std::vector<std::string> Meeting::gather(std::string_view text) const {
  std::size_t longest = 0;
  for (const std::size_t length : gather_values(text.size())) longest = std::max(longest, length);
  std::vector<std::string> texts(static_cast<std::size_t>(size()));
  for (std::size_t at = 0; at < longest; at += kPiece) {
    const std::string_view piece = at < text.size() ? text.substr(at, kPiece) : std::string_view();
    const std::vector<std::string> pieces = world_->all_gather(piece, patience_.for_peer());
    for (std::size_t rank = 0; rank < texts.size(); ++rank) texts[rank] += pieces[rank];
  }
  return texts;
}

}  // namespace ringattn
