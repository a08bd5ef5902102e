// SPDX-License-Identifier: Apache-2.0
// MLA on GPUs, over every attention kernel of the cuda backend that can do a form: O and LSE of several ranks,
// blocks, heads at a time and strides equal those of one rank, byte for byte, and are about what the CPU has. Ranks are
// threads of this process and share the GPUs that there are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels/quant/latent_rows.hpp"
#include "tests/support/gpu_rows.hpp"
#include "tests/support/mla_gemms.hpp"
#include "tests/support/mla_rank.hpp"
#include "tests/support/mla_reference.hpp"

namespace ringattn::testing {
namespace {

MlaSpec spec_of(Dtype dtype, int heads, int head_dim, int rope_dim, int head_dim_v, int latent_dim) {
  MlaSpec spec;
  spec.dtype = dtype;
  spec.heads = heads;
  spec.head_dim = head_dim;
  spec.rope_dim = rope_dim;
  spec.head_dim_v = head_dim_v;
  spec.latent_dim = latent_dim;
  spec.softmax_scale = default_softmax_scale(spec);
  return spec;
}
MlaSpec deepseek(Dtype dtype) { return spec_of(dtype, 4, 128, 64, 128, 512); }
MlaSpec narrow(Dtype dtype) { return spec_of(dtype, 6, 16, 8, 24, 40); }

class GpuMla : public GpuRowTest {
 protected:
  MlaOptions options(int heads_at_a_time = 0, std::int64_t block = 0) const {
    MlaOptions options;
    options.ring.kernel = {"cuda", std::string(GetParam().name)};
    options.ring.block_tokens = block;
    options.heads_at_a_time = heads_at_a_time;
    return options;
  }

  // What is worst, and where.
  static std::string beyond(const JobResult& found, const JobResult& expected, Dtype dtype, double tolerance) {
    double worst = 0.0;
    std::string where;
    const std::size_t element = size_of(dtype);
    for (std::size_t at = 0; at < expected.out.size(); at += element) {
      const double a = load_element(found.out.data() + at, dtype);
      const double b = load_element(expected.out.data() + at, dtype);
      const double off = std::abs(a - b);
      if (!(off <= worst)) {
        worst = std::isnan(off) ? INFINITY : off;
        where = fmt::format("element {} of O is {}, the CPU has {}", at / element, a, b);
      }
    }
    return worst <= tolerance ? std::string() : where;
  }

