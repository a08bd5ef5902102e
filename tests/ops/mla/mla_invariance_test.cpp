// SPDX-License-Identifier: Apache-2.0
// The promise for latent attention: in each form O and LSE have the same bits for any number of ranks, layout, block
// size, heads expanded at a time, strides, delivery and number of threads.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "tests/support/mla_gemms.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {
namespace {

MlaSpec small_spec(Dtype dtype, const Mask& mask) {
  MlaSpec spec;
  spec.dtype = dtype;
  spec.heads = 6;
  spec.head_dim = 16;
  spec.rope_dim = 8;
  spec.head_dim_v = 24;
  spec.latent_dim = 40;
  spec.mask = mask;
  spec.softmax_scale = default_softmax_scale(spec);
  return spec;
}

MlaSpec with_everything(MlaSpec spec) {
  spec.softcap = 5.0F;
  spec.sinks = true;
  return spec;
}

struct Case {
  const char* name;
  MlaJob job;

  friend std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name; }
};

std::vector<Case> cases() {
  const Batch ragged = {{1, 1, 0},  {300, 300, 0}, {0, 0, 0},    {129, 129, 0}, {5, 700, 695},
                        {64, 0, 0}, {127, 127, 0}, {17, 40, -9}, {128, 128, 0}};
  const std::pair<const char*, MlaJob> jobs[] = {
      {"causal", {small_spec(Dtype::kBf16, {-1, 0}), uniform_batch(1, 1000, 1000), {}}},
      {"ragged", {with_everything(small_spec(Dtype::kBf16, {-1, 0})), ragged, {}}},
      {"full_fp32", {small_spec(Dtype::kF32, {-1, -1}), uniform_batch(1, 333, 777), {}}},
      {"window_fp16", {small_spec(Dtype::kF16, {150, 30}), uniform_batch(2, 600, 600), {}}},
      {"one_token", {small_spec(Dtype::kBf16, {-1, 0}), uniform_batch(1, 1, 1), {}}},
      {"one_query", {small_spec(Dtype::kBf16, {-1, 0}), uniform_batch(1, 1, 2000), {}}},
  };
  static std::vector<std::string> names;
  std::vector<Case> all;
  names.reserve(2 * std::size(jobs));
  for (const auto& [name, job] : jobs) {
    for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
      names.push_back(std::string(name) + "_" + std::string(form_name(form)));
      all.push_back({names.back().c_str(), job});
      all.back().job.form = form;
    }
  }
  return all;
}

class MlaInvariance : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    job_ = GetParam().job;
    tensors_ = random_mla_tensors(job_, 7);
    reference_ = run_mla_job(job_, on_the_cpu(), tensors_, 1);
  }

  void expect_same(const MlaOptions& options, int world, const std::string& what, const MlaShape& shape = {},
                   const ThreadsDelivery& delivery = {}) {
    const JobResult result = run_mla_job(job_, options, tensors_, world, shape, delivery);
    EXPECT_TRUE(result.same_bits(reference_)) << what << ", world " << world;
  }

  MlaJob job_;
  MlaTensors tensors_;
  JobResult reference_;
};

TEST_P(MlaInvariance, WorldsLayoutsAndBlocks) {
  for (const int world : {1, 2, 3, 4, 5, 7}) {
    for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous}) {
      for (const std::int64_t block : {0, 128, 512}) {
        MlaOptions options = on_the_cpu();
        options.ring.layout.kind = kind;
        options.ring.block_tokens = block;
        expect_same(options, world, std::string(layout_name(kind)) + ", block " + std::to_string(block));
      }
    }
  }
}

TEST_P(MlaInvariance, HeadsAtATime) {
  for (const int heads : {1, 2, 3, 4, 6, 100}) {
    for (const int world : {1, 3}) {
      MlaOptions options = on_the_cpu();
      options.heads_at_a_time = heads;
      options.ring.block_tokens = 256;
      expect_same(options, world, std::to_string(heads) + " heads at a time");
    }
  }
}

