// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/reshard.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/exchange.hpp"

namespace ringattn {

Layout even_layout(std::span<const std::int64_t> lengths, int world) {
  std::vector<std::int64_t> cu{0};
  for (const std::int64_t length : lengths) cu.push_back(cu.back() + length);
  const std::int64_t tokens = cu.back();
  std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(world));
  std::size_t sequence = 0;
  for (int rank = 0; rank < world; ++rank) {
    // tokens · rank / world without overflow
    const auto cut = [&](int r) { return tokens / world * r + tokens % world * r / world; };
    const std::int64_t end = cut(rank + 1);
    for (std::int64_t token = cut(rank); token < end;) {
      while (cu[sequence + 1] <= token) ++sequence;
      const std::int64_t until = std::min(end, cu[sequence + 1]);
      runs[static_cast<std::size_t>(rank)].push_back(
          {static_cast<std::int32_t>(sequence), token - cu[sequence], until - cu[sequence]});
      token = until;
    }
  }
  return {lengths, std::move(runs)};
}

Layout widened(const Layout& layout, const Batch& batch, int world) {
  std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(world));
  for (int rank = 0; rank < layout.world(); ++rank) {
    runs[static_cast<std::size_t>(rank)].assign(layout.runs(rank).begin(), layout.runs(rank).end());
  }
  return {batch.q_lengths(), std::move(runs)};
}

std::vector<RowTransfer> row_transfers(const Layout& from, const Layout& to, int rank) {
  std::vector<RowTransfer> all;
  const auto owners = to.owners();
  auto there = owners.begin();
  for (const OwnedRun& here : from.owners()) {
    for (std::int64_t token = here.token; token < here.end();) {
      while (there->end() <= token) ++there;
      const std::int64_t until = std::min(here.end(), there->end());
      const RowTransfer rows{here.owner, there->owner, here.row + token - here.token, there->row + token - there->token,
                             until - token};
      token = until;
      if (rows.from != rank && rows.to != rank) continue;
      if (!all.empty()) {
        RowTransfer& last = all.back();
        if (last.from == rows.from && last.to == rows.to && last.from_row + last.rows == rows.from_row &&
            last.to_row + last.rows == rows.to_row) {
          last.rows += rows.rows;
          continue;
        }
      }
      all.push_back(rows);
    }
  }
  return all;
}

void reshard(Transport& world, const Layout& from, const Layout& to, const std::byte* rows, std::byte* target,
             std::int64_t token_bytes, const Deadline& deadline) {
  const int self = world.rank();
  OneRound results;
  for (const RowTransfer& moved : row_transfers(from, to, self)) {
    const auto bytes = static_cast<std::size_t>(moved.rows * token_bytes);
    const std::byte* source = rows + moved.from_row * token_bytes;
    std::byte* place = target + moved.to_row * token_bytes;
    if (moved.from == self && moved.to == self) {
      std::memcpy(place, source, bytes);
    } else if (moved.from == self) {
      results.send(moved.to, {source, bytes});
    } else {
      results.receive(moved.from, {place, bytes});
    }
  }
  world.wait(world.post(std::move(results).exchange("results for a comparison"), {}), {}, deadline);
}

}  // namespace ringattn
