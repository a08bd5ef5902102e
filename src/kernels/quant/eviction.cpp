// SPDX-License-Identifier: Apache-2.0
#include "kernels/quant/eviction.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"

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

// The scorers of eviction, and the methods that a user can name.

namespace {

[[maybe_unused]] constexpr std::int64_t kItemTokens = 256;  // per work item

// Converts one head's row to fp32.
void widen(const TensorView& rows, std::int64_t token, std::int64_t head, float* wide) {
  const std::byte* at = rows.at(token, head);
  for (std::int64_t i = 0; i < rows.dim; ++i, at += size_of(rows.dtype)) wide[i] = load_element(at, rows.dtype);
}

// Dot product with sixteen partial sums, added in a fixed order.
float dot(const float* a, const float* b, std::int64_t count) {
  constexpr std::int64_t kSums = 16;
  float sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (std::int64_t j = 0; j < kSums; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (std::int64_t j = 0; i < count; ++i, ++j) sums[j] += a[i] * b[i];
  for (std::int64_t half = kSums / 2; half > 0; half /= 2) {
    for (std::int64_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

// Scaled and capped scores of one query head's window: [tokens, window].
std::vector<float> window_scores(const ScoredTokens& of, std::int64_t head) {
  const std::int64_t window = of.queries.tokens;
  const std::int64_t dim = of.keys.dim;
  const std::int64_t kv_head = head / (of.queries.heads / of.keys.heads);
  std::vector<float> queries(static_cast<std::size_t>(window * dim));
  for (std::int64_t w = 0; w < window; ++w) widen(of.queries, w, head, queries.data() + w * dim);
  std::vector<float> scores(static_cast<std::size_t>(of.keys.tokens * window));
#pragma omp parallel num_threads(of.threads)
  {
    std::vector<float> key(static_cast<std::size_t>(dim));
#pragma omp for schedule(static, kItemTokens)
    for (std::int64_t t = 0; t < of.keys.tokens; ++t) {
      widen(of.keys, t, kv_head, key.data());
      for (std::int64_t w = 0; w < window; ++w) {
        float score = dot(queries.data() + w * dim, key.data(), dim) * of.softmax_scale;
        if (of.softcap > 0.0F) score = of.softcap * std::tanh(score / of.softcap);
        scores[static_cast<std::size_t>(t * window + w)] = score;
      }
    }
  }
  return scores;
}

// log Σ exp(x(t)) for t in [begin, end), summed in this order. −∞ if empty.
template <class Of>
double log_of_sum(std::int64_t begin, std::int64_t end, const Of& x) {
  double greatest = -std::numeric_limits<double>::infinity();
  for (std::int64_t t = begin; t < end; ++t) greatest = std::max(greatest, x(t));
  if (!std::isfinite(greatest)) return greatest;
  double sum = 0.0;
  for (std::int64_t t = begin; t < end; ++t) sum += std::exp(x(t) - greatest);
  return greatest + std::log(sum);
}

std::int64_t query_heads(const ScoredTokens& of) { return of.queries.heads / of.keys.heads; }

std::int64_t parse_count(std::string_view method, std::string_view key, std::string_view text, std::int64_t max_value) {
  std::int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= 0 && value <= max_value) return value;
  fail(ErrorCode::kUsage, fmt::format("{}={} of {}", key, text, method),
       fmt::format("it is a number of tokens from 0 to {}", max_value), fmt::format("Try {}=4.", key));
}

// Parses one of "first=4", "heads=all", ….
void parse_option(const EvictionMethod& method, std::string_view option, EvictionOptions& options,
                  std::optional<std::int64_t>& last) {
  constexpr std::int64_t kMax = std::int64_t{1} << 30;
  constexpr std::int64_t kMaxOfScorer = 1 << 16;
  const std::size_t equals = std::min(option.find('='), option.size());
  const std::string_view key = option.substr(0, equals);
  const std::string_view value = equals < option.size() ? option.substr(equals + 1) : std::string_view();
  if (key == "first") {
    options.first = parse_count(method.name, key, value, kMax);
  } else if (key == "last") {
    last = parse_count(method.name, key, value, kMax);
  } else if (key == "window" && method.needs_queries) {
    options.window = parse_count(method.name, key, value, kMaxOfScorer);
  } else if (key == "pool") {
    options.pool = static_cast<int>(parse_count(method.name, key, value, kMaxOfScorer));
  } else if (key == "heads" && (value == "each" || value == "all")) {
    options.shared = value == "all";
  } else {
    fail(ErrorCode::kUsage, fmt::format("\"{}\" of {}", option, method.name),
         fmt::format("{} has first=N, last=N, {}pool=N and heads=each|all, joined by commas", method.name,
                     method.needs_queries ? "window=N, " : ""),
         fmt::format("Try {}:first=4.", method.name));
  }
}

constexpr EvictionMethod kMethods[] = {
    {"streaming", "the first 4 tokens of a sequence and the last ones", score_recency, false, {.first = 4}},
    {"knorm", "keys of the smallest norm", score_key_norm, false, {}},
    {"snapkv",
     "what the last 64 queries attend to, pooled over 5 tokens, and their own tokens",
     score_attention,
     true,
     {.last = 64, .window = 64, .pool = 5}},
    {"expected",
     "what queries like the last 512 are expected to attend to, and the first 4 tokens",
     score_expected_attention,
     true,
     {.first = 4, .window = 512}},
};

}  // namespace

void score_recency(const ScoredTokens& of, std::span<double> scores) {
  for (std::size_t at = 0; at < scores.size(); ++at) {
    scores[at] = static_cast<double>(static_cast<std::int64_t>(at) / of.keys.heads);
  }
}

void score_key_norm(const ScoredTokens& of, std::span<double> scores) {
#pragma omp parallel for schedule(static, kItemTokens) num_threads(of.threads)
  for (std::int64_t t = 0; t < of.keys.tokens; ++t) {
    for (std::int64_t head = 0; head < of.keys.heads; ++head) {
      const std::byte* at = of.keys.at(t, head);
      double squares = 0.0;
      for (std::int64_t i = 0; i < of.keys.dim; ++i, at += size_of(of.keys.dtype)) {
        const auto x = static_cast<double>(load_element(at, of.keys.dtype));
        squares += x * x;
      }
      scores[static_cast<std::size_t>(t * of.keys.heads + head)] = -std::sqrt(squares);
    }
  }
}

void score_attention(const ScoredTokens& of, std::span<double> scores) {
  const std::int64_t tokens = of.keys.tokens;
  const std::int64_t window = of.queries.tokens;
  const Visibility visibility(of.mask, tokens);
  std::ranges::fill(scores, 0.0);
  for (std::int64_t head = 0; head < of.queries.heads; ++head) {
    heartbeat();
    const std::vector<float> all = window_scores(of, head);
    const auto score = [&](std::int64_t t, std::int64_t w) {
      return static_cast<double>(all[static_cast<std::size_t>(t * window + w)]);
    };
    std::vector<double> sums(static_cast<std::size_t>(window));
#pragma omp parallel for schedule(static, 1) num_threads(of.threads)
    for (std::int64_t w = 0; w < window; ++w) {
      const KeyRange keys = visibility.keys(of.position + w);
      sums[static_cast<std::size_t>(w)] = log_of_sum(keys.begin, keys.end, [&](std::int64_t t) { return score(t, w); });
    }
    const std::int64_t kv_head = head / query_heads(of);
    const double share = 1.0 / static_cast<double>(window * query_heads(of));
#pragma omp parallel for schedule(static, kItemTokens) num_threads(of.threads)
    for (std::int64_t t = 0; t < tokens; ++t) {
      double mass = 0.0;
      for (std::int64_t w = 0; w < window; ++w) {
        const KeyRange keys = visibility.keys(of.position + w);
        if (t >= keys.begin && t < keys.end) mass += std::exp(score(t, w) - sums[static_cast<std::size_t>(w)]);
      }
      scores[static_cast<std::size_t>(t * of.keys.heads + kv_head)] += mass * share;
    }
  }
}

void score_expected_attention(const ScoredTokens& of, std::span<double> scores) {
  const std::int64_t tokens = of.keys.tokens;
  const std::int64_t window = of.queries.tokens;
  std::ranges::fill(scores, 0.0);
  std::vector<double> expected(static_cast<std::size_t>(tokens));
  for (std::int64_t head = 0; head < of.queries.heads; ++head) {
    heartbeat();
    const std::vector<float> all = window_scores(of, head);
#pragma omp parallel for schedule(static, kItemTokens) num_threads(of.threads)
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* const own = all.data() + t * window;
      double sum = 0.0;
      for (std::int64_t w = 0; w < window; ++w) sum += static_cast<double>(own[w]);
      const double mean = sum / static_cast<double>(window);
      double squares = 0.0;
      for (std::int64_t w = 0; w < window; ++w) {
        const double apart = static_cast<double>(own[w]) - mean;
        squares += apart * apart;
      }
      expected[static_cast<std::size_t>(t)] = mean + squares / static_cast<double>(window) / 2.0;
    }
    const double sum = log_of_sum(0, tokens, [&](std::int64_t t) { return expected[static_cast<std::size_t>(t)]; });
    const std::int64_t kv_head = head / query_heads(of);
    for (std::int64_t t = 0; t < tokens; ++t) {
      scores[static_cast<std::size_t>(t * of.keys.heads + kv_head)] +=
          std::exp(expected[static_cast<std::size_t>(t)] - sum) / static_cast<double>(query_heads(of));
    }
  }
}

std::span<const EvictionMethod> eviction_methods() { return kMethods; }

const EvictionMethod* find_eviction_method(std::string_view name) {
  const auto* const found = std::ranges::find(kMethods, name, &EvictionMethod::name);
  return found == std::end(kMethods) ? nullptr : found;
}

Eviction parse_eviction(std::string_view text) {
  const std::string_view name = text.substr(0, text.find(':'));
  Eviction eviction{find_eviction_method(name), {}};
  if (eviction.method == nullptr) {
    fail(ErrorCode::kUsage, fmt::format("there is no method of eviction \"{}\"", name),
         "methods are streaming, knorm, snapkv and expected", "Choose one of them.");
  }
  EvictionOptions& options = eviction.options;
  options = eviction.method->options;
  std::optional<std::int64_t> last;
  for (std::size_t at = name.size(); at < text.size();) {  // a colon or a comma
    const std::string_view option = text.substr(at + 1, text.find(',', at + 1) - at - 1);
    parse_option(*eviction.method, option, options, last);
    at += 1 + option.size();
  }
  if (eviction.method->needs_queries && options.window == 0) {
    fail(ErrorCode::kUsage, fmt::format("window=0 of {}", name), "it looks at the last queries of a sequence",
         fmt::format("Try window={}.", eviction.method->options.window));
  }
  if (options.pool % 2 == 0) {
    fail(ErrorCode::kUsage, fmt::format("pool={} of {}", options.pool, name),
         "the same number of neighbors is pooled before and after a token", "Use an odd number; 1 pools nothing.");
  }
  const bool keeps_window = eviction.method->options.last > 0;
  options.last = last.value_or(keeps_window ? options.window : 0);
  return eviction;
}

}  // namespace ringattn
