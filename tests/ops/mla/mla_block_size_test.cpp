// SPDX-License-Identifier: Apache-2.0
// How much of a block of latents is gathered at a time, and that a budget which a refusal names is enough.
#include "ops/mla/mla_block_size.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "comm/self.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "ops/mla/mla_work.hpp"
#include "tests/support/budget_refusal.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {
namespace {

MlaJob causal_job(std::int64_t tokens, MlaForm form, int heads, const RowFormat& format = {}) {
  MlaSpec spec;
  spec.heads = heads;
  spec.mask = {-1, 0};
  spec.softmax_scale = default_softmax_scale(spec);
  return {spec, uniform_batch(1, tokens, tokens), form, format};
}

// Chooses block sizes as a job with the CPU's kernels does.
class BlockSizeChooser {
 public:
  explicit BlockSizeChooser(const MlaJob& job) : job_(job) {
    const KernelRequest cpu{"cpu", "auto"};
    const AttentionSpec spec = form_spec(job.spec, *job.form, job.spec.heads);
    attention_row_ = choose_kernel(spec, cpu).row;
    backend_ = attention_row_->make_backend({1, kNoDevice});
    const auto product = [&](const BatchedGemmSpec& of) {
      return choose_kernel(of, cpu).row->make_kernel(of, *backend_);
    };
    keys_ = product(key_expansion(job.spec));
    values_ = product(value_expansion(job.spec));
  }

  MlaBlockSize block_size(const Options& options, int heads_at_a_time, int world) const {
    const auto attention = [this](int heads) {
      return attention_row_->make_kernel(form_spec(job_.spec, *job_.form, heads), *backend_);
    };
    return choose_mla_block_size(job_, options, heads_at_a_time, world, {attention, keys_.get(), values_.get()});
  }

 private:
  MlaJob job_;
  const AttentionRow* attention_row_ = nullptr;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<BatchedGemmKernel> keys_;
  std::unique_ptr<BatchedGemmKernel> values_;
};

TEST(MlaBlockSize, HeadsDivideAndFit) {
  const MlaJob job = causal_job(1 << 21, MlaForm::kExpanded, 128);
  const BlockSizeChooser chooser(job);
  Options options;
  const MlaBlockSize block_size = chooser.block_size(options, 0, 8);
  EXPECT_EQ(block_size.max_block_tokens, 32768);
  EXPECT_EQ(block_size.heads, 8);  // 16 would take 320 MiB
  EXPECT_EQ(chooser.block_size(options, 100, 8).heads, 64);
  EXPECT_EQ(chooser.block_size(options, 1000, 8).heads, 128);
  // What a rank of 64 needs anyway are 16 GiB of state, 4 of its own rows and 2 of other things.
  options.memory_budget = std::size_t{64} << 30;
  EXPECT_EQ(chooser.block_size(options, 0, 64), block_size) << "what isn't short is not saved";
  options.memory_budget = 1;
  EXPECT_EQ(chooser.block_size(options, 0, 64).heads, 1);
  EXPECT_EQ(chooser.block_size(options, 4, 64).heads, 4) << "stated heads are as they are stated";
  options.block_tokens = 4096;
  EXPECT_EQ(chooser.block_size(options, 0, 64).max_block_tokens, 0) << "stated blocks are as they are stated";
  EXPECT_EQ(error_of([&] { chooser.block_size(options, -1, 1); }).code(), ErrorCode::kUsage);
}

// A larger budget never gives smaller blocks.
TEST(MlaBlockSize, GrowsWithTheBudget) {
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    const MlaJob job = causal_job(100'000, form, 16);
    const BlockSizeChooser chooser(job);
    std::int64_t before = 0;
    std::int64_t sizes_seen = 0;
    for (std::int64_t budget = std::int64_t{1} << 28; budget < std::int64_t{1} << 33; budget += budget / 64) {
      Options options;
      options.memory_budget = static_cast<std::size_t>(budget);
      const MlaBlockSize block_size = chooser.block_size(options, 0, 4);
      const std::int64_t tokens = block_size.max_block_tokens > 0 ? block_size.max_block_tokens : job.batch.k_tokens();
      const std::int64_t bytes = tokens * gathered_row_bytes(job.spec, form, block_size.heads);
      EXPECT_GE(bytes, before) << budget;
      sizes_seen += bytes != before ? 1 : 0;
      before = bytes;
    }
    EXPECT_GE(sizes_seen, 3);
  }
}

struct BudgetCase {
  std::int64_t tokens;
  int heads;
  int world;
  std::int64_t block;
  RowFormat format = {};
};

TEST(MlaBudget, WhatARefusalNamesIsEnough) {
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    for (const BudgetCase& shape : {BudgetCase{900, 4, 1, 0},
                                    {900, 4, 1, 256},
                                    {900, 4, 3, 0},
                                    {900, 4, 3, 256},
                                    {5000, 3, 2, 0},
                                    {5000, 16, 1, 0},
                                    {20000, 2, 4, 0},
                                    {20000, 2, 4, 4096},
                                    {5000, 3, 2, 0, latent_format(64)},
                                    {5000, 16, 1, 0, latent_format(64)}}) {
      SCOPED_TRACE(fmt::format("{}, {} tokens, {} heads, {} ranks, blocks of {}", form_name(form), shape.tokens,
                               shape.heads, shape.world, shape.block));
      const MlaJob job = causal_job(shape.tokens, form, shape.heads, shape.format);
      const auto prepare = [&](std::size_t budget) {
        std::mutex mutex;
        const auto of_rank = [&](Transport& transport) {
          MlaOptions options;
          options.ring.kernel.backend = "cpu";
          options.ring.threads = 1;
          options.ring.block_tokens = shape.block;
          options.ring.memory_budget = budget;
          const Mla latent(job, transport, options);
          const std::lock_guard lock(mutex);
          EXPECT_LE(latent.plan().memory_bytes, budget);
        };
        if (shape.world > 1) return run_threads_world(shape.world, {}, of_rank);
        const auto self = make_self_transport();
        of_rank(*self);
      };
      const Refusal refused = refusal_of(error_of([&] { prepare(1); }));
      EXPECT_NO_THROW(prepare(refused.counted)) << refused.text;
      EXPECT_NO_THROW(prepare(refused.named)) << refused.text;
      EXPECT_GE(refused.named, refused.counted);
      const Error less = error_of([&] { prepare(refused.counted - 1); });
      EXPECT_EQ(less.code(), ErrorCode::kMemory) << less.what();
    }
  }
}

// A job with the smallest possible blocks has the bits of one with unlimited memory.
TEST(MlaBudget, ChangesNoBit) {
  const MlaJob job = [] {
    MlaJob small = causal_job(700, MlaForm::kExpanded, 4);
    small.spec.head_dim = small.spec.rope_dim = small.spec.head_dim_v = 16;
    small.spec.latent_dim = 64;
    return small;
  }();
  const MlaTensors tensors = random_mla_tensors(job, 7);
  MlaOptions options;
  options.ring.kernel.backend = "cpu";
  options.ring.threads = 1;
  const JobResult free = run_mla_job(job, options, tensors, 1);
  for (const int world : {1, 3}) {
    options.ring.memory_budget = 1;
    const Refusal refused = refusal_of(error_of([&] { run_mla_job(job, options, tensors, world); }));
    options.ring.memory_budget = refused.counted;
    EXPECT_TRUE(run_mla_job(job, options, tensors, world).out == free.out) << world << " ranks";
  }
}

}  // namespace
}  // namespace ringattn::testing
