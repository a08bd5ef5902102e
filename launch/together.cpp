// SPDX-License-Identifier: Apache-2.0
#include "launch/together.hpp"

#include <algorithm>

namespace ringattn {

namespace {

constexpr std::size_t kPiece = 2048;  // what a bootstrap gathers at once

}  // namespace

std::vector<std::string> gather_texts(Bootstrap& world, std::string_view text, double timeout) {
  std::size_t longest = 0;
  for (const std::size_t length : gather_values(world, text.size(), timeout)) longest = std::max(longest, length);
  std::vector<std::string> texts(static_cast<std::size_t>(world.size()));
  for (std::size_t at = 0; at < longest; at += kPiece) {
    const std::string_view piece = at < text.size() ? text.substr(at, kPiece) : std::string_view();
    const std::vector<std::string> pieces = world.all_gather(piece, Deadline::after(timeout));
    for (std::size_t rank = 0; rank < texts.size(); ++rank) texts[rank] += pieces[rank];
  }
  return texts;
}

}  // namespace ringattn
