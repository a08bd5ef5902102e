// SPDX-License-Identifier: Apache-2.0
// Latents in FP8 rows are sent as stored, and equal the numbers that they are unpacked to: O and LSE have the
// bits of a job over those, in each form, for any number of ranks, blocks, heads at a time and strides.

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "kernels/quant/latent_rows.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {
namespace {

MlaSpec small_spec() {
  MlaSpec spec;
  spec.heads = 4;
  spec.head_dim = 16;
  spec.rope_dim = 8;
  spec.head_dim_v = 24;
  spec.latent_dim = 256;
  spec.mask = {-1, 0};
  spec.softmax_scale = default_softmax_scale(spec);
  return spec;
}

class Fp8Latents : public ::testing::TestWithParam<MlaForm> {
 protected:
  // Compares runs over FP8 rows with one over what they are unpacked to.
  void expect_bits_of_dequantized(
      const MlaSpec& spec, const Batch& batch, const std::function<void(MlaTensors&)>& spoil = [](MlaTensors&) {}) {
    const MlaJob plain{spec, batch, GetParam()};
    MlaJob packed = plain;
    packed.format = latent_format(spec.rope_dim);
    MlaTensors tensors = with_fp8_latents(spec, random_mla_tensors(plain, 7));
    spoil(tensors);
    const JobResult reference = run_mla_job(plain, on_the_cpu(), tensors, 1);
    tensors.latent.assign(tensors.latent.size(), std::byte{0xff});  // never read
    tensors.k_rope.assign(tensors.k_rope.size(), std::byte{0xff});
    for (const int world : {1, 2, 3, 5}) {
      for (const std::int64_t block : {0, 256}) {
        for (const MlaShape& shape : {MlaShape{}, MlaShape{.fused = true}}) {
          MlaOptions options = on_the_cpu();
          options.ring.block_tokens = block;
          options.heads_at_a_time = block == 0 ? 0 : 2;
          EXPECT_TRUE(run_mla_job(packed, options, tensors, world, shape).same_bits(reference))
              << "world " << world << ", block " << block << ", fused " << shape.fused;
        }
      }
    }
    MlaOptions options = on_the_cpu();
    options.ring.block_tokens = 128;
    options.ring.checksum = true;
    EXPECT_TRUE(run_mla_job(packed, options, tensors, 4, {}, {Route::kChain, 1, std::chrono::microseconds(300)})
                    .same_bits(reference));
  }
};

TEST_P(Fp8Latents, HaveTheBitsOfWhatTheyAreDequantizedTo) {
  expect_bits_of_dequantized(small_spec(), uniform_batch(1, 1000, 1000));
  MlaSpec spec = small_spec();
  spec.softcap = 5.0F;
  spec.sinks = true;
  spec.mask = {150, 30};
  expect_bits_of_dequantized(spec, {{1, 1, 0}, {300, 300, 0}, {0, 0, 0}, {64, 0, 0}, {17, 40, -9}, {5, 700, 695}});
  expect_bits_of_dequantized(small_spec(), uniform_batch(1, 1, 1));
}

TEST_P(Fp8Latents, AnInvalidValueAndAnInvalidScaleAreNan) {
  const MlaSpec spec = small_spec();
  expect_bits_of_dequantized(spec, uniform_batch(1, 400, 400), [&](MlaTensors& tensors) {
    const std::int64_t bytes = latent_row_bytes(spec.latent_dim, spec.rope_dim);
    std::byte* const row = tensors.packed.data() + 200 * bytes;
    row[17] = std::byte{0x7f};
    for (int i = 0; i < 4; ++i) row[bytes + spec.latent_dim + 4 + i] = std::byte{0xff};
    dequantize_latent_rows(tensors.packed.data(), bytes,
                           dense_view(static_cast<void*>(tensors.latent.data()), spec.dtype, 400, 1, spec.latent_dim),
                           dense_view(static_cast<void*>(tensors.k_rope.data()), spec.dtype, 400, 1, spec.rope_dim));
  });
}

INSTANTIATE_TEST_SUITE_P(Forms, Fp8Latents, ::testing::Values(MlaForm::kExpanded, MlaForm::kAbsorbed),
                         [](const ::testing::TestParamInfo<MlaForm>& form) {
                           return std::string(form_name(form.param));
                         });

// 656 bytes a token instead of 1,152.
TEST(Fp8LatentPlans, MoveTheirOwnBytes) {
  MlaSpec spec;
  spec.heads = 2;
  spec.mask = {-1, 0};
  spec.softmax_scale = default_softmax_scale(spec);
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    run_threads_world(3, {}, [&](Transport& transport) {
      const auto received = [&](const RowFormat& format) {
        return Mla({spec, uniform_batch(1, 3000, 3000), form, format}, transport, on_the_cpu()).bytes_received();
      };
      EXPECT_EQ(received(latent_format(64)) * 1152, received({}) * 656);
    });
  }
}

}  // namespace
}  // namespace ringattn::testing
