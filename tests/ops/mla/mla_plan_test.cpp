// SPDX-License-Identifier: Apache-2.0
// What latent attention plans: its form by the shape, the rows that it gathers, blocks within their limit, the heads
// that fit into memory, and what is sent.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "attention/tokens/cost.hpp"
#include "base/aligned.hpp"
#include "comm/self.hpp"
#include "kernels/common/registry.hpp"
#include "ops/mla/gathered_blocks.hpp"
#include "ops/mla/mla_gemms.hpp"
#include "ops/mla/mla_work.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {
namespace {

MlaJob deepseek(const Batch& batch) {
  MlaSpec spec;
  spec.softmax_scale = default_softmax_scale(spec);
  return {spec, batch, {}};
}

TEST(MlaForm, FollowsTheLongestQuery) {
  for (const std::int64_t queries : {1, 16, 170, 171, 4096}) {
    const MlaFormChoice choice = choose_form(deepseek({{1, 5000, 4999}, {queries, 8192, 8192 - queries}}));
    EXPECT_EQ(choice.form, queries <= 170 ? MlaForm::kAbsorbed : MlaForm::kExpanded) << queries;
    EXPECT_NE(choice.reason.find("absorbed up to 170"), std::string::npos) << choice.reason;
  }
  MlaJob named = deepseek(uniform_batch(1, 4096, 4096));
  named.form = MlaForm::kAbsorbed;
  EXPECT_EQ(choose_form(named).form, MlaForm::kAbsorbed);
  MlaJob narrow = deepseek(uniform_batch(1, 4096, 4096));
  narrow.spec.latent_dim = 64;  // a pair is cheaper in so small a latent
  EXPECT_EQ(choose_form(narrow).form, MlaForm::kAbsorbed);
}

TEST(MlaCost, OfDeepSeeksDims) {
  const MlaSpec spec = deepseek({}).spec;
  EXPECT_EQ(mla_gemm_flops(spec), 2.0 * 128 * 512 * 256);
  EXPECT_EQ(latent_token_bytes(spec) + k_rope_token_bytes(spec), 1152);
  EXPECT_EQ(expanded_token_bytes(spec), 128 * 320 * 2);
  EXPECT_EQ(mla_weight_bytes(spec), 128 * 256 * 512 * 2);
}

// GEMMs that the caller computes cost the plan no memory and no work.
TEST(MlaCost, OfQueriesAndOutputsInTheLatent) {
  MlaSpec spec = deepseek({}).spec;
  spec.q_in_latent = true;
  spec.head_dim = spec.latent_dim;
  EXPECT_EQ(mla_gemm_flops(spec), 2.0 * 128 * 512 * 128);
  EXPECT_EQ(mla_weight_bytes(spec), 128 * 128 * 512 * 2);
  EXPECT_EQ(expanded_token_bytes(spec), 0);
  EXPECT_EQ(choose_form({spec, uniform_batch(1, 4096, 4096), {}}).reason, "queries are in the latent");
  EXPECT_NE(describe(spec).find("head_dim 512+64/128, latent 512, queries in it, "), std::string::npos);
  spec.out_in_latent = true;
  spec.head_dim_v = spec.latent_dim;
  EXPECT_EQ(mla_gemm_flops(spec), 0.0);
  EXPECT_EQ(mla_weight_bytes(spec), 0);
  EXPECT_EQ(choose_form({spec, uniform_batch(1, 4096, 4096), {}}).form, MlaForm::kAbsorbed);
  EXPECT_FALSE(key_gemm(spec, MlaForm::kAbsorbed) || value_gemm(spec));
  const MlaChoice choice = choose_mla_kernels(spec, MlaForm::kAbsorbed, {"cpu", "auto"});
  EXPECT_TRUE(choice.keys == nullptr && choice.values == nullptr);
  EXPECT_EQ(choice.gemms(), "");
}

// Every key of every tile once, from where the plan has it, whatever the stripes do to tiles.
TEST(GatheredBlocks, HoldEveryTileOnce) {
  const MlaJob job = [] {
    MlaJob small = deepseek({{700, 700, 0}, {1, 1, 0}, {300, 300, 0}, {129, 900, 771}});
    small.spec.heads = 2;
    small.spec.mask = {-1, 0};
    small.form = MlaForm::kExpanded;
    return small;
  }();
  std::int64_t tiles = 0;
  for (const std::int64_t stripe : {37, 128, 256}) {
    run_threads_world(3, {}, [&](Transport& transport) {
      MlaOptions options;
      options.ring.kernel.backend = "cpu";
      options.ring.threads = 1;
      options.ring.layout.stripe = stripe;
      options.ring.block_tokens = 512;
      const Mla latent(job, transport, options);
      const Plan& plan = latent.plan();
      for (const BlockPlan& block : plan.blocks) {
        const GatheredBlock gathered = gather_block(plan, block);
        std::vector<int> seen(static_cast<std::size_t>(gathered.rows), 0);
        ASSERT_EQ(gathered.tiles.size(), block.tiles.size());
        for (const KeyRun& run : block.key_runs) {
          const std::int64_t keys = plan.key_lengths[static_cast<std::size_t>(run.sequence)];
          for (std::int64_t t = 0; t < run.tiles; ++t) {
            const auto entry = static_cast<std::size_t>(run.table + t);
            const std::int64_t rows =
                std::min<std::int64_t>(plan.kernel.key_tile, keys - (run.first_tile + t) * plan.kernel.key_tile);
            const PageRun at = gathered.tiles[entry];
            const auto from = std::ranges::find_if(gathered.runs, [&](const GatheredRun& candidate) {
              return candidate.to <= at.row && at.row + rows <= candidate.to + candidate.rows;
            });
            ASSERT_NE(from, gathered.runs.end());
            const PageRun origin{from->source, from->row + at.row - from->to};
            EXPECT_EQ(origin, block.tiles[entry]);
            for (std::int64_t row = 0; row < rows; ++row) ++seen[static_cast<std::size_t>(at.row + row)];
          }
        }
        EXPECT_EQ(std::ranges::count(seen, 1), gathered.rows);
        if (transport.rank() == 0) tiles += static_cast<std::int64_t>(block.tiles.size());
      }
    });
  }
  EXPECT_GT(tiles, 20);
}

MlaJob narrow_job(std::int64_t tokens, MlaForm form) {
  MlaJob job = deepseek(uniform_batch(1, tokens, tokens));
  job.spec.heads = 2;
  job.spec.head_dim = job.spec.rope_dim = job.spec.head_dim_v = job.spec.latent_dim = 8;
  job.form = form;
  return job;
}

TEST(MlaPlan, BlocksKeepTheirLimit) {
  const auto self = make_self_transport();
  MlaOptions options;
  options.ring.kernel.backend = "cpu";
  options.ring.threads = 1;
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    const std::int64_t limit = form == MlaForm::kExpanded ? 32768 : 131072;
    const Mla latent(narrow_job(300000, form), *self, options);
    EXPECT_EQ(latent.plan().blocks.size(), static_cast<std::size_t>((300000 + limit - 1) / limit));
    for (const BlockPlan& block : latent.plan().blocks) EXPECT_LE(block.last_token - block.first_token, limit);
  }
}