TEST_P(MlaInvariance, StripesThatCutTiles) {
  for (const std::int64_t stripe : {1, 37, 200}) {
    MlaOptions options = on_the_cpu();
    options.ring.layout.stripe = stripe;
    options.ring.block_tokens = 384;
    options.heads_at_a_time = 2;
    expect_same(options, 3, "stripe " + std::to_string(stripe));
  }
}

TEST_P(MlaInvariance, ViewsOfFusedTensors) {
  for (const int world : {1, 4}) {
    MlaOptions options = on_the_cpu();
    options.heads_at_a_time = 2;
    expect_same(options, world, "fused", {.fused = true});
  }
}

TEST_P(MlaInvariance, ThreadsAndDelivery) {
  for (const int threads : {2, 3}) expect_same(on_the_cpu(threads), 2, std::to_string(threads) + " threads");
  for (const Route route : {Route::kDirect, Route::kChain}) {
    MlaOptions options = on_the_cpu();
    options.ring.block_tokens = 256;
    options.ring.checksum = route == Route::kChain;
    options.ring.overlap = route == Route::kDirect;
    expect_same(options, 5, "shuffled delivery", {}, {route, 1, std::chrono::microseconds(300)});
  }
}

INSTANTIATE_TEST_SUITE_P(Jobs, MlaInvariance, ::testing::ValuesIn(cases()),
                         [](const ::testing::TestParamInfo<Case>& job) { return std::string(job.param.name); });

// Rows whose keys are one more than a KV split of the CPU's kernel has, which ranks share; and as many heads as models
// have.
TEST(MlaExpanded, AcrossAKvSplitsEdgeAndWithManyHeads) {
  MlaJob edge{small_spec(Dtype::kBf16, {-1, 0}), {{20, 8193, 8173}, {2, 8192, 8190}}, MlaForm::kExpanded};
  edge.spec.heads = 2;
  MlaJob many{small_spec(Dtype::kBf16, {-1, 0}), {{30, 300, 270}, {129, 129, 0}}, MlaForm::kExpanded};
  many.spec.heads = 64;
  MlaJob most = many;
  most.spec.heads = 128;
  for (const MlaJob* const job : {&edge, &many, &most}) {
    const MlaTensors tensors = random_mla_tensors(*job, 17);
    const JobResult one = run_mla_job(*job, on_the_cpu(), tensors, 1);
    for (const int world : {1, 3, 5}) {
      for (const int heads : {0, job->spec.heads / 2}) {
        MlaOptions options = on_the_cpu();
        options.heads_at_a_time = heads;
        EXPECT_TRUE(run_mla_job(*job, options, tensors, world).same_bits(one)) << describe(*job) << ", " << world;
      }
    }
  }
}

// The same job, which says that its queries, or O, are in the latent.
MlaJob in_latent(MlaJob job, bool q, bool out) {
  if (q) job.spec.head_dim = job.spec.latent_dim;
  if (out) job.spec.head_dim_v = job.spec.latent_dim;
  job.spec.q_in_latent = q;
  job.spec.out_in_latent = out;
  return job;
}

