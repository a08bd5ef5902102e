// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/page_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/philox.hpp"

namespace ringattn {

namespace {

// A random number below `bound` <= 2^22. With 64 bits the bias of the remainder is negligible.
std::uint64_t below(std::uint64_t bound, std::uint64_t index, std::uint64_t seed) {
  constexpr std::uint32_t kPages = 0x70616765;  // a counter that synthetic inputs don't use
  const PhiloxWords words = philox4x32_10(
      {{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), kPages, 0xffffffffU}}, seed);
  return (std::uint64_t{words.word[0]} << 32 | words.word[1]) % bound;
}

// Sequences, ascending, that share their first pages.
struct Prefix {
  std::vector<std::size_t> sequences;
  std::int64_t pages = 0;
};

// Chooses shared prefixes. In lexicographic order of pages, sequences that share pages are adjacent. So the candidates
// are runs in this order, with the pages that all sequences of the run share, and runs are nested. A choice selects
// runs that become prefixes. A sequence uses the innermost selected run that contains it. It saves the tiles of that
// prefix, and each prefix costs its tiles once.
class PrefixChoice {
 public:
  PrefixChoice(const PageTable& table, const Batch& batch, int key_tile)
      : page_size_(table.page_size), key_tile_(key_tile), order_(table.sequences()) {
    std::vector<std::span<const std::int32_t>> pages;  // full pages of each sequence
    for (std::size_t s = 0; s < order_.size(); ++s) {
      pages.push_back(table.of(s).first(static_cast<std::size_t>(batch.sequences[s].k_len / page_size_)));
    }
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::ranges::stable_sort(
        order_, [&](std::size_t a, std::size_t b) { return std::ranges::lexicographical_compare(pages[a], pages[b]); });
    for (std::size_t i = 1; i < order_.size(); ++i) {
      const auto& a = pages[order_[i - 1]];
      const auto& b = pages[order_[i]];
      in_common_.push_back(std::ranges::mismatch(a, b).in1 - a.begin());
    }
  }

  // The chosen prefixes, in order of their first sequences.
  std::vector<Prefix> best() const {
    std::vector<Prefix> chosen;
    if (order_.size() < 2) return chosen;
    Run all = run_of(0, order_.size());
    std::vector<std::int64_t> outer{0};  // no prefix
    saved_tiles(all, outer);
    choose(all, 0, 1, -1, chosen);
    for (Prefix& prefix : chosen) std::ranges::sort(prefix.sequences);
    std::ranges::sort(chosen, {}, [](const Prefix& prefix) { return prefix.sequences.front(); });
    return chosen;
  }

 private:
  // Two or more sequences [begin, end) in page order.
  struct Run {
    std::size_t begin = 0, end = 0;
    std::int64_t pages = 0;          // shared by all
    std::vector<Run> parts;          // nested runs that share more pages, ascending
    std::size_t selected_below = 0;  // see saved_tiles()
  };

  Run run_of(std::size_t begin, std::size_t end) const {
    const auto of = std::span(in_common_).subspan(begin, end - begin - 1);
    Run run{begin, end, *std::ranges::min_element(of), {}};
    std::size_t from = begin;
    for (std::size_t to = begin + 1; to <= end; ++to) {
      if (to < end && in_common_[to - 1] != run.pages) continue;
      if (to - from > 1) run.parts.push_back(run_of(from, to));
      from = to;
    }
    return run;
  }

  // The maximum number of tiles that the sequences of a run save, minus the cost of prefixes inside of it, as a
  // function of the innermost selected run that contains it: entry i is for outer[i], the number of tiles of that
  // prefix. `outer` is ordered from the outermost run on, so ascending. The more tiles outer[i] has, the less a prefix
  // of this run gains: this run is selected if i < selected_below. A selected run has at least two sequences, because
  // for one sequence a prefix saves no more than it costs.
  std::vector<std::int64_t> saved_tiles(Run& run, std::vector<std::int64_t>& outer) const {
    const std::int64_t tiles = run.pages * page_size_ / key_tile_;
    outer.push_back(tiles);
    std::vector<std::int64_t> saved(outer.size(), 0);
    auto direct = static_cast<std::int64_t>(run.end - run.begin);
    for (Run& part : run.parts) {
      direct -= static_cast<std::int64_t>(part.end - part.begin);
      std::ranges::transform(saved, saved_tiles(part, outer), saved.begin(), std::plus());
    }
    for (std::size_t i = 0; i < outer.size(); ++i) saved[i] += direct * outer[i];
    const std::int64_t own = saved.back() - tiles;
    outer.pop_back();
    saved.pop_back();
    run.selected_below =
        static_cast<std::size_t>(std::ranges::find_if(saved, [&](std::int64_t n) { return n >= own; }) - saved.begin());
    for (std::int64_t& n : saved) n = std::max(n, own);
    return saved;
  }