TEST(MlaPlan, WhatTravelsIsTheLatent) {
  const MlaJob job = [] {
    MlaJob of_16_heads = deepseek(uniform_batch(1, 1024, 1024));
    of_16_heads.spec.heads = 16;
    of_16_heads.form = MlaForm::kExpanded;
    return of_16_heads;
  }();
  run_threads_world(4, {}, [&](Transport& transport) {
    MlaOptions options;
    options.ring.kernel.backend = "cpu";
    options.ring.threads = 1;
    const Mla latent(job, transport, options);
    EXPECT_GT(latent.bytes_received(), 0);
    EXPECT_EQ(latent.bytes_received() * 16 * 320, latent.expanded_bytes_received() * 576);
    const double pairs = 1024.0 * 1025.0 / 2.0 * pair_flops(expanded_spec(job.spec, 16));
    double expanded = 0.0;
    for (const BlockPlan& block : latent.plan().blocks) expanded += block.flops;
    EXPECT_LT(expanded, pairs / 2.0 + 1024.0 * mla_gemm_flops(job.spec));
    EXPECT_GT(latent.time_estimate().seconds, expanded / latent.options().ring.machine.flops_per_second * 0.99);
  });
}

// Pairs by the form's attention, and in addition the GEMMs: of each key expanded, of each query absorbed.
TEST(MlaPlan, CountsTheGemms) {
  const auto self = make_self_transport();
  MlaOptions options;
  options.ring.kernel.backend = "cpu";
  options.ring.threads = 1;
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    MlaJob job = narrow_job(0, form);
    job.batch = {{100, 1000, 900}};
    const double pairs = 100.0 * 900.0 + 100.0 * 101.0 / 2.0;
    const double products = mla_gemm_flops(job.spec) * (form == MlaForm::kExpanded ? 1000.0 : 100.0);
    const double expected = pairs * pair_flops(form_spec(job.spec, form, 2)) + products;
    for (const std::int64_t block : {0, 128}) {
      options.ring.block_tokens = block;
      EXPECT_NEAR(Mla(job, *self, options).plan().flops(), expected, 1e-9 * expected) << form_name(form);
    }
  }
}

