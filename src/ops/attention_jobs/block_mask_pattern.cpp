// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/block_mask_pattern.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/size.hpp"
#include "kernels/attention/top_k_selection.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kMaxNamed = std::size_t{1} << 16;  // columns or diagonals

[[noreturn]] void refuse(std::string_view part, const std::string& why) {
  fail(ErrorCode::kUsage, fmt::format("the block mask \"{}\" is not valid", part), why,
       "Patterns are, for example, window:4k+global:128, vertical:0,900+slash:0,64, strided:512, bigbird:256,128,3 and "
       "topk:16; a file's name ends in .safetensors.");
}

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

// One part: its word and its numbers.
struct PatternPart {
  std::string_view text;
  std::string_view word;
  std::vector<std::string_view> values;

  explicit PatternPart(std::string_view whole) : text(whole), word(whole.substr(0, whole.find(':'))) {
    if (word.size() < whole.size()) values = split(whole.substr(word.size() + 1), ',');
  }
  void expect(std::size_t least, std::size_t most) const {
    if (values.size() >= least && values.size() <= most) return;
    refuse(text, least == most ? fmt::format("{} takes {}", word, counted(least, "value"))
                               : fmt::format("{} takes {} to {} values", word, least, most));
  }
  std::int64_t number(std::size_t index, std::int64_t least = 0) const {
    const std::optional<std::int64_t> value = parse_size(values[index]);
    if (!value || *value < least || *value > kMaxMaskTokens) {
      refuse(text, fmt::format("\"{}\" is not a number from {} to {}", values[index], least, kMaxMaskTokens));
    }
    return *value;
  }
  std::uint64_t seed(std::size_t index) const {
    std::uint64_t value = 0;
    if (index >= values.size()) return 0;
    const std::string_view digits = values[index];
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size()) {
      refuse(text, fmt::format("\"{}\" is not a seed", digits));
    }
    return value;
  }
};

// A parsed pattern.
struct Pattern {
  BlockMaskShape shape{kDefaultMaskBlock, kDefaultMaskBlock, 0};
  std::vector<PatternPart> parts;
  std::optional<int> top_k;
};

Pattern parse(std::string_view text, const AttentionSpec& spec) {
  Pattern pattern;
  bool block = false;
  for (const std::string_view whole : split(text, '+')) {
    const PatternPart part(whole);
    if (part.word == "block") {
      part.expect(1, 2);
      if (std::exchange(block, true)) refuse(whole, "blocks are named twice");
      pattern.shape.query_block = static_cast<int>(part.number(0, 1));
      pattern.shape.key_block = static_cast<int>(part.number(part.values.size() - 1, 1));
    } else if (part.word == "heads") {
      part.expect(1, 1);
      if (pattern.shape.heads != 0) refuse(whole, "heads are named twice");
      const std::string_view which = part.values[0];
      pattern.shape.heads = which == "all" ? 1 : which == "kv" ? spec.kv_heads : which == "each" ? spec.heads : 0;
      if (pattern.shape.heads == 0) refuse(whole, "heads are all, kv or each");
    } else if (part.word == "topk") {
      part.expect(1, 1);
      if (pattern.top_k) refuse(whole, "topk is given twice");
      pattern.top_k = static_cast<int>(part.number(0, 1));
    } else {
      pattern.parts.push_back(part);
    }
  }
  if (pattern.shape.heads == 0) pattern.shape.heads = pattern.top_k ? spec.kv_heads : 1;
  return pattern;
}

BlockMaskPattern maker_of(const PatternPart& part, const BlockMaskShape& shape, const Mask& mask) {
  const auto random = [&](std::size_t index) {
    return random_blocks(shape, mask, static_cast<int>(part.number(index)), part.seed(index + 1));
  };
  if (part.word == "all") {
    part.expect(0, 0);
    return all_blocks();
  }
  if (part.word == "window") {
    part.expect(1, 1);
    return window_blocks(shape, part.number(0));
  }
  if (part.word == "global") {
    part.expect(1, 1);
    return global_blocks(shape, part.number(0));
  }
  if (part.word == "vertical" || part.word == "slash") {
    part.expect(1, kMaxNamed);
    VerticalSlash all;
    std::vector<std::int64_t>& named = part.word == "vertical" ? all.verticals : all.slashes;
    for (std::size_t i = 0; i < part.values.size(); ++i) named.push_back(part.number(i));
    return vertical_slash_blocks(shape, std::vector<VerticalSlash>(static_cast<std::size_t>(shape.heads), all));
  }
  if (part.word == "strided") {
    part.expect(1, 1);
    return strided_blocks(shape, part.number(0, 1));
  }
  if (part.word == "random") {
    part.expect(1, 2);
    return random(0);
  }
  if (part.word == "bigbird") {
    part.expect(3, 4);
    return union_of_patterns({window_blocks(shape, part.number(0)), global_blocks(shape, part.number(1)), random(2)});
  }
  constexpr std::string_view kWords[] = {"all",   "block",   "bigbird", "global",   "heads", "random",
                                         "slash", "strided", "topk",    "vertical", "window"};
  const std::string nearest = nearest_name(part.word, kWords, std::size(kWords));
  refuse(part.text, nearest.empty() ? "there is no such pattern" : fmt::format("did you mean {}?", nearest));
}

}  // namespace

BlockMask block_mask_from_pattern(std::string_view text, const Job& job, const TopKBlocks& best,
                                  const BlockMaskBudget& budget) {
  const Pattern pattern = parse(text, job.spec);
  std::vector<BlockMaskPattern> makers;
  for (const PatternPart& part : pattern.parts) makers.push_back(maker_of(part, pattern.shape, job.spec.mask));
  if (makers.empty() && !pattern.top_k) refuse(text, "it has no pattern of key blocks");
  if (!pattern.top_k)
    return make_block_mask(pattern.shape, masked_sequences(job.batch), union_of_patterns(std::move(makers)), budget);
  AttentionSpec spec = job.spec;
  spec.block_mask = pattern.shape;
  check_top_k(spec, masked_sequences(job.batch), *pattern.top_k, budget);
  BlockMask chosen = best(spec, *pattern.top_k);
  if (makers.empty()) return chosen;
  makers.push_back([&chosen](const BlockMaskRow& mask_row, std::vector<std::int32_t>& blocks) {
    const auto list = chosen.row(mask_row.sequence, mask_row.head, mask_row.block);
    blocks.insert(blocks.end(), list.begin(), list.end());
  });
  return make_block_mask(pattern.shape, masked_sequences(job.batch), union_of_patterns(std::move(makers)), budget);
}

}  // namespace ringattn
