// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/eviction.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/error.hpp"

namespace ringattn {

std::int64_t kept_tokens(std::int64_t tokens, double ratio) {
  if (!(ratio >= 0.0) || !(ratio < 1.0)) {
    fail(ErrorCode::kUsage, {setting("ratio", fmt::format("{}", ratio)), " of the tokens"},
         "the ratio is the fraction that is evicted, and at least one token is kept", "Use 0 to below 1.");
  }
  // The tolerance makes a ratio such as 0.9 keep one of 10 tokens, although 1 − 0.9 is inexact in binary.
  const auto kept = static_cast<std::int64_t>(std::floor(static_cast<double>(tokens) * (1.0 - ratio) + 1e-6));
  return std::clamp<std::int64_t>(kept, std::min<std::int64_t>(tokens, 1), tokens);
}

void check_queries(const Eviction& eviction, bool given, std::optional<std::size_t> sequence) {
  if (given || !eviction.method->needs_queries) return;
  if (sequence) {
    fail(ErrorCode::kUsage, fmt::format("{} of sequence {} without queries of it", eviction.method->name, *sequence),
         "it looks at the last ones of every sequence that has keys",
         "Give some of each, or choose a method that uses only keys: knorm or streaming.");
  }
  fail(ErrorCode::kUsage, fmt::format("{} without queries", eviction.method->name),
       "it looks at the last ones of a sequence",
       "Give q too, or choose a method that uses only keys: knorm or streaming.");
}

std::vector<double> token_scores(const Eviction& eviction, const ScoredTokens& of) {
  const auto& [method, options] = eviction;
  check_queries(eviction, of.queries.tokens > 0 || of.keys.tokens == 0);
  const std::int64_t tokens = of.keys.tokens;
  std::int64_t heads = of.keys.heads;
  std::vector<double> scores(static_cast<std::size_t>(tokens * heads));
  if (tokens == 0) return scores;
  method->score(of, scores);
  if (options.shared) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      const double* const own = scores.data() + t * heads;
      scores[static_cast<std::size_t>(t)] = std::accumulate(own, own + heads, 0.0) / static_cast<double>(heads);
    }
    heads = 1;
    scores.resize(static_cast<std::size_t>(tokens));
  }
  pool_scores(scores, heads, tokens - std::min(tokens, options.last), options.pool);
  return scores;
}

void pool_scores(std::span<double> scores, std::int64_t heads, std::int64_t count, int pool) {
  if (pool <= 1) return;
  const std::vector<double> plain(scores.begin(), scores.begin() + count * heads);
  const std::int64_t reach = pool / 2;
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t head = 0; head < heads; ++head) {
      double sum = 0.0;
      for (std::int64_t n = std::max<std::int64_t>(0, t - reach); n <= std::min(count - 1, t + reach); ++n) {
        sum += plain[static_cast<std::size_t>(n * heads + head)];
      }
      scores[static_cast<std::size_t>(t * heads + head)] = sum / pool;
    }
  }
}

std::vector<std::int32_t> best_tokens(std::string_view name, std::span<const double> scores, std::int64_t heads,
                                      std::int64_t kept, const EvictionOptions& options) {
  const std::int64_t tokens = static_cast<std::int64_t>(scores.size()) / heads;
  for (std::size_t at = 0; at < scores.size(); ++at) {
    if (!std::isnan(scores[at])) continue;
    fail(ErrorCode::kUsage,
         fmt::format("{} [{}, {}] is NaN", name, static_cast<std::int64_t>(at) / heads,
                     static_cast<std::int64_t>(at) % heads),
         "scores say which tokens are kept, and NaN is neither more nor less than another",
         "Check the keys and queries.");
  }
  const std::int64_t first = std::min({options.first, tokens, kept});
  const std::int64_t last = std::min({options.last, tokens - first, kept - first});
  std::vector<std::int32_t> all(static_cast<std::size_t>(kept * heads));
  std::vector<std::int32_t> order;
  for (std::int64_t head = 0; head < heads; ++head) {
    order.resize(static_cast<std::size_t>(tokens - first - last));
    std::iota(order.begin(), order.end(), static_cast<std::int32_t>(first));
    const auto better = [&](std::int32_t a, std::int32_t b) {
      const double x = scores[static_cast<std::size_t>(a * heads + head)];
      const double y = scores[static_cast<std::size_t>(b * heads + head)];
      return x != y ? x > y : a < b;
    };
    const auto chosen = order.begin() + (kept - first - last);
    std::nth_element(order.begin(), chosen, order.end(), better);
    order.erase(chosen, order.end());
    for (std::int64_t t = 0; t < first; ++t) order.push_back(static_cast<std::int32_t>(t));
    for (std::int64_t t = tokens - last; t < tokens; ++t) order.push_back(static_cast<std::int32_t>(t));
    std::ranges::sort(order);
    for (std::size_t i = 0; i < order.size(); ++i) {
      all[i * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head)] = order[i];
    }
  }
  return all;
}

std::vector<std::int32_t> choose_tokens(std::string_view name, const Eviction& eviction, const ScoredTokens& of,
                                        std::int64_t kept) {
  return best_tokens(name, token_scores(eviction, of), eviction.options.shared ? 1 : of.keys.heads, kept,
                     eviction.options);
}

void gather_tokens(const TensorView& from, std::span<const std::int32_t> positions, const MutableTensorView& to) {
  const auto row_bytes = static_cast<std::size_t>(from.dim) * size_of(from.dtype);
  const std::int64_t position_heads = to.tokens == 0 ? 1 : static_cast<std::int64_t>(positions.size()) / to.tokens;
  for (std::int64_t i = 0; i < to.tokens; ++i) {
    for (std::int64_t head = 0; head < from.heads; ++head) {
      const std::int64_t token =
          positions[static_cast<std::size_t>(i * position_heads + (position_heads == 1 ? 0 : head))];
      std::memcpy(to.at(i, head), from.at(token, head), row_bytes);
    }
  }
}

}  // namespace ringattn
