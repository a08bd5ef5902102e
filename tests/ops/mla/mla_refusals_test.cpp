// SPDX-License-Identifier: Apache-2.0
// What Mla refuses, with both shapes named and on all ranks together.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {
namespace {

// packed: latents lie in FP8 rows, of 148 bytes.
MlaJob small_job(MlaForm form, bool packed = false) {
  MlaSpec spec;
  spec.dtype = Dtype::kF32;
  spec.heads = 2;
  spec.head_dim = 16;
  spec.rope_dim = 8;
  spec.head_dim_v = 24;
  spec.latent_dim = 40;
  if (!packed) return {spec, uniform_batch(1, 400, 400), form};
  spec.dtype = Dtype::kBf16;
  spec.latent_dim = 128;
  return {spec, uniform_batch(1, 400, 400), form, latent_format(spec.rope_dim)};
}

void expect_message(const Error& error, ErrorCode code, const std::vector<std::string>& parts) {
  EXPECT_EQ(error.code(), code) << error.what();
  for (const std::string& part : parts) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\nlacks: " << part;
  }
}

TEST(MlaRefusals, JobsAndOptionsThatContradictThemselves) {
  const auto self = make_self_transport();
  const auto refused = [&](const std::function<void(MlaJob&, MlaOptions&)>& spoil, ErrorCode code,
                           const std::vector<std::string>& parts) {
    MlaJob job = small_job(MlaForm::kExpanded);
    MlaOptions options = on_the_cpu();
    spoil(job, options);
    expect_message(error_of([&] { Mla(job, *self, options); }), code, parts);
  };
  refused([](MlaJob& job, MlaOptions&) { job.spec.heads = 0; }, ErrorCode::kUsage, {"0 query heads"});
  refused([](MlaJob& job, MlaOptions&) { job.spec.rope_dim = 0; }, ErrorCode::kUsage, {"rope_dim 0"});
  refused([](MlaJob& job, MlaOptions&) { job.spec.mask = {-2, 0}; }, ErrorCode::kUsage, {"window -2,0"});
  refused([](MlaJob& job, MlaOptions&) { job.batch = {{-1, 4, 0}}; }, ErrorCode::kUsage, {});
  refused([](MlaJob&, MlaOptions& options) { options.heads_at_a_time = -1; }, ErrorCode::kUsage,
          {"-1 heads at a time"});
  refused([](MlaJob&, MlaOptions& options) { options.ring.state_out = true; }, ErrorCode::kUsage, {"state"});
  refused([](MlaJob&, MlaOptions& options) { options.ring.shorter_lengths = true; }, ErrorCode::kUsage,
          {"shorter lengths"});
  for (const int dim : {0, -8, (1 << 16) + 8, std::numeric_limits<int>::max()}) {
    refused([dim](MlaJob& job, MlaOptions&) { job.spec.latent_dim = dim; }, ErrorCode::kUsage, {"1 to 65536"});
    refused([dim](MlaJob& job, MlaOptions&) { job.spec.head_dim = dim; }, ErrorCode::kUsage, {"1 to 65536"});
  }
  refused([](MlaJob& job, MlaOptions&) { job.spec.latent_dim = 41; }, ErrorCode::kUnsupported, {"k 41"});
  refused([](MlaJob& job, MlaOptions&) { job.spec.q_in_latent = true; }, ErrorCode::kUsage,
          {"queries in a latent space of 40 dims with head_dim 16", "Set head_dim to 40"});
  refused([](MlaJob& job, MlaOptions&) { job.spec.out_in_latent = true; }, ErrorCode::kUsage,
          {"O in a latent space of 40 dims with head_dim_v 24"});
  refused(
      [](MlaJob& job, MlaOptions&) {
        job.spec.q_in_latent = true;
        job.spec.head_dim = 40;
      },
      ErrorCode::kUsage, {"the expanded form with queries in the latent", "form = absorbed"});
  const auto of_fp8 = [](const std::function<void(MlaJob&)>& spoil_packed) {
    return [spoil_packed](MlaJob& job, MlaOptions&) {
      job = small_job(MlaForm::kExpanded, true);
      spoil_packed(job);
    };
  };
  refused(of_fp8([](MlaJob& job) { job.format = {.encoding = RowEncoding::kFp8}; }), ErrorCode::kUsage,
          {"latents stored as fp8 token_head", "plain or latent rope 8"});
  refused(of_fp8([](MlaJob& job) { job.format.rope = 12; }), ErrorCode::kUsage,
          {"latents stored as latent rope 12", "rotary keys of 8"});
  refused(of_fp8([](MlaJob& job) { job.spec.latent_dim = 100; }), ErrorCode::kUsage, {"latent", "128"});
  refused(of_fp8([](MlaJob& job) { job.spec.dtype = Dtype::kF16; }), ErrorCode::kUsage, {"latent", "bf16"});
}

