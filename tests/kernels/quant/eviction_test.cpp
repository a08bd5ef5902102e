// SPDX-License-Identifier: Apache-2.0
// Which tokens are kept: scorers against plain references in fp64, ties, edges of the ratio, and what is refused.
#include "kernels/quant/eviction.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/attention/attention_spec.hpp"
#include "kernels/quant/compression_methods.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/special_values.hpp"

namespace ringattn::testing {
namespace {

// A sequence of `tokens` keys whose last `window` tokens are the queries.
struct Sample {
  AttentionInputs inputs;
  ScoredTokens scored;

  Sample(const AttentionSpec& spec, std::int64_t tokens, std::int64_t window, std::uint64_t seed)
      : inputs(random_inputs(spec, {{window, tokens, tokens - window}}, seed)) {
    scored.keys = inputs.k_view(0);
    scored.queries = inputs.q_view(0);
    scored.position = tokens - window;
    scored.mask = spec.mask;
    scored.softmax_scale = spec.softmax_scale;
    scored.softcap = spec.softcap;
  }

  double element(const TensorView& rows, std::int64_t token, std::int64_t head, std::int64_t dim) const {
    return static_cast<double>(
        load_element(rows.at(token, head) + static_cast<std::size_t>(dim) * size_of(rows.dtype), rows.dtype));
  }
  double score(std::int64_t query, std::int64_t head, std::int64_t token) const {
    const std::int64_t kv_head = head / (scored.queries.heads / scored.keys.heads);
    double sum = 0.0;
    for (std::int64_t d = 0; d < scored.keys.dim; ++d) {
      sum += element(scored.queries, query, head, d) * element(scored.keys, token, kv_head, d);
    }
    sum *= static_cast<double>(scored.softmax_scale);
    const auto cap = static_cast<double>(scored.softcap);
    return cap > 0.0 ? cap * std::tanh(sum / cap) : sum;
  }
  std::vector<double> scores_by(TokenScorer scorer, int threads = 1) {
    scored.threads = threads;
    std::vector<double> scores(static_cast<std::size_t>(scored.keys.tokens * scored.keys.heads), kNan);
    scorer(scored, scores);
    return scores;
  }
};

void expect_near(const std::vector<double>& scores, const std::vector<double>& expected) {
  ASSERT_EQ(scores.size(), expected.size());
  double most = 0.0;
  for (const double value : expected) most = std::max(most, std::abs(value));
  for (std::size_t i = 0; i < scores.size(); ++i) ASSERT_NEAR(scores[i], expected[i], 2e-6 * most) << i;
}

std::vector<AttentionSpec> specs() {
  AttentionSpec window = make_spec(Dtype::kF32, 4, 2, 40, {60, 0});
  window.softcap = 3.0F;
  return {make_spec(Dtype::kBf16, 6, 2, 64, {-1, 0}), make_spec(Dtype::kF16, 2, 2, 24, {-1, -1}), window};
}

TEST(Eviction, RecencyAndNormsAreThoseOfTheKeys) {
  for (const AttentionSpec& spec : specs()) {
    Sample sample(spec, 300, 7, 3);
    const std::vector<double> recency = sample.scores_by(score_recency);
    const std::vector<double> norms = sample.scores_by(score_key_norm, 3);
    std::vector<double> expected;
    for (std::int64_t t = 0; t < 300; ++t) {
      for (std::int64_t head = 0; head < spec.kv_heads; ++head) {
        EXPECT_EQ(recency[expected.size()], static_cast<double>(t));
        double squares = 0.0;
        for (std::int64_t d = 0; d < spec.head_dim; ++d) {
          squares += sample.element(sample.scored.keys, t, head, d) * sample.element(sample.scored.keys, t, head, d);
        }
        expected.push_back(-std::sqrt(squares));
      }
    }
    expect_near(norms, expected);
  }
}

TEST(Eviction, AttentionIsTheMeanWeightOfTheWindow) {
  for (const AttentionSpec& spec : specs()) {
    constexpr std::int64_t kTokens = 700, kWindow = 9;
    Sample sample(spec, kTokens, kWindow, 5);
    const int ratio = spec.heads / spec.kv_heads;
    std::vector<double> expected(static_cast<std::size_t>(kTokens * spec.kv_heads));
    for (int head = 0; head < spec.heads; ++head) {
      for (std::int64_t w = 0; w < kWindow; ++w) {
        const std::int64_t position = kTokens - kWindow + w;
        std::map<std::int64_t, double> weights;
        double sum = 0.0;
        for (std::int64_t t = 0; t < kTokens; ++t) {
          if (spec.mask.left >= 0 && t < position - spec.mask.left) continue;
          if (spec.mask.right >= 0 && t > position + spec.mask.right) continue;
          sum += weights[t] = std::exp(sample.score(w, head, t));
        }
        for (const auto& [t, weight] : weights) {
          expected[static_cast<std::size_t>(t * spec.kv_heads + head / ratio)] += weight / sum / (kWindow * ratio);
        }
      }
    }
    const std::vector<double> scores = sample.scores_by(score_attention);
    expect_near(scores, expected);
    EXPECT_NEAR(std::accumulate(scores.begin(), scores.end(), 0.0), spec.kv_heads, 1e-9);
    EXPECT_EQ(sample.scores_by(score_attention, 3), scores);  // the same bits by any number of threads
  }
}

// exp(m + s² / 2) of the scores of the queries; m = μ·k and s² = kᵀΣk with their mean and covariance.
TEST(Eviction, ExpectedAttentionIsThatOfNormalQueries) {
  for (const AttentionSpec& spec : specs()) {
    if (spec.softcap > 0.0F) continue;
    constexpr std::int64_t kTokens = 310, kWindow = 33;
    Sample sample(spec, kTokens, kWindow, 6);
    const int ratio = spec.heads / spec.kv_heads;
    const std::int64_t dim = spec.head_dim;
    const auto scale = static_cast<double>(spec.softmax_scale);
    std::vector<double> expected(static_cast<std::size_t>(kTokens * spec.kv_heads));
    for (int head = 0; head < spec.heads; ++head) {
      std::vector<double> mean(static_cast<std::size_t>(dim)), covariance(static_cast<std::size_t>(dim * dim));
      for (std::int64_t w = 0; w < kWindow; ++w) {
        for (std::int64_t d = 0; d < dim; ++d) {
          mean[static_cast<std::size_t>(d)] += sample.element(sample.scored.queries, w, head, d) / kWindow;
        }
      }
      for (std::int64_t w = 0; w < kWindow; ++w) {
        for (std::int64_t i = 0; i < dim * dim; ++i) {
          const double a =
              sample.element(sample.scored.queries, w, head, i / dim) - mean[static_cast<std::size_t>(i / dim)];
          const double b =
              sample.element(sample.scored.queries, w, head, i % dim) - mean[static_cast<std::size_t>(i % dim)];
          covariance[static_cast<std::size_t>(i)] += a * b / kWindow;
        }
      }
      std::vector<double> weights;
      for (std::int64_t t = 0; t < kTokens; ++t) {
        double x = 0.0;
        for (std::int64_t i = 0; i < dim; ++i) {
          const double k = sample.element(sample.scored.keys, t, head / ratio, i);
          x += scale * mean[static_cast<std::size_t>(i)] * k;
          for (std::int64_t j = 0; j < dim; ++j) {
            x += scale * scale * k * covariance[static_cast<std::size_t>(i * dim + j)] *
                 sample.element(sample.scored.keys, t, head / ratio, j) / 2.0;
          }
        }
        weights.push_back(std::exp(x));
      }
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        expected[static_cast<std::size_t>(t * spec.kv_heads + head / ratio)] +=
            weights[static_cast<std::size_t>(t)] / sum / ratio;
      }
    }
    const std::vector<double> scores = sample.scores_by(score_expected_attention);
    expect_near(scores, expected);
    EXPECT_EQ(sample.scores_by(score_expected_attention, 4), scores);
  }
}

TEST(Eviction, PoolsNeighbours) {
  std::vector<double> scores{1, 10, 2, 20, 3, 30, 4, 40, 100, 1000};  // [5, 2]
  pool_scores(scores, 2, 4, 3);
  EXPECT_EQ(scores, (std::vector<double>{3.0 / 3, 30.0 / 3, 6.0 / 3, 60.0 / 3, 9.0 / 3, 90.0 / 3, 7.0 / 3, 70.0 / 3,
                                         100, 1000}));
  std::vector<double> same{1, 2, 3};
  pool_scores(same, 1, 3, 1);
  EXPECT_EQ(same, (std::vector<double>{1, 2, 3}));
}

TEST(Eviction, KeepsTheBestByAnyOrder) {
  std::mt19937_64 generator(11);
  for (const std::int64_t tokens : {1, 2, 17, 400}) {
    for (const std::int64_t heads : {1, 3}) {
      std::vector<double> scores;
      // Few different scores, so that there are many ties; −0 and 0 are one, and infinities are scores.
      constexpr double kSome[] = {-std::numeric_limits<double>::infinity(), -1.0, -0.0, 0.0, 0.5,
                                  std::numeric_limits<double>::infinity()};
      for (std::int64_t i = 0; i < tokens * heads; ++i) scores.push_back(kSome[generator() % std::size(kSome)]);
      for (const EvictionOptions& options :
           {EvictionOptions{}, EvictionOptions{.first = 4}, EvictionOptions{.last = 7}, EvictionOptions{3, 5}}) {
        for (std::int64_t kept = 0; kept <= tokens; kept += 1 + kept / 4) {
          const std::vector<std::int32_t> best = best_tokens("scores", scores, heads, kept, options);
          for (std::int64_t head = 0; head < heads; ++head) {
            std::vector<std::int32_t> order(static_cast<std::size_t>(tokens));
            std::iota(order.begin(), order.end(), 0);
            const auto rank = [&](std::int32_t t) {
              return t < options.first ? 0 : t >= tokens - options.last ? 1 : 2;
            };
            std::ranges::stable_sort(order, [&](std::int32_t a, std::int32_t b) {
              if (rank(a) != rank(b)) return rank(a) < rank(b);
              if (rank(a) == 0) return false;
              if (rank(a) == 1) return a > b;
              return scores[static_cast<std::size_t>(a * heads + head)] >
                     scores[static_cast<std::size_t>(b * heads + head)];
            });
            order.resize(static_cast<std::size_t>(kept));
            std::ranges::sort(order);
            std::vector<std::int32_t> own;
            for (std::int64_t i = 0; i < kept; ++i) own.push_back(best[static_cast<std::size_t>(i * heads + head)]);
            EXPECT_EQ(own, order) << tokens << ", " << kept << ", head " << head;
          }
        }
      }
    }
  }
}

TEST(Eviction, TheRatioIsTheShareThatIsTakenOut) {
  EXPECT_EQ(kept_tokens(1000, 0.0), 1000);
  EXPECT_EQ(kept_tokens(1000, 0.25), 750);
  EXPECT_EQ(kept_tokens(10, 0.9), 1);
  EXPECT_EQ(kept_tokens(10, 0.99), 1);  // one at least
  EXPECT_EQ(kept_tokens(7, 0.5), 3);
  EXPECT_EQ(kept_tokens(0, 0.5), 0);
  EXPECT_EQ(kept_tokens(1, 0.999), 1);
  EXPECT_EQ(kept_tokens(2097152, 0.75), 524288);
  for (const double ratio : {-0.1, 1.0, 1.5, double{kNan}}) {
    EXPECT_EQ(error_of([&] { kept_tokens(10, ratio); }).code(), ErrorCode::kUsage) << ratio;
  }
}

TEST(Eviction, SharedScoresAreMeansOverHeads) {
  const AttentionSpec spec = make_spec(Dtype::kBf16, 4, 2, 32, {-1, 0});
  Sample sample(spec, 200, 20, 8);
  Eviction each = parse_eviction("snapkv:window=20,pool=1,last=0");
  Eviction shared = parse_eviction("snapkv:window=20,pool=1,last=0,heads=all");
  const std::vector<double> scores = token_scores(each, sample.scored);
  const std::vector<double> means = token_scores(shared, sample.scored);
  ASSERT_EQ(means.size(), 200U);
  for (std::size_t t = 0; t < means.size(); ++t) EXPECT_EQ(means[t], (scores[2 * t] + scores[2 * t + 1]) / 2.0);
  each.options.pool = 5;
  each.options.last = 20;
  std::vector<double> pooled = scores;
  pool_scores(pooled, 2, 180, 5);
  EXPECT_EQ(token_scores(each, sample.scored), pooled);
}

TEST(Eviction, RowsOfKeptTokensFollowEachOther) {
  const AttentionInputs inputs = random_inputs(make_spec(Dtype::kF16, 2, 2, 8, {-1, 0}), {{1, 50, 49}}, 4);
  const TensorView from = inputs.k_view(0);
  for (const std::vector<std::int32_t>& positions :
       {std::vector<std::int32_t>{0, 3, 7, 3, 49, 48}, std::vector<std::int32_t>{2, 9, 11}}) {
    const std::int64_t kept = 3;
    std::vector<std::byte> rows(static_cast<std::size_t>(kept * 2 * 8 * 2), std::byte{0xff});
    const MutableTensorView to = dense_view(static_cast<void*>(rows.data()), Dtype::kF16, kept, 2, 8);
    gather_tokens(from, positions, to);
    for (std::int64_t i = 0; i < kept; ++i) {
      for (std::int64_t head = 0; head < 2; ++head) {
        const std::int32_t token = positions.size() == 3 ? positions[static_cast<std::size_t>(i)]
                                                         : positions[static_cast<std::size_t>(2 * i + head)];
        EXPECT_EQ(std::memcmp(to.at(i, head), from.at(token, head), 16), 0) << i << ", " << head;
      }
    }
  }
}

TEST(Eviction, NanIsRefusedByIndex) {
  std::vector<double> scores(20, 1.0);
  scores[13] = kNan;
  const Error error = error_of([&] { best_tokens("scores of sequence 4", scores, 2, 3, {}); });
  EXPECT_EQ(error.code(), ErrorCode::kUsage);
  EXPECT_NE(std::string(error.what()).find("scores of sequence 4 [6, 1] is NaN"), std::string::npos) << error.what();
}

TEST(Eviction, IsWrittenAsOneWord) {
  const Eviction usual = parse_eviction("snapkv");
  EXPECT_EQ(usual.options, (EvictionOptions{.first = 0, .last = 64, .window = 64, .pool = 5}));
  EXPECT_EQ(parse_eviction("snapkv:window=16").options.last, 16);
  EXPECT_EQ(parse_eviction("snapkv:window=16,last=0").options.last, 0);
  const Eviction all = parse_eviction("expected:first=1,last=2,window=3,pool=7,heads=all");
  EXPECT_EQ(all.options, (EvictionOptions{1, 2, 3, 7, true}));
  EXPECT_EQ(describe(all), "expected: first 1, last 2, window 3, pool 7, all K/V heads together");
  EXPECT_EQ(describe(parse_eviction("streaming:heads=each")), "streaming: first 4, each K/V head");
  for (const char* const text :
       {"snap", "snapkv:", "snapkv:window", "snapkv:window=0", "snapkv:window=-1", "snapkv:pool=4", "snapkv:pool=0",
        "snapkv:heads=some", "snapkv:first=1,", "snapkv:first=1,,last=2", "knorm:window=4", "knorm:first=x",
        "streaming:last=99999999999"}) {
    EXPECT_EQ(error_of([&] { parse_eviction(text); }).code(), ErrorCode::kUsage) << text;
  }
  EXPECT_EQ(parse_cache_method("int8").format->name, "int8");
  EXPECT_EQ(parse_cache_method("fp8 tensor").format->format, parse_row_format("fp8 tensor"));
  EXPECT_EQ(parse_cache_method("snapkv:window=3+fp8 tensor").format->format, parse_row_format("fp8 tensor"));
  const CacheMethod both = parse_cache_method("knorm:first=2+fp8");
  EXPECT_EQ(both.eviction->options.first, 2);
  EXPECT_EQ(both.format->name, "fp8");
  EXPECT_FALSE(parse_cache_method("streaming").format);
  for (const char* const text : {"", "int5", "fp8+knorm", "knorm+snapkv", "knorm+", "+fp8", "knorm+fp8+int4",
                                 "fp8:tensor", "fp8 tensr", "plain", "latent rope 64"}) {
    EXPECT_EQ(error_of([&] { parse_cache_method(text); }).code(), ErrorCode::kUsage) << text;
  }
  EXPECT_NE(std::string(error_of([&] { parse_cache_method("snapkw"); }).what()).find("Did you mean snapkv"),
            std::string::npos);
}

TEST(Eviction, NeedsTheQueriesThatItLooksAt) {
  Sample sample(make_spec(Dtype::kBf16, 2, 1, 32, {-1, 0}), 64, 4, 9);
  sample.scored.queries.tokens = 0;
  for (const EvictionMethod& method : eviction_methods()) {
    const Eviction eviction{&method, method.options};
    if (!method.needs_queries) {
      EXPECT_EQ(token_scores(eviction, sample.scored).size(), 64U);
      continue;
    }
    const Error error = error_of([&] { token_scores(eviction, sample.scored); });
    EXPECT_NE(std::string(error.what()).find(fmt::format("{} without queries", method.name)), std::string::npos);
  }
}

}  // namespace
}  // namespace ringattn::testing
