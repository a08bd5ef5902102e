// SPDX-License-Identifier: Apache-2.0
// Gradients of SSD through the C interface: the bits of C++, and what is refused.
#include "ops/ssd_backward/ssd_backward.hpp"

#include <string>
#include <utility>
#include <vector>

#include "comm/self.hpp"
#include "tests/c/c_tensors.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kRows = 100, kHeads = 2, kDim = 8, kStateDim = 16, kState = 2 * kHeads * kDim * kStateDim;
const DLDataType kFp32Type = c_dtype(Dtype::kF32);

struct Gradients {
  Numbers dx = Numbers(kRows * kHeads * kDim), dz = dx, ddt = Numbers(kRows * kHeads), db = Numbers(kRows * kStateDim),
          dc = db, initial = Numbers(kState), da = Numbers(kHeads), dd = da, bias = da;
};

TEST(CSsdBackward, HasTheBitsOfCpp) {
  const Numbers x = normal(kRows * kHeads * kDim, 1), z = normal(kRows * kHeads * kDim, 2),
                dy = normal(kRows * kHeads * kDim, 3), dt = normal(kRows * kHeads, 4), b = normal(kRows * kStateDim, 5),
                c = normal(kRows * kStateDim, 6), d = normal(kHeads, 7), bias = normal(kHeads, 8),
                initial = normal(kState, 9), final_gradients = normal(kState, 10);
  const Numbers a{-0.5F, -2.0F};
  const std::vector<std::int64_t> lengths{70, 30};
  SsdBackwardJob job;
  job.forward.spec = {Dtype::kF32, kHeads, kDim, kStateDim};
  job.forward.spec.skip = job.forward.spec.gate = job.forward.spec.dt_bias = job.forward.spec.dt_softplus = true;
  job.forward.lengths = lengths;
  job.forward.initial_states = job.final_gradients = true;
  job.gradients = Dtype::kF32;
  const auto transport = make_self_transport();
  SsmOptions options;
  options.kernel.backend = "cpu";
  SsdBackward backward(job, *transport, options);
  Gradients cpp;
  const SsdParameterGradients parameters = backward.run(
      {view(x, kRows, kHeads, kDim), view(dt, kRows, kHeads, 1), view(b, kRows, 1, kStateDim),
       view(c, kRows, 1, kStateDim), view(z, kRows, kHeads, kDim), view(dy, kRows, kHeads, kDim), a.data(), d.data(),
       bias.data(), initial.data(), final_gradients.data()},
      {view(cpp.dx, kRows, kHeads, kDim), view(cpp.ddt, kRows, kHeads, 1), view(cpp.db, kRows, 1, kStateDim),
       view(cpp.dc, kRows, 1, kStateDim), view(cpp.dz, kRows, kHeads, kDim), cpp.initial.data()});

  SelfWorld world;
  auto spec = sized<ringattn_ssm_spec>();
  spec.dtype = kFp32Type;
  spec.heads = kHeads;
  spec.head_dim = kDim;
  spec.state_dim = kStateDim;
  spec.skip = spec.gate = spec.dt_bias = spec.dt_softplus = 1;
  auto batch = sized<ringattn_ssm_batch>();
  batch.sequences = 2;
  batch.lengths = lengths.data();
  batch.initial_states = batch.final_states = 1;
  ringattn_ssd_backward* object = nullptr;
  ASSERT_EQ(ringattn_ssd_backward_create(world.get(), &spec, &batch, RINGATTN_GRADIENTS_FP32, nullptr, &object),
            RINGATTN_OK)
      << ringattn_error_text();
  auto facts = sized<ringattn_ssm_facts>();
  EXPECT_OK(ringattn_ssd_backward_get_facts(object, &facts));
  EXPECT_EQ(facts.rows, kRows);
  EXPECT_STREQ(facts.kernel, "cpu_ssd_backward");
  Gradients own;
  const auto tensor = [](const Numbers& numbers, std::vector<std::int64_t> shape) {
    return CTensor(numbers.data(), kFp32Type, std::move(shape));
  };
  const std::vector<std::int64_t> heads{kHeads}, like_x{kRows, kHeads, kDim}, like_dt{kRows, kHeads, 1},
      like_b{kRows, 1, kStateDim}, like_state{2, kHeads, kDim, kStateDim};
  CTensor cx = tensor(x, like_x), cz = tensor(z, like_x), cdy = tensor(dy, like_x), cdt = tensor(dt, like_dt),
          cb = tensor(b, like_b), cc = tensor(c, like_b), ca = tensor(a, heads), cd = tensor(d, heads),
          cbias = tensor(bias, heads), cinitial = tensor(initial, like_state),
          cfinal = tensor(final_gradients, like_state), cdx = tensor(own.dx, like_x), cdz = tensor(own.dz, like_x),
          cddt = tensor(own.ddt, like_dt), cdb = tensor(own.db, like_b), cdc = tensor(own.dc, like_b),
          cdinitial = tensor(own.initial, like_state), cda = tensor(own.da, heads), cdd = tensor(own.dd, heads),
          cdbias = tensor(own.bias, heads);
  auto tensors = sized<ringattn_ssd_backward_tensors>();
  tensors.x = cx.get();
  tensors.dt = cdt.get();
  tensors.b = cb.get();
  tensors.c = cc.get();
  tensors.z = cz.get();
  tensors.a = ca.get();
  tensors.d = cd.get();
  tensors.dt_bias = cbias.get();
  tensors.initial_states = cinitial.get();
  tensors.dy = cdy.get();
  tensors.dfinal_states = cfinal.get();
  tensors.dx = cdx.get();
  tensors.ddt = cddt.get();
  tensors.db = cdb.get();
  tensors.dc = cdc.get();
  tensors.dz = cdz.get();
  tensors.dinitial_states = cdinitial.get();
  tensors.da = cda.get();
  tensors.dd = cdd.get();
  tensors.ddt_bias = cdbias.get();
  EXPECT_OK(ringattn_ssd_backward_run(object, &tensors));
  EXPECT_TRUE(same(own.dx, cpp.dx) && same(own.ddt, cpp.ddt) && same(own.db, cpp.db) && same(own.dc, cpp.dc) &&
              same(own.dz, cpp.dz) && same(own.initial, cpp.initial));
  EXPECT_TRUE(same(own.da, parameters.da) && same(own.dd, parameters.dd) && same(own.bias, parameters.ddt_bias));

  EXPECT_EQ(ringattn_ssd_backward_enqueue(object, &tensors), RINGATTN_UNSUPPORTED);
  tensors.dd = nullptr;
  EXPECT_EQ(ringattn_ssd_backward_run(object, &tensors), RINGATTN_USAGE);
  EXPECT_NE(std::string(ringattn_error_text()).find("only one of d and its gradient"), std::string::npos);
  tensors.dd = cdd.get();
  tensors.dx = cx.get();
  EXPECT_EQ(ringattn_ssd_backward_run(object, &tensors), RINGATTN_USAGE);
  EXPECT_OK(ringattn_ssd_backward_wait(object));
  ringattn_ssd_backward_destroy(object);

  spec.state_decays = 1;
  spec.head_dim = 1;
  EXPECT_EQ(ringattn_ssd_backward_create(world.get(), &spec, &batch, RINGATTN_GRADIENTS_FP32, nullptr, &object),
            RINGATTN_UNSUPPORTED);
  EXPECT_NE(std::string(ringattn_error_text()).find("selective scans"), std::string::npos);
}

}  // namespace
}  // namespace ringattn::testing