// Inputs of zeros that fit a small_job(), and where they are spoiled.
struct RankInputs {
  std::vector<float> numbers = std::vector<float>(1 << 16, 0.0F), results = numbers;
  MlaInputs inputs;
  MlaOutputs outputs;
  std::vector<std::byte> workspace;

  RankInputs(const Mla& latent, const MlaJob& job) : workspace(latent.workspace_bytes()) {
    const MlaSpec& spec = job.spec;
    const auto view = [&](std::int64_t rows, int heads, int dim) {
      return dense_view(static_cast<void*>(numbers.data()), spec.dtype, rows, heads, dim);
    };
    inputs.q = view(latent.q_rows(), spec.heads, spec.head_dim + spec.rope_dim);
    if (job.format.is_plain()) {
      inputs.latent = view(latent.k_rows(), 1, spec.latent_dim);
      inputs.k_rope = view(latent.k_rows(), 1, spec.rope_dim);
    } else {
      inputs.fp8_rows = {reinterpret_cast<std::byte*>(numbers.data()), 148, 148};
    }
    const auto matrices = [&](int dim_n) {
      return GemmWeights{
          numbers.data(),  spec.dtype, spec.heads, dim_n, spec.latent_dim, std::int64_t{dim_n} * spec.latent_dim,
          spec.latent_dim, 1};
    };
    inputs.w_uk = matrices(spec.head_dim);
    inputs.w_uv = matrices(spec.head_dim_v);
    outputs.out =
        dense_view(static_cast<void*>(results.data()), spec.dtype, latent.q_rows(), spec.heads, spec.head_dim_v);
  }
};

using Spoil = std::function<void(RankInputs&)>;

struct RefusedJob {
  MlaForm form;
  Spoil spoil;
  std::vector<std::string> parts;
  bool packed = false;
};

