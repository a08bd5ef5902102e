// SPDX-License-Identifier: Apache-2.0
// Decoding over a cache of latents has the bits of an absorbed Mla over the whole sequences: dense and in pages, on
// one rank and on several, for rows that join the cache step by step.
#include "ops/mla/mla_decode.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mla_gemms.hpp"
#include "tests/support/mla_rank.hpp"
#include "tests/support/mla_steps.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {
namespace {

constexpr int kSteps = 3;

MlaSpec small_spec(bool everything) {
  MlaSpec spec;
  spec.heads = 2;
  spec.head_dim = 16;
  spec.rope_dim = 8;
  spec.head_dim_v = 24;
  spec.latent_dim = 40;
  spec.softmax_scale = default_softmax_scale(spec);
  spec.sinks = everything;
  spec.softcap = everything ? 5.0F : 0.0F;
  return spec;
}

MlaOptions prefill_options() {
  MlaOptions options;
  options.ring.kernel.backend = "cpu";
  options.ring.threads = 1;
  return options;
}

DecodeOptions decode_options() {
  DecodeOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

// One rank's steps against its rows of the reference. Returns how many rows were compared.
std::int64_t decode_steps(Transport& transport, const MlaJob& job, const MlaTensors& tensors,
                          const JobResult& reference, int rows, std::int64_t page_size, bool enqueued,
                          const RowFormat& format = {}) {
  MlaDecode decode(mla_decode_job(job, rows, page_size, format), transport, decode_options());
  MlaSteps steps(decode, job, tensors);
  for (int step = 0; step < kSteps; ++step) {
    steps.load(step);
    if (enqueued) {
      decode.enqueue(steps.inputs(), steps.outputs());
      decode.wait();
    } else {
      decode.run(steps.inputs(), steps.outputs());
    }
    EXPECT_EQ(steps.difference(reference, step), "") << "step " << step << ", rank " << transport.rank();
  }
  return kSteps * steps.own_rows();
}

// The same on `world` ranks, whose rows are all of them.
void expect_steps_on(int world, const MlaJob& job, const MlaTensors& tensors, const JobResult& reference, int rows,
                     std::int64_t page_size, const RowFormat& format = {}) {
  SCOPED_TRACE("world " + std::to_string(world) + ", pages of " + std::to_string(page_size));
  std::vector<std::int64_t> compared(static_cast<std::size_t>(world), 0);
  const auto rank = [&](Transport& transport) {
    compared[static_cast<std::size_t>(transport.rank())] =
        decode_steps(transport, job, tensors, reference, rows, page_size, page_size == 16, format);
  };
  if (world == 1) {
    rank(*make_self_transport());
  } else {
    run_threads_world(world, {}, rank);
  }
  EXPECT_EQ(std::accumulate(compared.begin(), compared.end(), std::int64_t{0}), job.batch.q_tokens());
}

TEST(MlaDecode, HasTheBitsOfAnAbsorbedLatent) {
  const std::vector<std::int64_t> lengths = {12, 130, 300, 2 * 8192 + 5};
  for (const bool everything : {false, true}) {
    for (const int rows : {1, 2}) {
      const MlaJob job = stepwise_job(small_spec(everything), lengths, rows, kSteps);
      const MlaTensors tensors = random_mla_tensors(job, 21);
      const JobResult reference = run_mla_job(job, prefill_options(), tensors, 1);
      for (const int world : {1, 2, 3, 4, 5}) {
        for (const std::int64_t page_size : {0, 16, 64}) {
          expect_steps_on(world, job, tensors, reference, rows, page_size);
        }
      }
    }
  }
}

// Over FP8 rows, which new ones join: the bits over what they are unpacked to.
TEST(MlaDecode, Fp8RowsAreWhatTheyAreDequantizedTo) {
  MlaSpec spec = small_spec(true);
  spec.latent_dim = 256;
  spec.softmax_scale = default_softmax_scale(spec);
  const MlaJob job = stepwise_job(spec, {12, 130, 8192 + 5}, 2, kSteps);
  const MlaTensors tensors = random_mla_tensors(job, 22);
  const JobResult reference = run_mla_job(job, prefill_options(), with_fp8_latents(spec, tensors), 1);
  for (const int world : {1, 2, 3, 4, 5}) {
    for (const std::int64_t page_size : {0, 16, 64}) {
      expect_steps_on(world, job, tensors, reference, 2, page_size, latent_format(spec.rope_dim));
    }
  }
}

// Queries that a caller has brought into the latent, and outputs that it brings back, have the bits of the matrices.
TEST(MlaDecode, GemmsOfTheCallerHaveTheSameBits) {
  constexpr std::int64_t kSequences = 3, kRows = 2, kKeys = 300;
  const MlaSpec spec = small_spec(true);
  const int wide = spec.latent_dim + spec.rope_dim;
  std::mt19937_64 random(23);
  const MlaTensors tensors =
      random_mla_tensors({spec, uniform_batch(kSequences, kRows, kRows), MlaForm::kAbsorbed}, 24);
  std::vector<std::byte> cache = random_elements(kSequences * kKeys * wide, spec.dtype, random);
  std::vector<std::int32_t> lengths{2, 131, 300};
  const auto self = make_self_transport();
  MlaDecode decode({spec, {kSequences, kRows, kKeys}, 0, 0}, *self, decode_options());
  const auto step_of = [&](MlaDecode& by, const std::vector<std::byte>& q, const GemmWeights& w_uk,
                           const GemmWeights& w_uv) {
    const auto view_dim = w_uk.data == nullptr ? wide : spec.head_dim + spec.rope_dim;
    const int out_dim = w_uv.data == nullptr ? spec.latent_dim : spec.head_dim_v;
    MlaDecodeInputs inputs;
    inputs.q = dense_view(static_cast<const void*>(q.data()), spec.dtype, kSequences * kRows, spec.heads, view_dim);
    inputs.rows = kRows;
    inputs.cache = cache_view(cache.data(), spec.dtype, kSequences, kKeys, 1, wide);
    inputs.lengths = lengths.data();
    inputs.w_uk = w_uk;
    inputs.w_uv = w_uv;
    inputs.sinks = tensors.sinks.data();
    std::vector<std::byte> out(static_cast<std::size_t>(kSequences * kRows * spec.heads * out_dim) * 2,
                               std::byte{0xff});
    by.run(inputs,
           {dense_view(static_cast<void*>(out.data()), spec.dtype, kSequences * kRows, spec.heads, out_dim), {}});
    return out;
  };
  const auto step = [&](const std::vector<std::byte>& q, const GemmWeights& w_uk, const GemmWeights& w_uv) {
    return step_of(decode, q, w_uk, w_uv);
  };
  const GemmWeights w_uk = matrices_of(tensors.w_uk, spec, spec.head_dim);
  const GemmWeights w_uv = matrices_of(tensors.w_uv, spec, spec.head_dim_v);
  const std::vector<std::byte> whole = step(tensors.q, w_uk, w_uv);
  const std::vector<std::byte> absorbed = queries_in_latent(spec, tensors.q, tensors.w_uk, "cpu");
  EXPECT_EQ(step(absorbed, {}, w_uv), whole);
  EXPECT_EQ(outputs_from_latent(spec, step(absorbed, {}, {}), tensors.w_uv, "cpu"), whole);
  EXPECT_EQ(outputs_from_latent(spec, step(tensors.q, w_uk, {}), tensors.w_uv, "cpu"), whole);

  // Where queries and O are in the latent, the step has no memory for GEMMs, and no GEMM kernel.
  MlaSpec told = spec;
  told.head_dim = told.head_dim_v = spec.latent_dim;
  told.q_in_latent = told.out_in_latent = true;
  MlaDecode alone({told, {kSequences, kRows, kKeys}, 0, 0}, *self, decode_options());
  EXPECT_EQ(outputs_from_latent(spec, step_of(alone, absorbed, {}, {}), tensors.w_uv, "cpu"), whole);
  EXPECT_EQ(alone.memory().total(), alone.in_latent().memory().total());
  EXPECT_LT(alone.memory().total() + tensors.w_uk.size() + tensors.w_uv.size(), decode.memory().total());
  const Error given = error_of([&] { step_of(alone, absorbed, {}, w_uv); });
  EXPECT_EQ(given.code(), ErrorCode::kUsage);
  EXPECT_NE(std::string(given.what()).find("w_uv is given (the job's O stays in the latent space)"), std::string::npos)
      << given.what();
}

TEST(MlaDecode, RefusesWhatDoesNotFit) {
  const auto self = make_self_transport();
  const MlaSpec spec = small_spec(false);
  DecodeOptions options = decode_options();
  MlaDecode decode({spec, {2, 1, 100}, 16, 0}, *self, options);
  const std::vector<std::byte> zeros(1 << 16, std::byte{0});
  std::vector<std::byte> out(1 << 12);
  MlaDecodeInputs inputs;
  const auto view = [&](std::int64_t tokens, int heads, int dim) {
    return dense_view(static_cast<const void*>(zeros.data()), spec.dtype, tokens, heads, dim);
  };
  inputs.q = view(2, spec.heads, 48);  // in the latent, though w_uk is given
  inputs.w_uk = matrices_of(zeros, spec, spec.head_dim);
  inputs.w_uv = matrices_of(zeros, spec, spec.head_dim_v);
  const MlaOutputs outputs{dense_view(static_cast<void*>(out.data()), spec.dtype, 2, spec.heads, 24), {}};
  const auto message = [&] { return std::string(error_of([&] { decode.run(inputs, outputs); }).what()); };
  EXPECT_NE(message().find("q is bf16 [2, 2, 48]"), std::string::npos) << message();
  EXPECT_NE(message().find("bf16 [2, 2, 24]"), std::string::npos) << message();
  inputs.q = view(2, spec.heads, 24);
  inputs.latent = view(2, 1, 40);
  EXPECT_NE(message().find("one of latent and k_rope is missing"), std::string::npos) << message();
  inputs.k_rope = view(2, 1, 16);
  EXPECT_NE(message().find("k_rope is bf16 [2, 1, 16]"), std::string::npos) << message();
  inputs.latent = {};
  EXPECT_NE(message().find("one of latent and k_rope is missing"), std::string::npos) << message();
  inputs.k_rope = {};
  inputs.w_uv = {};
  EXPECT_NE(message().find("out is bf16 [2, 2, 24]"), std::string::npos) << message();

  const auto made = [&](const RowFormat& format, int latent_dim) {
    MlaSpec other = spec;
    other.latent_dim = latent_dim;
    return std::string(error_of([&] { MlaDecode({other, {2, 1, 100}, 16, 0, format}, *self, options); }).what());
  };
  EXPECT_NE(made(latent_format(4), 128).find("cached latents stored as latent rope 4"), std::string::npos);
  EXPECT_NE(made({RowEncoding::kInt8}, 128).find("plain or latent rope 8"), std::string::npos);
  EXPECT_NE(made(latent_format(8), 40).find("40 of 48 channels quantized"), std::string::npos);
  MlaSpec coded = spec;
  coded.latent_dim = 128;
  MlaSpec half = coded;
  half.dtype = Dtype::kF16;
  const Error of_half = error_of([&] { MlaDecode({half, {2, 1, 100}, 16, 0, latent_format(8)}, *self, options); });
  EXPECT_NE(std::string(of_half.what()).find("FP8 cached latents in a job of fp16"), std::string::npos)
      << of_half.what();
  EXPECT_EQ(MlaDecode({coded, {2, 1, 100}, 16, 0, latent_format(8)}, *self, options).in_latent().memory().cache,
            2U * 7U * 16U * (128U + 4U + 16U));

  EXPECT_GT(decode.memory().total(), decode.in_latent().memory().total());
  EXPECT_EQ(decode.in_latent().memory().cache, 2U * 7U * 16U * 48U * 2U) << "values lie in the keys";
}

// A refusal names what both the step in the latent and what is around it need, whichever of them is refused.
TEST(MlaDecode, NeedsTheMemoryThatARefusalNames) {
  const MlaDecodeJob job{small_spec(false), {2, 1, 100}, 16, 0};
  for (const int world : {1, 2}) {
    const auto message_with = [&](std::size_t budget) -> std::string {
      DecodeOptions options = decode_options();
      options.memory_budget = budget;
      std::vector<std::string> messages(static_cast<std::size_t>(world));
      const auto rank = [&](Transport& transport) {
        try {
          const MlaDecode decode(job, transport, options);
          if (budget != 0) {
            EXPECT_EQ(decode.memory().total(), budget);
          }
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kMemory) << error.what();
          messages[static_cast<std::size_t>(transport.rank())] = error.what();
        }
      };
      if (world == 1) {
        rank(*make_self_transport());
      } else {
        run_threads_world(world, {}, rank);
      }
      return messages[0];
    };
    const auto needed_of = [](const std::string& message) { return std::stoul(message.substr(message.find('(') + 1)); };
    const std::size_t needed = needed_of(message_with(1));
    EXPECT_EQ(message_with(needed), "") << world << " ranks";
    EXPECT_EQ(needed_of(message_with(needed - 1)), needed) << world << " ranks";
    EXPECT_EQ(message_with(0), "") << world << " ranks";
  }
}

}  // namespace
}  // namespace ringattn::testing
