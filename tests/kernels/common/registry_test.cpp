// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/registry.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/gated_delta/gated_delta.hpp"
#include "kernels/gemm/weight_gradient.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/rope/rope.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"
#include "kernels/ssm/causal_conv1d.hpp"
#include "kernels/ssm/ssm.hpp"
#include "tests/support/attention_inputs.hpp"
#include "tests/support/error_of.hpp"

// An op of the test's own: it adds up to a limit.
namespace ringattn {

struct SumKernel {
  int limit;
};
struct SumSpec {
  using Kernel = SumKernel;

  int terms = 1;
};
std::string describe(const SumSpec& spec) { return std::to_string(spec.terms) + " terms"; }

template <>
std::span<const KernelRow<SumSpec>> kernel_table<SumSpec>() {
  static const auto no_backend = [](const BackendOptions&) { return std::unique_ptr<Backend>(); };
  static const KernelRow<SumSpec> kTable[] = {
      {{{"cpu", [] { return std::string(); }, no_backend},
        "sum_short",
        "up to 4 terms",
        [](const Backend&) { return 1.0; }},
       [](const SumSpec& spec) { return std::vector<std::string>(spec.terms > 4 ? 1 : 0, "more than 4 terms"); },
       [](const SumSpec&, Backend&) { return std::make_unique<SumKernel>(SumKernel{4}); }},
      {{{"cpu", [] { return std::string("it is elsewhere"); }, no_backend},
        "sum_elsewhere",
        "everything",
        [](const Backend&) { return 1.0; }},
       [](const SumSpec&) { return std::vector<std::string>(); },
       [](const SumSpec&, Backend&) { return std::make_unique<SumKernel>(SumKernel{1000}); }},
  };
  return kTable;
}

}  // namespace ringattn

