// SPDX-License-Identifier: Apache-2.0
// Which tokens of a pool of pages are quantized. A pool may have far more pages than its sequences hold. Memory and
// time depend only on the pages that they hold.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attention/tokens/packed_run.hpp"
#include "attention/tokens/page_table.hpp"

namespace ringattn {

// Tokens of a pool: the first tokens of each page, in an order of pages.
class PoolSlots {
 public:
  struct Page {
    std::int32_t number = 0;
    std::int32_t tokens = 0;

    auto operator<=>(const Page&) const = default;
  };

  PoolSlots(std::vector<Page> pages, std::int64_t page_size);

  std::int64_t tokens() const { return tokens_; }
  // Calls part(first, runs) for at most `most` tokens at a time, but at least a page. `runs`: tokens [first, first +
  // total_tokens(runs)) of this object, on the pool's axis.
  void for_each_part(std::int64_t most,
                     const std::function<void(std::int64_t first, std::span<const PackedRun> runs)>& part) const;

 private:
  std::vector<Page> pages_;
  std::int64_t page_size_;
  std::int64_t tokens_ = 0;
};

// The slot of the n-th token of these runs.
std::int64_t slot_at(std::span<const PackedRun> runs, std::int64_t n);

// Slots of the tokens that sequences hold, each once, ascending. `cu`: of keys, [sequences + 1]. `group`: takes only
// the tokens of each sequence's full groups of that many tokens; a page holds whole groups.
PoolSlots held_slots(const PageTable& table, std::span<const std::int64_t> cu, std::int64_t group = 1);

}  // namespace ringattn
