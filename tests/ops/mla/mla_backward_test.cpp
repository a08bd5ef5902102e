// SPDX-License-Identifier: Apache-2.0
// Gradients of expanded MLA: against finite differences of the fp64 oracle, and with the same bits for any number of
// ranks, layout, heads at a time and, for rows, batch.
#include "ops/mla/mla_backward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "kernels/mla/mla_oracle.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mla_backward_job.hpp"

namespace ringattn::testing {
namespace {

MlaSpec small_spec(Dtype dtype, const Mask& mask) {
  MlaSpec spec;
  spec.dtype = dtype;
  spec.heads = 4;
  spec.head_dim = 16;
  spec.rope_dim = 8;
  spec.head_dim_v = 24;
  spec.latent_dim = 40;
  spec.mask = mask;
  spec.softmax_scale = default_softmax_scale(spec);
  return spec;
}

// Σ dO ∘ O + Σ dLSE ∘ LSE over the batch, in fp64.
double loss_of(const MlaJob& job, const MlaBackwardData& data, const MlaTensors& tensors) {
  const MlaSpec& spec = job.spec;
  double loss = 0.0;
  std::int64_t q = 0;
  std::int64_t k = 0;
  for (const Sequence& s : job.batch.sequences) {
    const auto rows = [&](const std::vector<std::byte>& packed, std::int64_t first, std::int64_t count,
                          std::int64_t heads, std::int64_t dim) {
      const std::size_t offset = static_cast<std::size_t>(first * heads * dim) * size_of(spec.dtype);
      return dense_view(static_cast<const void*>(packed.data() + offset), spec.dtype, count, heads, dim);
    };
    std::vector<double> out;
    std::vector<double> lse;
    oracle_mla_attention(
        spec, matrices_of(tensors.w_uk, spec, spec.head_dim), matrices_of(tensors.w_uv, spec, spec.head_dim_v),
        rows(tensors.q, q, s.q_len, spec.heads, spec.head_dim + spec.rope_dim),
        rows(tensors.latent, k, s.k_len, 1, spec.latent_dim), rows(tensors.k_rope, k, s.k_len, 1, spec.rope_dim),
        s.q_offset, spec.sinks ? tensors.sinks.data() : nullptr, out, lse);
    const TensorView dout = rows(data.dout, q, s.q_len, spec.heads, spec.head_dim_v);
    for (std::size_t i = 0; i < out.size(); ++i) {
      loss += out[i] * static_cast<double>(load_element(dout.at(0, 0) + i * size_of(spec.dtype), spec.dtype));
    }
    for (std::size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(lse[i])) continue;  // a row without keys
      loss += lse[i] * static_cast<double>(data.dlse[static_cast<std::size_t>(q * spec.heads) + i]);
    }
    q += s.q_len;
    k += s.k_len;
  }
  return loss;
}

// Checks sampled elements of a gradient by central differences of two steps, whose errors of second order cancel.
void expect_derivatives(const char* name, std::size_t size, const std::function<double(std::size_t, double)>& loss_at,
                        const std::function<double(std::size_t)>& gradient) {
  double most = 0.0;
  for (std::size_t i = 0; i < size; ++i) most = std::max(most, std::abs(gradient(i)));
  EXPECT_GT(most, 0.0) << name;
  std::mt19937_64 generator(11);
  for (int sample = 0; sample < 12; ++sample) {
    const std::size_t at = generator() % size;
    constexpr double kStep = 0x1p-6;
    const double coarse = (loss_at(at, 2 * kStep) - loss_at(at, -2 * kStep)) / (4 * kStep);
    const double fine = (loss_at(at, kStep) - loss_at(at, -kStep)) / (2 * kStep);
    EXPECT_NEAR(gradient(at), (4.0 * fine - coarse) / 3.0, 2e-5 * most) << name << ", element " << at;
  }
}

TEST(MlaBackward, IsTheDerivativeOfTheOracle) {
  MlaJob job{small_spec(Dtype::kF32, {-1, 0}),
             {{13, 13, 0}, {0, 0, 0}, {1, 1, 0}, {5, 17, 12}, {7, 4, -2}},
             MlaForm::kExpanded};
  job.spec.softcap = 4.0F;
  job.spec.sinks = true;
  MlaBackwardData data = random_mla_backward_data(job, 3);
  // Multiples of 2⁻¹², so that steps are exact.
  const auto rounded = [](std::vector<std::byte>& elements) {
    for (std::size_t at = 0; at < elements.size(); at += sizeof(float)) {
      const float value = load_element(elements.data() + at, Dtype::kF32);
      store_element(elements.data() + at, Dtype::kF32, std::round(value * 0x1p12F) * 0x1p-12F);
    }
  };
  for (auto* elements :
       {&data.forward.q, &data.forward.latent, &data.forward.k_rope, &data.forward.w_uk, &data.forward.w_uv}) {
    rounded(*elements);
  }
  data.result = run_mla_job(job, on_the_cpu(), data.forward, 1);
  const MlaGradients gradients = differentiate_mla(job, on_the_cpu(), data, 2);
  const auto check = [&](const char* name, std::vector<std::byte> MlaTensors::*tensor, const void* gradient) {
    const std::size_t size = (data.forward.*tensor).size() / sizeof(float);
    expect_derivatives(
        name, size,
        [&](std::size_t i, double step) {
          MlaTensors moved = data.forward;
          std::byte* const at = (moved.*tensor).data() + i * sizeof(float);
          store_element(at, Dtype::kF32, load_element(at, Dtype::kF32) + static_cast<float>(step));
          return loss_of(job, data, moved);
        },
        [&](std::size_t i) { return static_cast<double>(static_cast<const float*>(gradient)[i]); });
  };
  check("dq", &MlaTensors::q, gradients.dq.data());
  check("dlatent", &MlaTensors::latent, gradients.dlatent.data());
  check("dk_rope", &MlaTensors::k_rope, gradients.dk_rope.data());
  check("dw_uk", &MlaTensors::w_uk, gradients.dw_uk[0].data());
  check("dw_uv", &MlaTensors::w_uv, gradients.dw_uv[1].data());
  expect_derivatives(
      "dsinks", data.forward.sinks.size(),
      [&](std::size_t i, double step) {
        MlaTensors moved = data.forward;
        moved.sinks[i] += static_cast<float>(step);
        return loss_of(job, data, moved);
      },
      [&](std::size_t i) { return static_cast<double>(gradients.dsinks[0][i]); });
}

// bf16 rounds K, V, P, dS, dK and dV; fp32 of the same inputs is right by the test above.
TEST(MlaBackward, RoundsAsOftenAsItSays) {
  MlaJob job{small_spec(Dtype::kBf16, {-1, 0}), uniform_batch(1, 300, 300), MlaForm::kExpanded};
  const MlaBackwardData data = random_mla_backward_data(job, 5);
  const MlaGradients rounded = differentiate_mla(job, on_the_cpu(), data, 1);
  MlaJob wide = job;
  wide.spec.dtype = Dtype::kF32;
  const auto widened = [](const std::vector<std::byte>& elements) {
    std::vector<std::byte> floats(2 * elements.size());
    for (std::size_t i = 0; i < elements.size() / 2; ++i) {
      store_element(floats.data() + 4 * i, Dtype::kF32, load_element(elements.data() + 2 * i, Dtype::kBf16));
    }
    return floats;
  };
  MlaBackwardData wide_data = data;
  wide_data.forward = {widened(data.forward.q),
                       widened(data.forward.latent),
                       widened(data.forward.k_rope),
                       widened(data.forward.w_uk),
                       widened(data.forward.w_uv),
                       {},
                       {}};
  wide_data.result = run_mla_job(wide, on_the_cpu(), wide_data.forward, 1);
  wide_data.dout = widened(data.dout);
  const MlaGradients exact = differentiate_mla(wide, on_the_cpu(), wide_data, 1);
  const auto expect_near = [](const char* name, const std::vector<std::byte>& made, Dtype dtype,
                              const std::vector<std::byte>& expected) {
    double error = 0.0;
    double size = 0.0;
    for (std::size_t i = 0; i < expected.size() / 4; ++i) {
      const double right = load_element(expected.data() + 4 * i, Dtype::kF32);
      const double is = load_element(made.data() + size_of(dtype) * i, dtype);
      error += (is - right) * (is - right);
      size += right * right;
    }
    EXPECT_LT(std::sqrt(error / size), 0x1p-7) << name;
    EXPECT_GT(error, 0.0) << name;
  };
  const auto bytes_of = [](const std::vector<float>& values) {
    const auto* const begin = reinterpret_cast<const std::byte*>(values.data());
    return std::vector<std::byte>(begin, begin + values.size() * sizeof(float));
  };
  expect_near("dq", rounded.dq, Dtype::kBf16, exact.dq);
  expect_near("dlatent", rounded.dlatent, Dtype::kBf16, exact.dlatent);
  expect_near("dk_rope", rounded.dk_rope, Dtype::kBf16, exact.dk_rope);
  expect_near("dw_uk", bytes_of(rounded.dw_uk[0]), Dtype::kF32, bytes_of(exact.dw_uk[0]));
  expect_near("dw_uv", bytes_of(rounded.dw_uv[0]), Dtype::kF32, bytes_of(exact.dw_uv[0]));
}

TEST(MlaBackward, WorldsLayoutsAndHeadsAtATime) {
  const Batch ragged = {{1, 1, 0}, {300, 300, 0}, {0, 0, 0}, {129, 129, 0}, {5, 700, 695}, {64, 0, 0}, {17, 40, -9}};
  MlaJob jobs[] = {{small_spec(Dtype::kBf16, {-1, 0}), ragged, MlaForm::kExpanded},
                   {small_spec(Dtype::kF32, {100, 30}), uniform_batch(2, 333, 333), MlaForm::kExpanded},
                   // Units of tokens that ranks share, and a sequence of more than one.
                   {small_spec(Dtype::kBf16, {-1, 0}), {{40, 2500, 2460}, {3, 2048, 2045}}, MlaForm::kExpanded}};
  jobs[0].spec.sinks = true;
  for (const MlaJob& job : jobs) {
    const MlaBackwardData data = random_mla_backward_data(job, 7);
    const MlaGradients reference = differentiate_mla(job, on_the_cpu(), data, 1);
    for (const int world : {1, 2, 3, 5}) {
      for (const LayoutKind kind : {LayoutKind::kStriped, LayoutKind::kContiguous}) {
        MlaOptions options = on_the_cpu(world == 2 ? 2 : 1);
        options.ring.layout.kind = kind;
        if (world == 3) options.ring.layout.stripe = 37;
        options.heads_at_a_time = world == 5 ? 3 : 4 - world;
        expect_same_gradients(differentiate_mla(job, options, data, world), reference,
                              std::string(layout_name(kind)) + ", world " + std::to_string(world));
      }
    }
  }
}

// The first sequence alone, and with another one: its rows have the same bits.
TEST(MlaBackward, RowsDependOnTheirSequenceAlone) {
  const MlaJob both{small_spec(Dtype::kBf16, {-1, 0}), {{130, 200, 70}, {90, 90, 0}}, MlaForm::kExpanded};
  const MlaBackwardData data = random_mla_backward_data(both, 9);
  MlaJob first = both;
  first.batch = {{130, 200, 70}};
  const MlaGradients all = differentiate_mla(both, on_the_cpu(), data, 2);
  const MlaGradients alone = differentiate_mla(first, on_the_cpu(), data, 1);
  const auto begins = [](const std::vector<std::byte>& packed, const std::vector<std::byte>& part) {
    return std::equal(part.begin(), part.end(), packed.begin());
  };
  EXPECT_TRUE(begins(all.dq, alone.dq));
  EXPECT_TRUE(begins(all.dlatent, alone.dlatent));
  EXPECT_TRUE(begins(all.dk_rope, alone.dk_rope));
}

TEST(MlaBackward, RefusesByName) {
  const auto self = make_self_transport();
  const auto refused = [&](const MlaJob& job, const MlaOptions& options, const char* part) {
    const Error error = error_of([&] { MlaBackward(job, *self, options); });
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  };
  MlaJob job{small_spec(Dtype::kBf16, {-1, 0}), uniform_batch(1, 40, 40), MlaForm::kAbsorbed};
  refused(job, on_the_cpu(), "no gradients for the absorbed form");
  job.form.reset();  // 40 queries: the absorbed form is chosen
  refused(job, on_the_cpu(), "no gradients for the absorbed form");
  MlaJob fp8 = job;
  fp8.form = MlaForm::kExpanded;
  fp8.spec.latent_dim = 128;
  fp8.format = latent_format(fp8.spec.rope_dim);
  refused(fp8, on_the_cpu(), "no gradients for FP8 latents");
  MlaOptions budget = on_the_cpu();
  budget.ring.memory_budget = std::size_t{1} << 30;
  job.form = MlaForm::kExpanded;
  refused(job, budget, "no gradients for MLA within a memory budget");
}

}  // namespace
}  // namespace ringattn::testing