namespace ringattn::testing {
namespace {

AttentionSpec usual() { return make_spec(Dtype::kBf16, 8, 2, 128, {-1, 0}); }

std::string message_of(const AttentionSpec& spec, const KernelRequest& request, ErrorCode code) {
  try {
    choose_kernel(spec, request);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

TEST(Registry, NamesOfAnOpAreUnique) {
  std::set<std::pair<std::string_view, std::string_view>> names;
  for (const auto& [op, row] : all_kernels()) EXPECT_TRUE(names.emplace(op, row->name).second) << op << row->name;
  EXPECT_FALSE(names.empty());
}

TEST(Registry, ChoosesAndSaysWhy) {
  const AttentionChoice choice = choose_kernel(usual(), {"cpu", "auto"});
  EXPECT_EQ(choice.row->name, "cpu_attention");
  EXPECT_EQ(choice.reason, "first of 1 that can: cpu_attention (bf16, heads 8/2 (GQA 4:1), head_dim 128, causal)");
  EXPECT_EQ(choose_kernel(usual(), {"auto", "cpu_attention"}).reason,
            "forced: cpu_attention (bf16, heads 8/2 (GQA 4:1), head_dim 128, causal)");
  EXPECT_NE(choose_kernel(usual(), {}).row, nullptr);
}

TEST(Registry, UnknownNamesGetASuggestion) {
  EXPECT_EQ(message_of(usual(), {"cpuu", "auto"}, ErrorCode::kUsage),
            "there is no backend \"cpuu\" (known: auto, cpu, cuda). Did you mean cpu?");
  const std::string kernel = message_of(usual(), {"auto", "cpu_atention"}, ErrorCode::kUsage);
  EXPECT_TRUE(contains(kernel, "there is no kernel \"cpu_atention\" (known: auto, ")) << kernel;
  EXPECT_TRUE(contains(kernel, "cpu_attention). Did you mean cpu_attention?")) << kernel;
  EXPECT_EQ(
      message_of(usual(), {"auto", "cpu_fold"}, ErrorCode::kUsage),                                      // old name
      "there is no kernel \"cpu_fold\" (it is called cpu_attention now). Use kernel = cpu_attention.");  // old name
  EXPECT_TRUE(contains(message_of(usual(), {"quantum", "auto"}, ErrorCode::kUsage),
                       "(known: auto, cpu, cuda). Use auto, or see ringattn's info."));
}

TEST(Registry, BackendsThatTheBuildLacks) {
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    if (row.backend == "cuda") GTEST_SKIP() << "this build has cuda kernels";
  }
  EXPECT_TRUE(
      contains(message_of(usual(), {"cuda", "auto"}, ErrorCode::kUnsupported), "this build has no cuda kernels"));
}

TEST(Registry, BackendsThatComputeOtherOpsAlone) {
  const auto is_cuda = [](const OpKernel& kernel) { return kernel.row->backend == "cuda"; };
  if (std::ranges::none_of(all_kernels(), is_cuda)) GTEST_SKIP() << "this build has no cuda kernels";
  if (kernel_table<SsmSpec>().front().backend == "cuda") GTEST_SKIP() << "scans run on cuda";
  const Error error = error_of([] { choose_kernel(SsmSpec{}, {"cuda", "auto"}); });
  EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  EXPECT_TRUE(contains(error.what(), "no cuda kernel computes this (those that do: cpu_ssd, cpu_selective_scan)"))
      << error.what();
}

TEST(Registry, ForcedKernelListsRequiredSupportedMissing) {
  for (const int dim : {584, 260, 100, 4}) {
    AttentionSpec spec = usual();
    spec.head_dim = dim;
    const std::string message = message_of(spec, {"auto", "cpu_attention"}, ErrorCode::kUnsupported);
    EXPECT_TRUE(contains(message, "kernel cpu_attention can't do this job")) << message;
    EXPECT_TRUE(contains(message, "required: bf16")) << message;
    EXPECT_TRUE(contains(message, "supported: ")) << message;
    EXPECT_TRUE(contains(message, "missing: head_dim " + std::to_string(dim))) << message;
    EXPECT_TRUE(contains(message_of(spec, {"cpu", "auto"}, ErrorCode::kUnsupported), "no kernel can do this job"));
  }
  AttentionSpec spec = usual();
  spec.head_dim_v = 12;
  EXPECT_TRUE(contains(message_of(spec, {"auto", "cpu_attention"}, ErrorCode::kUnsupported), "missing: head_dim_v 12"));
}

// Keys of a latent and its rotary key, and the latent as values.
TEST(Registry, TheCpuKernelTakesLatents) {
  const KernelRequest cpu{"cpu", "auto"};
  EXPECT_EQ(choose_kernel(make_spec(Dtype::kBf16, 128, 1, 576, {-1, 0}, 512), cpu).row->name, "cpu_attention");
  EXPECT_TRUE(contains(
      message_of(make_spec(Dtype::kBf16, 128, 1, 584, {-1, 0}, 512), cpu, ErrorCode::kUnsupported),
      "supported: fp32, bf16, fp16; head dims that are multiples of 8 up to 576; every mask, softcap, sinks; missing: "
      "head_dim 584 (supported: multiples of 8 up to 576)"));
  EXPECT_TRUE(contains(message_of(make_spec(Dtype::kBf16, 128, 1, 576, {-1, 0}, 584), cpu, ErrorCode::kUnsupported),
                       "missing: head_dim_v 584 (supported: multiples of 8 up to 576)"));
}

TEST(Registry, BatchedGemmsHaveATableOfTheirOwn) {
  const KernelChoice<BatchedGemmSpec> choice = choose_kernel(BatchedGemmSpec{Dtype::kF16, 512, 128}, {"cpu", "auto"});
  EXPECT_EQ(choice.row->name, "cpu_gemm");  // cpu_gemm_amx is of bf16 only
  EXPECT_TRUE(contains(choice.reason, "first of 1 that can: cpu_gemm (fp16, k 512, n 128)")) << choice.reason;
  const auto refused = [](const BatchedGemmSpec& spec) {
    return std::string(error_of([&] { choose_kernel(spec, {"cpu", "auto"}); }).what());
  };
  EXPECT_TRUE(contains(refused({Dtype::kBf16, 12, 128}), "missing: k 12 (supported: multiples of 8)"));
  EXPECT_TRUE(contains(refused({Dtype::kBf16, 512, 0}), "missing: n 0 (supported: multiples of 8)"));
}

TEST(Registry, EveryOpChoosesFromItsOwnTable) {
  const KernelChoice<SumSpec> choice = choose_kernel(SumSpec{3}, {});
  EXPECT_EQ(choice.row->name, "sum_short");
  EXPECT_EQ(choice.reason, "first of 1 that can: sum_short (3 terms); passed over sum_elsewhere: it is elsewhere");
  EXPECT_EQ(choose_kernel(SumSpec{5}, {}, KernelScope::kAnyMachine).row->name, "sum_elsewhere");
  try {
    choose_kernel(SumSpec{5}, {});
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_STREQ(
        error.what(),
        "no kernel can do this job (required: 5 terms; sum_short: supported: up to 4 terms; missing: more than "
        "4 terms; sum_elsewhere: it is elsewhere). See ringattn's info for what kernels do.");
  }
}

// It is known, and not for this.
TEST(Registry, SaysWhatAKernelOfAnotherOpIsFor) {
  const Error sum = error_of([] { choose_kernel(SumSpec{3}, {"auto", "cpu_attention"}); });
  EXPECT_EQ(sum.code(), ErrorCode::kUnsupported);
  EXPECT_STREQ(
      sum.what(),
      "kernel cpu_attention can't do this job (it is only for attention and decode; required: 3 terms; known for "
      "this job: auto, sum_short, sum_elsewhere). Leave kernel out, or see ringattn's info.");
  EXPECT_TRUE(
      contains(message_of(usual(), {"auto", "cpu_gemm"}, ErrorCode::kUnsupported),
               "it is only for batched_gemm; required: bf16, heads 8/2 (GQA 4:1), head_dim 128, causal; known for "
               "this job: auto, "));
  const auto is_latent = [](const OpKernel& kernel) { return kernel.row->name == "sm90_mla"; };
  if (std::ranges::none_of(all_kernels(), is_latent)) GTEST_SKIP() << "this build has no kernels for Hopper";
  EXPECT_TRUE(contains(message_of(usual(), {"auto", "sm90_mla"}, ErrorCode::kUnsupported), "it is only for decode"));
}

TEST(Registry, AllKernelsAreThoseOfTheTables) {
  std::vector<OpKernel> expected;
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) expected.push_back({"attention", &row});
  for (const KernelRow<AttentionBackwardSpec>& row : kernel_table<AttentionBackwardSpec>()) {
    expected.push_back({"attention_backward", &row});
  }
  for (const KernelRow<DecodeSpec>& row : kernel_table<DecodeSpec>()) expected.push_back({"decode", &row});
  for (const BatchedGemmRow& row : kernel_table<BatchedGemmSpec>()) expected.push_back({"batched_gemm", &row});
  for (const KernelRow<WeightGradientSpec>& row : kernel_table<WeightGradientSpec>()) {
    expected.push_back({"weight_gradient", &row});
  }
  for (const KernelRow<LinearSpec>& row : kernel_table<LinearSpec>()) expected.push_back({"linear", &row});
  for (const KernelRow<RopeSpec>& row : kernel_table<RopeSpec>()) expected.push_back({"rope", &row});
  for (const KernelRow<GatedDeltaSpec>& row : kernel_table<GatedDeltaSpec>()) expected.push_back({"gated_delta", &row});
  for (const KernelRow<SsmSpec>& row : kernel_table<SsmSpec>()) expected.push_back({"ssm", &row});
  for (const KernelRow<SsdBackwardSpec>& row : kernel_table<SsdBackwardSpec>()) {
    expected.push_back({"ssd_backward", &row});
  }
  for (const KernelRow<CausalConv1dSpec>& row : kernel_table<CausalConv1dSpec>()) {
    expected.push_back({"conv1d", &row});
  }
  EXPECT_TRUE(std::ranges::equal(all_kernels(), expected));
}

TEST(Registry, HeadConfigurations) {
  EXPECT_EQ(check_heads(make_spec(Dtype::kBf16, 8, 8, 64, {})), "MHA");
  EXPECT_EQ(check_heads(make_spec(Dtype::kBf16, 8, 2, 64, {})), "GQA 4:1");
  EXPECT_EQ(check_heads(make_spec(Dtype::kBf16, 8, 1, 64, {})), "MQA");
  EXPECT_THROW(check_heads(make_spec(Dtype::kBf16, 32, 12, 64, {})), Error);
  EXPECT_THROW(check_heads(make_spec(Dtype::kBf16, 0, 1, 64, {})), Error);
}

}  // namespace
}  // namespace ringattn::testing
