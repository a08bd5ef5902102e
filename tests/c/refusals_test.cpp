// SPDX-License-Identifier: Apache-2.0
// Nothing that a caller of the C interface asks for is ignored: an op has an option, or refuses it by name.
#include <set>
#include <string>

#include "tests/c/every_op.hpp"

namespace ringattn::testing {
namespace {

const std::set<std::string> kNone, kRing{"attention", "latent"}, kDecoding{"decode", "latent decode"},
    kRuns{"attention", "latent", "scan", "convolution"};

std::set<std::string> all_but(const std::set<std::string>& without) {
  std::set<std::string> others;
  for (const char* op : {"attention", "decode", "latent", "latent decode", "scan", "convolution", "compression"}) {
    if (!without.contains(op)) others.insert(op);
  }
  return others;
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
      {"memory_budget", all_but({"convolution", "compression"}),
       [](auto& options) { options.memory_budget = 1 << 30; }},
      {"timeout_seconds", all_but({"compression"}), [](auto& options) { options.timeout_seconds = 5.0; }},
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

}  // namespace
}  // namespace ringattn::testing