std::vector<RefusedJob> refusals() {
  using enum MlaForm;
  return {
      {kExpanded, [](RankInputs& r) { r.inputs.q.dim = 25; }, {"q is fp32 [", ", 2, 25]", ", 2, 24]"}},
      {kExpanded, [](RankInputs& r) { r.inputs.q.dim = 48; }, {", 2, 48]", ", 2, 24]"}},
      {kExpanded, [](RankInputs& r) { r.inputs.latent.dim = 64; }, {"latent is fp32", ", 1, 64]", ", 1, 40]"}},
      {kExpanded, [](RankInputs& r) { ++r.inputs.latent.tokens; }, {"latent is fp32", "Mla::layout()"}},
      {kExpanded, [](RankInputs& r) { r.inputs.k_rope.heads = 2; }, {"k_rope is fp32", ", 2, 8]", ", 1, 8]"}},
      {kExpanded, [](RankInputs& r) { r.inputs.w_uk.dim_n = 24; }, {"w_uk is fp32 [2, 24, 40]", "fp32 [2, 16, 40]"}},
      {kExpanded, [](RankInputs& r) { r.inputs.w_uv.dim_k = 16; }, {"w_uv is fp32 [2, 24, 16]", "fp32 [2, 24, 40]"}},
      {kExpanded, [](RankInputs& r) { r.inputs.w_uv.dtype = Dtype::kBf16; }, {"w_uv is bf16", "fp32 [2, 24, 40]"}},
      {kExpanded, [](RankInputs& r) { r.inputs.w_uv.k_stride = 2; }, {"w_uv has strides 960, 40 and 2"}},
      {kExpanded, [](RankInputs& r) { r.inputs.w_uk = {}; }, {"w_uk is missing", "expanded"}},
      {kExpanded, [](RankInputs& r) { r.inputs.w_uv = {}; }, {"w_uv is missing", "expanded"}},
      {kExpanded, [](RankInputs& r) { r.outputs.out.dim = 40; }, {"out is fp32", ", 2, 40]", ", 2, 24]"}},
      {kExpanded, [](RankInputs& r) { r.outputs.out.data = r.numbers.data(); }, {"out overlaps q"}},
      {kExpanded, [](RankInputs& r) { r.inputs.sinks = r.numbers.data(); }, {"sinks are given"}},
      {kExpanded, [](RankInputs& r) { r.workspace.pop_back(); }, {"the workspace has", "are needed"}},
      {kAbsorbed, [](RankInputs& r) { r.inputs.w_uk = {}; }, {"q is fp32", ", 2, 24]", ", 2, 48]"}},
      {kAbsorbed, [](RankInputs& r) { r.inputs.q.dim = 48; }, {"q is fp32", ", 2, 48]", ", 2, 24]"}},
      {kAbsorbed, [](RankInputs& r) { r.inputs.w_uv = {}; }, {"out is fp32", ", 2, 24]", ", 2, 40]"}},
      {kAbsorbed, [](RankInputs& r) { r.outputs.out.dim = 40; }, {"out is fp32", ", 2, 40]", ", 2, 24]"}},
      {kAbsorbed, [](RankInputs& r) { r.inputs.fp8_rows.data = r.workspace.data(); }, {"fp8_rows is given"}},
      {kExpanded, [](RankInputs& r) { r.inputs.fp8_rows = {}; }, {"fp8_rows is missing"}, true},
      {kExpanded, [](RankInputs& r) { r.inputs.latent.data = r.numbers.data(); }, {"latent is given"}, true},
      {kAbsorbed, [](RankInputs& r) { r.inputs.k_rope.data = r.numbers.data(); }, {"k_rope is given"}, true},
      {kExpanded, [](RankInputs& r) { r.inputs.fp8_rows.token_stride = 146; }, {"146 bytes apart", "148 bytes"}, true},
      {kAbsorbed, [](RankInputs& r) { r.inputs.fp8_rows.token_stride = 149; }, {"149 bytes apart", "even"}, true},
      {kAbsorbed, [](RankInputs& r) { ++r.inputs.fp8_rows.data; }, {"the FP8 rows lie at", "even"}, true},
      {kExpanded, [](RankInputs& r) { r.outputs.out.data = r.numbers.data(); }, {"out overlaps"}, true},
  };
}

// One rank of three is wrong; all hear of it, and a right run after it works.
TEST(MlaRefusals, WrongShapesOnAllRanksTogether) {
  for (const RefusedJob& refusal : refusals()) {
    std::atomic<int> refused{0};
    run_threads_world(3, {}, [&](Transport& transport) {
      const MlaJob job = small_job(refusal.form, refusal.packed);
      Mla latent(job, transport, on_the_cpu());
      RankInputs right(latent, job);
      RankInputs wrong(latent, job);
      if (transport.rank() == 1) refusal.spoil(wrong);
      expect_message(error_of([&] { latent.run(wrong.inputs, wrong.outputs, wrong.workspace); }), ErrorCode::kUsage,
                     refusal.parts);
      ++refused;
      latent.run(right.inputs, right.outputs, right.workspace);
    });
    EXPECT_EQ(refused, 3);
  }
}

TEST(MlaRefusals, RanksThatRunDifferentJobs) {
  run_threads_world(2, {}, [&](Transport& transport) {
    MlaJob other = small_job(MlaForm::kExpanded);
    other.batch = uniform_batch(1, 300, 300);
    Mla first(small_job(MlaForm::kExpanded), transport, on_the_cpu());
    Mla second(other, transport, on_the_cpu());
    Mla& mine = transport.rank() == 0 ? first : second;
    RankInputs given(mine, mine.job());
    expect_message(error_of([&] { mine.run(given.inputs, given.outputs, given.workspace); }), ErrorCode::kUsage,
                   {"rank 1 and rank 0 run different jobs"});
  });
}

TEST(MlaRefusals, RanksOfOtherForms) {
  run_threads_world(2, {}, [&](Transport& transport) {
    const MlaJob job = small_job(transport.rank() == 0 ? MlaForm::kExpanded : MlaForm::kAbsorbed);
    expect_message(error_of([&] { Mla(job, transport, on_the_cpu()); }), ErrorCode::kUnsupported,
                   {"form", "absorbed", "expanded"});
  });
}

}  // namespace
}  // namespace ringattn::testing