  // False where the kernel can't do the job.
  bool check(const MlaJob& job) const {
    const MlaForm form = *job.form;
    for (const int heads : {1, job.spec.heads}) {
      if (!GetParam().missing(form_spec(job.spec, form, heads)).empty()) return false;
    }
    const std::string name = fmt::format("{}, {}", describe(job), form_name(form));
    const MlaTensors tensors = random_mla_tensors(job, 5);
    const JobResult one = run_gpu_mla_job(job, options(), tensors, 1);
    MlaOptions cpu;
    cpu.ring.kernel.backend = "cpu";
    cpu.ring.threads = 2;
    // A few roundings of numbers up to 4: GEMMs, probabilities and O.
    EXPECT_EQ(
        beyond(one, run_mla_job(job, cpu, tensors, 1), job.spec.dtype, job.spec.dtype == Dtype::kBf16 ? 0.0625 : 0.008),
        "")
        << name;
    const auto same = [&](int world, const MlaOptions& asked, const MlaShape& shape) {
      EXPECT_TRUE(run_gpu_mla_job(job, asked, tensors, world, shape).same_bits(one))
          << name << ": " << world << " ranks, " << asked.heads_at_a_time << " heads at a time, block "
          << asked.ring.block_tokens << (shape.fused ? ", views of fused tensors" : "");
    };
    for (const int world : {1, 2, 3, 4, 5}) {
      same(world, options(), {});
      same(world, options(2, 256), {});
      same(world, options(1, 384), {.fused = true});
    }
    return true;
  }
};

// Latents in FP8 rows are unpacked where a block has arrived.
TEST_P(GpuMla, Fp8RowsHaveTheBitsOfWhatTheyAreDequantizedTo) {
  bool any = false;
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    const MlaJob plain{deepseek(Dtype::kBf16), {{700, 700, 0}, {1, 1, 0}, {3, 300, 297}}, form};
    if (!GetParam().missing(form_spec(plain.spec, form, form == MlaForm::kExpanded ? 2 : 4)).empty()) continue;
    any = true;
    MlaJob packed = plain;
    packed.format = latent_format(plain.spec.rope_dim);
    const MlaTensors tensors = with_fp8_latents(plain.spec, random_mla_tensors(plain, 5));
    const JobResult expected = run_gpu_mla_job(plain, options(2, 256), tensors, 1);
    for (const int world : {1, 2, 3, 4, 5}) {
      for (const bool fused : {false, true}) {
        EXPECT_TRUE(run_gpu_mla_job(packed, options(2, 256), tensors, world, {.fused = fused}).same_bits(expected))
            << form_name(form) << ", " << world << " ranks, fused " << fused;
      }
    }
  }
  if (!any) GTEST_SKIP() << GetParam().name << " folds neither form";
}

// A caller may multiply w_uk and w_uv in by itself: the bits are the same.
TEST_P(GpuMla, GemmsOfTheCallerHaveTheSameBits) {
  bool any = false;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    for (const MlaSpec& spec : {deepseek(dtype), narrow(dtype)}) {
      if (!GetParam().missing(absorbed_spec(spec)).empty()) continue;
      any = true;
      const MlaJob job{spec, {{300, 700, 400}, {1, 1, 0}, {0, 0, 0}, {5, 129, 124}}, MlaForm::kAbsorbed};
      const MlaTensors tensors = random_mla_tensors(job, 6);
      MlaTensors absorbed = tensors;
      absorbed.q = queries_in_latent(spec, tensors.q, tensors.w_uk, "cuda");
      const JobResult whole = run_gpu_mla_job(job, options(), tensors, 1);
      JobResult back = run_gpu_mla_job(job, options(), absorbed, 1, {.q_in_latent = true, .out_in_latent = true});
      back.out = outputs_from_latent(spec, back.out, tensors.w_uv, "cuda");
      EXPECT_TRUE(back.same_bits(whole)) << describe(job);
      MlaJob told = job;  // which says so, and has no GEMM kernels
      told.spec.head_dim = told.spec.head_dim_v = spec.latent_dim;
      told.spec.q_in_latent = told.spec.out_in_latent = true;
      back = run_gpu_mla_job(told, options(), absorbed, 1, {.q_in_latent = true, .out_in_latent = true});
      back.out = outputs_from_latent(spec, back.out, tensors.w_uv, "cuda");
      EXPECT_TRUE(back.same_bits(whole)) << describe(told);
    }
  }
  if (!any) GTEST_SKIP() << GetParam().name << " doesn't fold latents";
}

TEST_P(GpuMla, RanksBlocksHeadsAndViewsHaveTheSameBits) {
  const Batch ragged = {{1, 1, 0}, {300, 300, 0}, {0, 0, 0}, {129, 129, 0}, {5, 700, 695}};
  bool any = false;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
      any |= check({deepseek(dtype), ragged, form});
      any |= check({narrow(dtype), ragged, form});
    }
  }
  EXPECT_TRUE(any) << GetParam().name << " can do neither form";
}

// fp64 of the whole formula, latents and matrices in, O out.
TEST_P(GpuMla, BothFormsAgainstTheOracle) {
  const Batch ragged = {{1, 1, 0}, {129, 129, 0}, {0, 0, 0}, {3, 300, 297}, {20, 70, 50}};
  bool any = false;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
      for (const MlaSpec& spec : {deepseek(dtype), narrow(dtype)}) {
        if (!GetParam().missing(form_spec(spec, form, spec.heads)).empty()) continue;
        any = true;
        const MlaJob job{spec, ragged, form};
        const MlaTensors tensors = random_mla_tensors(job, 8);
        SCOPED_TRACE(fmt::format("{}, {}", describe(job), form_name(form)));
        expect_as_right(job, tensors, run_gpu_mla_job(job, options(), tensors, 1));
      }
    }
  }
  EXPECT_TRUE(any) << GetParam().name << " can do neither form";
}

RINGATTN_FOR_EVERY_CUDA_KERNEL(GpuMla);

}  // namespace
}  // namespace ringattn::testing
