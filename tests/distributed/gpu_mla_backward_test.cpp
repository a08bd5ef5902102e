// SPDX-License-Identifier: Apache-2.0
// Gradients of expanded MLA on GPUs: near those of the CPU, and with the same bytes for any number of ranks. Ranks are
// threads of this process and share the GPUs that there are.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/gpu.hpp"
#include "comm/self.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/mla_backward_job.hpp"

namespace ringattn::testing {
namespace {

TEST(GpuMlaBackward, WorldsAndHeadsAtATime) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  MlaSpec spec;
  spec.heads = 4;
  spec.sinks = true;
  spec.softmax_scale = default_softmax_scale(spec);
  const MlaJob job{spec, {{300, 300, 0}, {0, 0, 0}, {70, 2500, 2430}, {1, 1, 0}}, MlaForm::kExpanded};
  const MlaBackwardData data = random_mla_backward_data(job, 4);
  MlaOptions options;
  options.ring.kernel.backend = "cuda";
  const MlaGradients reference = differentiate_mla_on_gpus(job, options, data, 1);
  for (const int world : {1, 2, 3}) {
    options.heads_at_a_time = world;
    expect_same_gradients(differentiate_mla_on_gpus(job, options, data, world), reference, std::to_string(world));
  }
  const MlaGradients near = differentiate_mla(job, on_the_cpu(4), data, 1);
  const auto expect_near = [](const char* name, std::size_t count, const auto& made, const auto& expected) {
    double error = 0.0;
    double size = 0.0;
    for (std::size_t i = 0; i < count; ++i) {
      error += (made(i) - expected(i)) * (made(i) - expected(i));
      size += expected(i) * expected(i);
    }
    EXPECT_LT(std::sqrt(error / size), 0x1p-7) << name;
  };
  const auto rows = [](const std::vector<std::byte>& elements) {
    return [&elements](std::size_t i) -> double { return load_element(elements.data() + 2 * i, Dtype::kBf16); };
  };
  const auto floats = [](const std::vector<float>& values) {
    return [&values](std::size_t i) -> double { return values[i]; };
  };
  expect_near("dq", near.dq.size() / 2, rows(reference.dq), rows(near.dq));
  expect_near("dlatent", near.dlatent.size() / 2, rows(reference.dlatent), rows(near.dlatent));
  expect_near("dk_rope", near.dk_rope.size() / 2, rows(reference.dk_rope), rows(near.dk_rope));
  expect_near("dw_uk", near.dw_uk[0].size(), floats(reference.dw_uk[0]), floats(near.dw_uk[0]));
  expect_near("dw_uv", near.dw_uv[0].size(), floats(reference.dw_uv[0]), floats(near.dw_uv[0]));
  expect_near("dsinks", near.dsinks[0].size(), floats(reference.dsinks[0]), floats(near.dsinks[0]));
}

// GPUs have no fp32 GEMM.
TEST(GpuMlaBackward, Fp32IsRefusedOnGpusAndTakesTheCpu) {
  if (visible_gpus().empty()) GTEST_SKIP() << "needs a GPU: " << gpus_unavailable();
  MlaSpec spec;
  spec.heads = 2;
  spec.dtype = Dtype::kF32;
  spec.softmax_scale = default_softmax_scale(spec);
  const MlaJob job{spec, {{30, 30, 0}}, MlaForm::kExpanded};
  const auto self = make_self_transport();
  EXPECT_EQ(MlaBackward(job, *self, {}).kernel().row->backend, "cpu");
  MlaOptions options;
  options.ring.kernel.backend = "cuda";
  const Error refused = error_of([&] { MlaBackward(job, *self, options); });
  EXPECT_EQ(refused.code(), ErrorCode::kUnsupported);
  EXPECT_NE(std::string(refused.what()).find("no cuda kernel runs the GEMMs"), std::string::npos) << refused.what();
}

}  // namespace
}  // namespace ringattn::testing
