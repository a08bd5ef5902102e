// SPDX-License-Identifier: Apache-2.0
// Which tokens a cache keeps. A scorer gives each token of a sequence a score for each K/V head, from its keys and,
// where it looks at them, the sequence's last queries; the tokens of the highest scores are kept, and stay where they
// stand (key_positions.hpp). Sums have a fixed order and of equal scores the lower index is taken, so everyone who has
// the rows keeps the same tokens, with any number of threads. In host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/tensor.hpp"
#include "kernels/visibility.hpp"

namespace ringattn {

// What a scorer may look at, of one sequence.
struct ScoredTokens {
  TensorView keys;     // [tokens, kv_heads, head_dim], finite
  TensorView queries;  // [window, heads, head_dim]: the sequence's last ones, finite; of scorers without them unused
  std::int64_t position = 0;  // of the first of these queries among the tokens
  Mask mask{-1, 0};
  float softmax_scale = 1.0F;
  float softcap = 0.0F;
  int threads = 1;
};

// Fills scores, [tokens, kv_heads]: a token of a higher score is kept rather than one of a lower score.
using TokenScorer = void (*)(const ScoredTokens& of, std::span<double> scores);

// The position of the token: of several, the last ones are kept.
void score_recency(const ScoredTokens& of, std::span<double> scores);
// −‖k‖: keys of a small norm draw attention.
void score_key_norm(const ScoredTokens& of, std::span<double> scores);
// The mean weight that the queries give the token, each by its softmax over the keys that the mask lets it see; the
// mean over the query heads of the K/V head.
void score_attention(const ScoredTokens& of, std::span<double> scores);
// The weight that a query to come is expected to give the token: where the scores of queries are normal with the mean m
// and the variance s² of these queries' ones, its exponential is exp(m + s² / 2) in the mean. As shares of their sum
// over the tokens; the mean over the query heads of the K/V head.
void score_expected_attention(const ScoredTokens& of, std::span<double> scores);

// What is kept beside the best, and what a score is made of.
struct EvictionOptions {
  std::int64_t first = 0;   // tokens at the beginning of a sequence that are kept whatever their scores
  std::int64_t last = 0;    // and at its end
  std::int64_t window = 0;  // of the scorer: last queries that it looks at; fewer where there are fewer
  int pool = 1;             // odd: a score is the mean of so many neighbours' ones (pool_scores())
  bool shared = false;      // all K/V heads keep the same tokens, by the mean of their scores

  bool operator==(const EvictionOptions&) const = default;
};

struct EvictionMethod {
  std::string_view name;   // "snapkv"
  std::string_view about;  // one line for people
  TokenScorer score;
  bool needs_queries;
  EvictionOptions options;  // the usual ones
};

// "streaming", "knorm", "snapkv", "expected".
std::span<const EvictionMethod> eviction_methods();
// Null: there is none of that name.
const EvictionMethod* find_eviction_method(std::string_view name);

// A method with its options as a user writes them: a name and, behind a colon, first=N, last=N, window=N, pool=N and
// heads=each|all, joined by commas: "snapkv:window=32,heads=all". What isn't said is the method's usual one, and `last`
// then no less than the window where the method keeps that. Throws kUsage for other names, keys and numbers.
struct Eviction {
  const EvictionMethod* method = nullptr;
  EvictionOptions options;
};
Eviction parse_eviction(std::string_view text);

// How many of `tokens` tokens are kept where the share `ratio` of them is taken out: tokens · (1 − ratio) rounded down,
// but one at least where there are any. Throws kUsage unless 0 ≤ ratio < 1.
std::int64_t kept_tokens(std::int64_t tokens, double ratio);

// Throws kUsage for a method that looks at queries where none are given. `sequence`: which lacks them, if others may
// have some.
void check_queries(const Eviction& eviction, bool given, std::optional<std::size_t> sequence = std::nullopt);

// Scores as an eviction has them: [tokens, kv_heads], or [tokens, 1] where heads share what is kept. Throws kUsage
// where the method needs queries and there are none.
std::vector<double> token_scores(const Eviction& eviction, const ScoredTokens& of);

// Each score of tokens [0, count) of [tokens, heads] becomes the sum of those of the `pool` tokens around it, itself in
// the middle, divided by `pool`; tokens outside count as 0.
void pool_scores(std::span<double> scores, std::int64_t heads, std::int64_t count, int pool);

// The tokens that each head keeps, ascending: [kept, heads] of scores [tokens, heads]. The first options.first tokens
// come first, then the last options.last ones, the last of all in front, then those of the highest scores; of equal
// ones, which −0 and 0 are, that of the lowest index. Throws kUsage for a NaN among the scores, naming `name`, token
// and head.
std::vector<std::int32_t> best_tokens(std::string_view name, std::span<const double> scores, std::int64_t heads,
                                      std::int64_t kept, const EvictionOptions& options);

// The tokens that a sequence keeps by an eviction, `kept` of them: best_tokens() of its token_scores().
std::vector<std::int32_t> choose_tokens(std::string_view name, const Eviction& eviction, const ScoredTokens& of,
                                        std::int64_t kept);

// `count` of the rows of a view, from `first` on.
template <class View>
View rows_of_view(View rows, std::int64_t first, std::int64_t count) {
  rows.data = rows.at(first, 0);
  rows.tokens = count;
  return rows;
}

// Row i of head h of `to` becomes the row of that head at positions[i, h]. positions: [to.tokens, heads], where heads
// are 1 or from.heads.
void gather_tokens(const TensorView& from, std::span<const std::int32_t> positions, const MutableTensorView& to);

}  // namespace ringattn
