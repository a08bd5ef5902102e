// SPDX-License-Identifier: Apache-2.0
// Token eviction (pruning) for KV caches. A scorer gives each token of a sequence a score for each KV head, from its
// keys and optionally the sequence's last queries. The tokens with the highest scores are kept, at their original
// positions (attention/key_positions.hpp). Sums have a fixed order, and ties go to the lower index, so every process
// with the same rows keeps the same tokens, with any number of threads. In host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/attention/visibility.hpp"

namespace ringattn {

// Inputs of a scorer for one sequence.
struct ScoredTokens {
  TensorView keys;     // [tokens, kv_heads, head_dim], finite
  TensorView queries;  // [window, heads, head_dim]: the sequence's last queries, finite; unused by scorers without them
  std::int64_t position = 0;  // position of the first of these queries among the tokens
  Mask mask{-1, 0};
  float softmax_scale = 1.0F;
  float softcap = 0.0F;
  int threads = 1;
};

// Fills scores, [tokens, kv_heads]. Tokens with higher scores are kept first.
using TokenScorer = void (*)(const ScoredTokens& of, std::span<double> scores);

// The token's position: the last tokens are kept (StreamingLLM).
void score_recency(const ScoredTokens& of, std::span<double> scores);
// −‖k‖: keys of a small norm attract attention.
void score_key_norm(const ScoredTokens& of, std::span<double> scores);
// The mean attention weight that the queries give the token (SnapKV), each by its softmax over the keys that the mask
// allows, averaged over the query heads of the KV head.
void score_attention(const ScoredTokens& of, std::span<double> scores);
// The attention weight that a future query is expected to give the token. If scores of queries are normal with mean m
// and variance s², taken from these queries, the expected exponential is exp(m + s² / 2). Normalized over the tokens,
// and averaged over the query heads of the KV head.
void score_expected_attention(const ScoredTokens& of, std::span<double> scores);

// Tokens kept regardless of scores, and options of the score.
struct EvictionOptions {
  std::int64_t first = 0;   // tokens at the beginning of a sequence that are always kept
  std::int64_t last = 0;    // tokens at its end that are always kept
  std::int64_t window = 0;  // last queries that the scorer uses; fewer if there are fewer
  int pool = 1;             // odd: a score is the mean over this many neighbors (pool_scores())
  bool shared = false;      // all KV heads keep the same tokens, by the mean of their scores

  bool operator==(const EvictionOptions&) const = default;
};

struct EvictionMethod {
  std::string_view name;   // "snapkv"
  std::string_view about;  // one line for people
  TokenScorer score;
  bool needs_queries;
  EvictionOptions options;  // the defaults
};

// "streaming", "knorm", "snapkv", "expected".
std::span<const EvictionMethod> eviction_methods();
// Null: there is no method of that name.
const EvictionMethod* find_eviction_method(std::string_view name);

// Parses a method with its options: a name and, after a colon, first=N, last=N, window=N, pool=N and heads=each|all,
// joined by commas: "snapkv:window=32,heads=all". Unset options have the method's defaults. If the method keeps its
// window, `last` is at least the window. Throws kUsage for other names, keys and numbers.
struct Eviction {
  const EvictionMethod* method = nullptr;
  EvictionOptions options;
};
Eviction parse_eviction(std::string_view text);

// How many of `tokens` tokens are kept if the fraction `ratio` is evicted: tokens · (1 − ratio) rounded down, but at
// least one if there are any. Throws kUsage unless 0 ≤ ratio < 1.
std::int64_t kept_tokens(std::int64_t tokens, double ratio);

// Throws kUsage if the method needs queries and none are given. `sequence`: the one without queries, if others have
// some.
void check_queries(const Eviction& eviction, bool given, std::optional<std::size_t> sequence = std::nullopt);

// Scores of an eviction: [tokens, kv_heads], or [tokens, 1] if heads share the kept tokens. Throws kUsage if the method
// needs queries and there are none.
std::vector<double> token_scores(const Eviction& eviction, const ScoredTokens& of);

// Average pooling of scores [tokens, heads] over tokens [0, count): each becomes the sum over the `pool` tokens
// centered at it, divided by `pool`. Tokens outside count as 0.
void pool_scores(std::span<double> scores, std::int64_t heads, std::int64_t count, int pool);

// The tokens that each head keeps, ascending: [kept, heads], from scores [tokens, heads]. Priority: the first
// options.first tokens, then the last options.last ones from the end, then those with the highest scores. Ties, also
// between −0 and 0, go to the lower index. Throws kUsage for a NaN score, with `name`, token and head.
std::vector<std::int32_t> best_tokens(std::string_view name, std::span<const double> scores, std::int64_t heads,
                                      std::int64_t kept, const EvictionOptions& options);

// The `kept` tokens that an eviction keeps of a sequence: best_tokens() of its token_scores().
std::vector<std::int32_t> choose_tokens(std::string_view name, const Eviction& eviction, const ScoredTokens& of,
                                        std::int64_t kept);

// `count` rows of a view, from row `first` on.
template <class View>
View rows_of_view(View rows, std::int64_t first, std::int64_t count) {
  rows.data = rows.at(first, 0);
  rows.tokens = count;
  return rows;
}

// Gathers tokens: row i of head h of `to` is row positions[i, h] of that head in `from`. positions: [to.tokens, heads],
// where heads is 1 or from.heads.
void gather_tokens(const TensorView& from, std::span<const std::int32_t> positions, const MutableTensorView& to);

}  // namespace ringattn