// A caller may multiply w_uk and w_uv in by itself: the bits are the same, whether or not the job says so.
TEST(MlaOutside, QueriesAndOutputsInTheLatent) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    MlaJob job{small_spec(dtype, {-1, 0}), {{20, 300, 280}, {3, 129, 126}, {1, 1, 0}}, MlaForm::kAbsorbed};
    const MlaSpec& spec = job.spec;
    const MlaTensors tensors = random_mla_tensors(job, 9);
    MlaTensors absorbed = tensors;
    absorbed.q = queries_in_latent(spec, tensors.q, tensors.w_uk, "cpu");
    const JobResult whole = run_mla_job(job, on_the_cpu(), tensors, 1);
    for (const int world : {1, 3}) {
      EXPECT_TRUE(run_mla_job(job, on_the_cpu(), absorbed, world, {.q_in_latent = true}).same_bits(whole));
      JobResult back = run_mla_job(job, on_the_cpu(), absorbed, world, {.q_in_latent = true, .out_in_latent = true});
      back.out = outputs_from_latent(spec, back.out, tensors.w_uv, "cpu");
      EXPECT_TRUE(back.same_bits(whole)) << "world " << world;
      JobResult values = run_mla_job(job, on_the_cpu(), tensors, world, {.out_in_latent = true});
      values.out = outputs_from_latent(spec, values.out, tensors.w_uv, "cpu");
      EXPECT_TRUE(values.same_bits(whole)) << "world " << world;

      const MlaShape both{.q_in_latent = true, .out_in_latent = true};
      EXPECT_TRUE(run_mla_job(in_latent(job, true, false), on_the_cpu(), absorbed, world, {.q_in_latent = true})
                      .same_bits(whole));
      back = run_mla_job(in_latent(job, true, true), on_the_cpu(), absorbed, world, both);
      back.out = outputs_from_latent(spec, back.out, tensors.w_uv, "cpu");
      EXPECT_TRUE(back.same_bits(whole)) << "world " << world;
      values = run_mla_job(in_latent(job, false, true), on_the_cpu(), tensors, world, {.out_in_latent = true});
      values.out = outputs_from_latent(spec, values.out, tensors.w_uv, "cpu");
      EXPECT_TRUE(values.same_bits(whole)) << "world " << world;
    }
  }
}

// Layers that are enqueued consecutively share a workspace, and give the bits that they give one by one.
TEST(MlaLayers, OneBehindTheOther) {
  constexpr int kLayers = 3;
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    const MlaJob job{small_spec(Dtype::kBf16, {-1, 0}), uniform_batch(1, 400, 400), form};
    const MlaSpec& spec = job.spec;
    run_threads_world(2, {}, [&](Transport& transport) {
      MlaOptions options = on_the_cpu();
      options.ring.block_tokens = 128;
      Mla latent(job, transport, options);
      const MlaTensors tensors = random_mla_tensors(job, 13);
      std::vector<std::byte> workspace(latent.workspace_bytes(), std::byte{0xff});
      const std::int64_t rows = latent.q_rows();
      const auto view = [&](const std::vector<std::byte>& bytes, std::int64_t count, int heads, int dim) {
        return dense_view(static_cast<const void*>(bytes.data()), spec.dtype, count, heads, dim);
      };
      std::vector<std::vector<std::byte>> outs(2 * kLayers);
      for (int i = 0; i < 2 * kLayers; ++i) {  // first one by one, then enqueued; a layer has its own matrices
        MlaInputs inputs;
        inputs.q = view(tensors.q, rows, spec.heads, spec.head_dim + spec.rope_dim);
        inputs.latent = view(tensors.latent, latent.k_rows(), 1, spec.latent_dim);
        inputs.k_rope = view(tensors.k_rope, latent.k_rows(), 1, spec.rope_dim);
        inputs.w_uk = matrices_of(tensors.w_uk, spec, spec.head_dim);
        inputs.w_uv = matrices_of(tensors.w_uv, spec, spec.head_dim_v);
        inputs.w_uv.head_stride = (i % kLayers) * spec.latent_dim;
        std::vector<std::byte>& out = outs[static_cast<std::size_t>(i)];
        out.assign(static_cast<std::size_t>(rows * spec.heads * spec.head_dim_v) * 2, std::byte{0xff});
        const MlaOutputs outputs{
            dense_view(static_cast<void*>(out.data()), spec.dtype, rows, spec.heads, spec.head_dim_v), {}};
        if (i < kLayers) {
          latent.run(inputs, outputs, workspace);
        } else {
          latent.enqueue(inputs, outputs, workspace);
        }
      }
      latent.wait();
      for (std::size_t i = 0; i < kLayers; ++i) EXPECT_EQ(outs[i], outs[i + kLayers]) << "layer " << i;
      EXPECT_NE(outs[0], outs[1]);
    });
  }
}

}  // namespace
}  // namespace ringattn::testing
