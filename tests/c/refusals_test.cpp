// SPDX-License-Identifier: Apache-2.0
// Nothing that a caller of the C interface asks for is ignored: an op has an option, or refuses it by name.
#include <limits>
#include <set>
#include <string>

#include "tests/c/every_op.hpp"

namespace ringattn::testing {
namespace {

const std::set<std::string> kNone, kRing{"attention", "attention backward", "mla", "mla backward"},
    kDecoding{"decode", "mla decode"},
    kRuns{"attention",        "attention backward", "mla",          "mla backward", "ssm",
          "linear attention", "gated delta",        "ssd backward", "conv1d",       "conv1d backward"};

std::set<std::string> all_but(const std::set<std::string>& without) {
  std::set<std::string> others;
  for (const char* op :
       {"attention", "attention backward", "decode", "mla", "mla backward", "mla decode", "batched gemm", "linear",
        "linear backward", "gradient reduction", "rope", "ssm", "linear attention", "gated delta", "reshard",
        "ssd backward", "conv1d", "conv1d backward", "compression"}) {
    if (!without.contains(op)) others.insert(op);
  }
  return others;
}

// problem: what the call refuses; "": nothing.
void expect_refused(ringattn_status status, const std::string& problem) {
  EXPECT_EQ(status, problem.empty() ? RINGATTN_OK : RINGATTN_USAGE) << problem;
  if (status != RINGATTN_OK) {
    EXPECT_EQ(ringattn_error_problem(), problem);
  }
}

TEST(CRefusals, AnOpHasAnOptionOrRefusesIt) {
  static const ringattn_run whole{0, 0, 0, kTokens};
  struct Case {
    const char* option;  // that is refused
    std::set<std::string> had_by;
    std::function<void(ringattn_options& options)> set;
  };
  const std::vector<Case> cases = {
      {"unchecked_tables", kDecoding, [](auto& options) { options.unchecked_tables = 1; }},
      {"block_tokens", kRing, [](auto& options) { options.block_tokens = 64; }},
      {"checksum", kRing, [](auto& options) { options.checksum = 1; }},
      {"layout", kRing, [](auto& options) { options.layout = RINGATTN_ZIGZAG; }},
      {"memory_budget",
       all_but({"mla backward", "conv1d", "conv1d backward", "compression", "batched gemm", "linear", "linear backward",
                "gradient reduction", "rope", "reshard"}),
       [](auto& options) { options.memory_budget = 1 << 30; }},
      {"timeout_seconds", all_but({"compression", "batched gemm", "rope"}),
       [](auto& options) { options.timeout_seconds = 5.0; }},
      {"stripe", kRing, [](auto& options) { options.stripe = 64; }},
      {"stripe", kNone,
       [](auto& options) {
         options.stripe = 64;
         options.layout = RINGATTN_ZIGZAG;
       }},
      {"stripe", kNone,
       [](auto& options) {
         options.stripe = 64;
         options.layout = RINGATTN_CONTIGUOUS;
       }},
      {"stripe", kNone,
       [](auto& options) {
         options.stripe = 64;
         options.layout = RINGATTN_RUNS;
         options.query_runs = &whole;
         options.query_run_count = 1;
       }},
      {"query_runs", kRuns,
       [](auto& options) {
         options.layout = RINGATTN_RUNS;
         options.query_runs = &whole;
         options.query_run_count = 1;
       }},
      {"query_runs", kNone,
       [](auto& options) {
         options.query_runs = &whole;
         options.query_run_count = 1;
       }},
      {"query_runs", kNone, [](auto& options) { options.query_run_count = 1; }},
      {"query_runs", kNone,
       [](auto& options) {
         options.layout = RINGATTN_CONTIGUOUS;
         options.query_runs = &whole;
         options.query_run_count = 1;
       }},
      {"key_runs", kNone,
       [](auto& options) {
         options.key_runs = &whole;
         options.key_run_count = 1;
       }},
      {"key_runs", kNone,
       [](auto& options) {
         options.layout = RINGATTN_RUNS;
         options.query_runs = &whole;
         options.query_run_count = options.key_run_count = 1;
       }},
      {"key_runs", kRing,
       [](auto& options) {
         options.layout = RINGATTN_RUNS;
         options.query_runs = options.key_runs = &whole;
         options.query_run_count = options.key_run_count = 1;
       }},
  };
  Ops ops;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& tried = cases[i];
    for (const auto& [name, make] : ops.all()) {
      auto options = sized<ringattn_options>();
      tried.set(options);
      const bool has = tried.had_by.contains(name);
      EXPECT_EQ(make(options), has ? RINGATTN_OK : RINGATTN_USAGE) << name << ", " << tried.option << ", case " << i;
      if (has) continue;
      const std::string problem = ringattn_error_problem(), member = std::string("ringattn_options::") + tried.option;
      EXPECT_TRUE(problem.starts_with(member + " is ")) << name << ", case " << i << ": " << problem;
    }
  }
}

TEST(CRefusals, AWindowBelongsToTheMaskOfWindows) {
  SelfWorld world;
  auto batch = sized<ringattn_batch>();
  batch.sequences = 1;
  batch.q_lengths = &kTokens;
  struct Case {
    std::int32_t mask;
    std::int64_t left, right;
    const char* problem;  // "": it is allowed
  };
  for (const Case& tried : {Case{RINGATTN_CAUSAL, 8, 0, "window_left is 8"},
                            {RINGATTN_CAUSAL, 0, 3, "window_right is 3"},
                            {RINGATTN_CAUSAL, 0, -1, "window_right is -1"},
                            {RINGATTN_CAUSAL, -1, 0, ""},
                            {RINGATTN_FULL, 8, 0, "window_left is 8"},
                            {RINGATTN_FULL, -1, 2, "window_right is 2"},
                            {RINGATTN_FULL, -1, -1, ""},
                            {RINGATTN_FULL, 0, 0, ""},
                            {RINGATTN_WINDOW, 8, 0, ""}}) {
    ringattn_spec spec = attention_spec();
    auto mla_spec = sized<ringattn_mla_spec>();
    mla_spec.dtype = kFp32;
    mla_spec.heads = kHeads;
    mla_spec.head_dim = mla_spec.head_dim_v = mla_spec.rope_dim = 16;
    mla_spec.latent_dim = 64;
    spec.mask = mla_spec.mask = tried.mask;
    spec.window_left = mla_spec.window_left = tried.left;
    spec.window_right = mla_spec.window_right = tried.right;
    ringattn_attention* attention = nullptr;
    ringattn_mla* latent = nullptr;
    expect_refused(ringattn_attention_create(world.get(), &spec, &batch, nullptr, &attention), tried.problem);
    expect_refused(ringattn_mla_create(world.get(), &mla_spec, &batch, RINGATTN_ANY_FORM, nullptr, &latent),
                   tried.problem);
    ringattn_attention_destroy(attention);
    ringattn_mla_destroy(latent);
  }
}

TEST(CRefusals, BoundsOfDtBelongToItsLimits) {
  SelfWorld world;
  auto batch = sized<ringattn_ssm_batch>();
  batch.sequences = 1;
  batch.lengths = &kTokens;
  struct Case {
    std::int32_t limits;
    float least, most;
    const char* problem;  // "": it is allowed
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Case& tried : {Case{0, 0.0F, 0.1F, "dt_max is 0.1"},
                            {0, 0.5F, 0.0F, "dt_min is 0.5"},
                            {0, -kInfinity, kInfinity, ""},
                            {0, 0.0F, 0.0F, ""},
                            {1, 0.0F, 0.1F, ""}}) {
    auto spec = sized<ringattn_ssm_spec>();
    spec.dtype = kFp32;
    spec.heads = kHeads;
    spec.head_dim = spec.state_dim = 16;
    spec.dt_limits = tried.limits;
    spec.dt_min = tried.least;
    spec.dt_max = tried.most;
    ringattn_ssm* scan = nullptr;
    expect_refused(ringattn_ssm_create(world.get(), &spec, &batch, nullptr, &scan), tried.problem);
    ringattn_ssm_destroy(scan);
  }
}

}  // namespace
}  // namespace ringattn::testing