  // `innermost`: index of the innermost selected run among the `depth` runs around this one. `prefix`: its index in
  // `chosen`, or −1.
  void choose(const Run& run, std::size_t innermost, std::size_t depth, std::ptrdiff_t prefix,
              std::vector<Prefix>& chosen) const {
    if (innermost < run.selected_below) {
      innermost = depth;
      prefix = static_cast<std::ptrdiff_t>(chosen.size());
      chosen.push_back({{}, run.pages});
    }
    std::size_t next = run.begin;
    const auto join_to = [&](std::size_t end) {
      for (; next < end; ++next) {
        if (prefix >= 0) chosen[static_cast<std::size_t>(prefix)].sequences.push_back(order_[next]);
      }
    };
    for (const Run& part : run.parts) {
      join_to(part.begin);
      choose(part, innermost, depth + 1, prefix, chosen);
      next = part.end;
    }
    join_to(run.end);
  }

  std::int64_t page_size_;
  int key_tile_;
  std::vector<std::size_t> order_;
  std::vector<std::int64_t> in_common_;  // number of pages that each sequence shares with the next in order
};

}  // namespace

std::span<const std::int32_t> PageTable::of(std::size_t sequence) const {
  const auto from = static_cast<std::size_t>(begin[sequence]);
  return {entries.data() + from, static_cast<std::size_t>(begin[sequence + 1]) - from};
}

std::vector<PackedRun> pool_runs(const PageTable& table, std::span<const std::int64_t> cu_k,
                                 std::span<const PackedRun> runs) {
  std::vector<PackedRun> placed;
  for (const PackedRun& run : runs) {
    auto sequence = static_cast<std::size_t>(std::upper_bound(cu_k.begin(), cu_k.end(), run.begin) - cu_k.begin() - 1);
    for (std::int64_t at = run.begin; at < run.end;) {
      while (at >= cu_k[sequence + 1]) ++sequence;  // skips empty sequences
      const std::int64_t token = at - cu_k[sequence];
      const std::int64_t in_page = token % table.page_size;
      const std::int64_t left = std::min(run.end, cu_k[sequence + 1]) - at;
      const std::int64_t tokens = std::min(table.page_size - in_page, left);
      const std::int64_t page = table.of(sequence)[static_cast<std::size_t>(token / table.page_size)];
      const std::int64_t begin = page * table.page_size + in_page;
      if (!placed.empty() && placed.back().end == begin) {
        placed.back().end += tokens;
      } else {
        placed.push_back({begin, begin + tokens});
      }
      at += tokens;
    }
  }
  return placed;
}

PageTable deal_pages(const Batch& batch, std::int64_t page_size, std::uint64_t seed, std::int64_t prefix) {
  PageTable table;
  table.page_size = page_size;
  std::int64_t entries = 0;
  for (const Sequence& sequence : batch.sequences) {
    entries += pages_of(sequence.k_len, page_size);
    if (entries > kMaxPageEntries) {
      fail(ErrorCode::kMemory, fmt::format("a cache of more than {} pages of {} tokens", kMaxPageEntries, page_size),
           "a block table has no more entries", {"Use larger pages with ", setting("page_size"), ", or fewer tokens."});
    }
    table.begin.push_back(entries);
  }
  // Number of pages that sequence s shares with sequence 0.
  const auto shared = [&](std::size_t s) {
    return s == 0 ? 0 : std::min({prefix, batch.sequences[0].k_len, batch.sequences[s].k_len}) / page_size;
  };
  table.pages = entries;
  for (std::size_t s = 0; s < table.sequences(); ++s) table.pages -= shared(s);
  std::vector<std::int32_t> order(static_cast<std::size_t>(table.pages));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t last = order.size(); last > 1; --last) {
    std::swap(order[last - 1], order[below(last, last, seed)]);
  }
  auto next = order.begin();
  for (std::size_t s = 0; s < table.sequences(); ++s) {
    table.entries.insert(table.entries.end(), order.begin(), order.begin() + shared(s));  // pages of sequence 0
    const std::int64_t own = table.begin[s + 1] - table.begin[s] - shared(s);
    table.entries.insert(table.entries.end(), next, next + own);
    next += own;
  }
  return table;
}

SharedPrefixPages shared_prefix_pages(const PageTable& table, const Batch& batch, int key_tile, std::size_t most) {
  const std::vector<Prefix> chosen = PrefixChoice(table, batch, key_tile).best();
  SharedPrefixPages found;
  for (const Prefix& prefix : chosen) {
    if (found.keys.size() == most) break;
    found.of_sequence.resize(table.sequences(), -1);
    for (const std::size_t s : prefix.sequences) found.of_sequence[s] = static_cast<std::int32_t>(found.keys.size());
    found.keys.push_back(static_cast<std::int32_t>(prefix.pages * table.page_size));
  }
  return found;
}

}  // namespace ringattn