// The GPUs' kernels multiply no matrices of fp32: unasked, the CPU computes it, and says what was passed over.
TEST(MlaKernelSelection, HasGemmsOnTheBackendOfAttention) {
  MlaSpec spec = deepseek({}).spec;
  spec.dtype = Dtype::kF32;
  const auto of_cuda = [](const OpKernel& kernel) { return kernel.op == "attention" && kernel.row->backend == "cuda"; };
  const bool has_cuda = std::ranges::any_of(all_kernels(), of_cuda);
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    const MlaChoice choice = choose_mla_kernels(spec, form, {}, KernelScope::kAnyMachine);
    EXPECT_EQ(choice.attention.row->backend, "cpu");
    EXPECT_EQ(choice.keys->backend, "cpu");
    EXPECT_EQ(choice.values->backend, "cpu");
  }
  if (!has_cuda) GTEST_SKIP() << "this build has no cuda kernels";
  const MlaChoice expanded = choose_mla_kernels(spec, MlaForm::kExpanded, {}, KernelScope::kAnyMachine);
  EXPECT_NE(expanded.attention.reason.find("not sm80_simt: no cuda kernel runs the GEMMs"), std::string::npos)
      << expanded.attention.reason;
  const Error forced = error_of([&] {
    choose_mla_kernels(spec, MlaForm::kExpanded, {"cuda", "auto"}, KernelScope::kAnyMachine);
  });
  EXPECT_EQ(forced.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(forced.what()).find("Use backend = cpu, or dtypes"), std::string::npos) << forced.what();
  spec.dtype = Dtype::kBf16;
  EXPECT_EQ(choose_mla_kernels(spec, MlaForm::kExpanded, {}, KernelScope::kAnyMachine).keys->backend, "cuda");
}

// A job whose GEMMs the caller computes has no memory for them: neither rows nor matrices.
TEST(MlaPlan, HasNoMemoryForGemmsOfTheCaller) {
  const auto self = make_self_transport();
  MlaJob job = narrow_job(300, MlaForm::kAbsorbed);
  job.spec.head_dim = job.spec.head_dim_v = job.spec.latent_dim = 64;
  Mla whole(job, *self, on_the_cpu());
  const std::size_t scratch = make_mla_gemms(job.spec, "cpu", whole.backend()).scratch_bytes(job.spec);
  job.spec.q_in_latent = job.spec.out_in_latent = true;
  const Mla alone(job, *self, on_the_cpu());
  const std::size_t rows = 300U * 2U * 2U;  // of two heads in bf16
  EXPECT_EQ(whole.workspace_bytes() - alone.workspace_bytes(), aligned(rows * 72U) + aligned(rows * 64U));
  EXPECT_EQ(whole.plan().memory_bytes - alone.plan().memory_bytes, rows * (72U + 64U) + 2U * 128U * 64U * 2U + scratch);
  MlaJob forced = job;
  forced.form = MlaForm::kExpanded;
  EXPECT_EQ(error_of([&] { Mla(forced, *self, on_the_cpu()); }).code(), ErrorCode::kUsage);
}

// A budget that the workspace and the inputs exceed is refused; one as large as the plan says is not.
TEST(MlaPlan, MemoryCountsTheWorkspace) {
  const MlaJob job = narrow_job(3000, MlaForm::kExpanded);
  const auto self = make_self_transport();
  MlaOptions options;
  options.ring.kernel.backend = "cpu";
  options.ring.threads = 1;
  options.ring.block_tokens = 1024;
  const Mla free(job, *self, options);
  EXPECT_GT(free.plan().memory_bytes, free.workspace_bytes());
  options.ring.memory_budget = free.plan().memory_bytes;
  EXPECT_EQ(Mla(job, *self, options).plan().memory_bytes, free.plan().memory_bytes);
  options.ring.memory_budget = free.workspace_bytes();
  EXPECT_THROW(Mla(job, *self, options), Error);
}

}  // namespace
}  // namespace ringattn::testing
