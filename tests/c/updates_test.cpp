// SPDX-License-Identifier: Apache-2.0
// Convolutions, and updates of one token of convolutions and SSM layers, through the C interface: the bits of C++, in
// place, in slots, and what is refused.
#include <algorithm>
#include <array>
#include <cstring>

#include "comm/self.hpp"
#include "ops/conv1d/causal_conv1d.hpp"
#include "ops/ssm/ssm.hpp"
#include "tests/c/c_tensors.hpp"

namespace ringattn::testing {
namespace {

const DLDataType kFp32 = c_dtype(Dtype::kF32);
constexpr std::int64_t kChannels = 16, kWidth = 4, kHalo = (kWidth - 1) * kChannels;

ringattn_causal_conv1d_spec conv1d_spec() {
  auto spec = sized<ringattn_causal_conv1d_spec>();
  spec.dtype = kFp32;
  spec.width = kWidth;
  spec.channels = kChannels;
  spec.bias = spec.silu = 1;
  return spec;
}

CausalConv1dSpec same_spec() { return {Dtype::kF32, kChannels, kWidth, true, true}; }

struct Filters {
  Numbers weight = normal(kChannels * kWidth, 1), bias = normal(kChannels, 2);
  CTensor c_weight{weight.data(), kFp32, {kChannels, kWidth}}, c_bias{bias.data(), kFp32, {kChannels}};
};

TEST(CCausalConv1d, HasTheBitsOfCpp) {
  constexpr std::int64_t kTokens = 100;
  const Filters filters;
  const Numbers x = normal(kTokens * kChannels, 3), initial = normal(3 * kHalo, 4);
  Numbers y(x.size()), finals(initial.size()), c_y(x.size()), c_finals(initial.size());
  const std::vector<std::int64_t> lengths{0, 98, 2};
  const auto transport = make_self_transport();
  CausalConv1dOptions options;
  options.kernel.backend = "cpu";
  CausalConv1d door({same_spec(), lengths, true, true}, *transport, options);
  door.run({view(x, kTokens, 1, kChannels), filters.weight.data(), filters.bias.data(), initial.data()},
           {view(y, kTokens, 1, kChannels), finals.data()});

  SelfWorld world;
  const auto spec = conv1d_spec();
  auto batch = sized<ringattn_ssm_batch>();
  batch.sequences = 3;
  batch.lengths = lengths.data();
  batch.initial_states = batch.final_states = 1;
  ringattn_causal_conv1d* convolution = nullptr;
  ASSERT_EQ(ringattn_causal_conv1d_create(world.get(), &spec, &batch, nullptr, &convolution), RINGATTN_OK)
      << ringattn_error_text();
  auto facts = sized<ringattn_ssm_facts>();
  EXPECT_OK(ringattn_causal_conv1d_get_facts(convolution, &facts));
  EXPECT_EQ(facts.rows, kTokens);
  EXPECT_EQ(facts.beginning, 3);
  EXPECT_EQ(facts.ending, 3);
  EXPECT_EQ(facts.memory_bytes, 2 * kTokens * kChannels * sizeof(float));
  EXPECT_STREQ(facts.kernel, door.kernel().row->name.data());
  CTensor tx(x.data(), kFp32, {kTokens, 1, kChannels}), ty(c_y.data(), kFp32, {kTokens, 1, kChannels});
  CTensor ti(initial.data(), kFp32, {3, kWidth - 1, kChannels}), tf(c_finals.data(), kFp32, {3, kWidth - 1, kChannels});
  Filters c;
  auto tensors = sized<ringattn_causal_conv1d_tensors>();
  tensors.x = tx.get();
  tensors.weight = c.c_weight.get();
  tensors.bias = c.c_bias.get();
  tensors.initial_halos = ti.get();
  tensors.y = ty.get();
  tensors.final_halos = tf.get();
  EXPECT_OK(ringattn_causal_conv1d_run(convolution, &tensors));
  EXPECT_TRUE(same(c_y, y));
  EXPECT_TRUE(same(c_finals, finals));

  const auto refused = [&](const char* problem) {
    EXPECT_EQ(ringattn_causal_conv1d_run(convolution, &tensors), RINGATTN_USAGE);
    EXPECT_STREQ(ringattn_error_problem(), problem);
  };
  ti->shape[0] = 1;
  refused("initial_halos is [1, 3, 16]");
  ti->shape[0] = 3;
  tensors.bias = nullptr;
  refused("bias is missing");
  tensors.bias = c.c_bias.get();
  const std::array<std::int32_t, kTokens> numbers{};
  CTensor ts(numbers.data(), kInt32, {kTokens});
  tensors.slots = ts.get();
  refused("slots[1] is 0, as slots[0] is");
  tensors.slots = nullptr;
  tensors.final_halos = nullptr;
  refused("final_halos is missing");
  ringattn_causal_conv1d_destroy(convolution);
}

TEST(CCausalConv1d, RefusesWhatItHasNot) {
  SelfWorld world;
  auto spec = conv1d_spec();
  auto batch = sized<ringattn_ssm_batch>();
  auto options = sized<ringattn_options>();
  const std::int64_t length = 10;
  batch.sequences = 1;
  batch.lengths = &length;
  ringattn_causal_conv1d* convolution = nullptr;
  const auto refused = [&](ringattn_status status, const char* problem) {
    EXPECT_EQ(ringattn_causal_conv1d_create(world.get(), &spec, &batch, &options, &convolution), status);
    EXPECT_STREQ(ringattn_error_problem(), problem);
    EXPECT_STRNE(ringattn_error_suggestion(), "");
  };
  options.memory_budget = 1;
  refused(RINGATTN_USAGE, "ringattn_options::memory_budget is set");
  options.memory_budget = 0;
  spec.width = 5;
  refused(RINGATTN_USAGE, "a conv1d of width 5");
  spec.width = kWidth;
  spec.channels = -8;
  refused(RINGATTN_USAGE, "a conv1d of 0 channels");
  spec.channels = kChannels;
  batch.update = 1;
  refused(RINGATTN_USAGE, "an update of sequences with several tokens");
  batch.lengths = nullptr;
  refused(RINGATTN_USAGE, "an update without halos");
  batch.update = 0;
  refused(RINGATTN_USAGE, "ringattn_ssm_batch::lengths is NULL");
  batch.sequences = -1;
  refused(RINGATTN_USAGE, "a batch of -1 sequences is not possible");
  EXPECT_EQ(convolution, nullptr);
}

TEST(CCausalConv1d, UpdatesInSlotsHaveTheBitsOfRuns) {
  constexpr std::int64_t kRows = 3, kTokens = 12, kSlots = 5;
  const Filters filters;
  const Numbers x = normal(kRows * kTokens * kChannels, 3);  // [rows, tokens, channels]
  Numbers expected(x.size()), halos(kSlots * kHalo, -1.0F);
  const auto transport = make_self_transport();
  CausalConv1dOptions options;
  options.kernel.backend = "cpu";
  CausalConv1d door({same_spec(), std::vector<std::int64_t>(kRows, kTokens), false, false}, *transport, options);
  door.run({view(x, kRows * kTokens, 1, kChannels), filters.weight.data(), filters.bias.data()},
           {view(expected, kRows * kTokens, 1, kChannels)});

  SelfWorld world;
  const auto spec = conv1d_spec();
  auto batch = sized<ringattn_ssm_batch>();
  batch.sequences = kRows + 1;
  batch.initial_states = batch.final_states = 1;
  batch.update = 1;
  ringattn_causal_conv1d* convolution = nullptr;
  ASSERT_EQ(ringattn_causal_conv1d_create(world.get(), &spec, &batch, nullptr, &convolution), RINGATTN_OK)
      << ringattn_error_text();
  std::array<std::int32_t, kRows + 1> slots{4, 0, 2, -1};
  for (int row = 0; row < kRows; ++row)
    std::fill_n(halos.begin() + slots.at(static_cast<std::size_t>(row)) * kHalo, kHalo, 0.0F);
  Numbers rows((kRows + 1) * kChannels, 9.0F), y(rows.size());
  CTensor tx(rows.data(), kFp32, {kRows + 1, 1, kChannels}), ty(y.data(), kFp32, {kRows + 1, 1, kChannels});
  CTensor th(halos.data(), kFp32, {kSlots, kWidth - 1, kChannels}), ts(slots.data(), kInt32, {kRows + 1});
  Filters c;
  auto tensors = sized<ringattn_causal_conv1d_tensors>();
  tensors.x = tx.get();
  tensors.weight = c.c_weight.get();
  tensors.bias = c.c_bias.get();
  tensors.y = ty.get();
  tensors.final_halos = th.get();
  tensors.slots = ts.get();
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t row = 0; row < kRows; ++row) {
      std::copy_n(x.begin() + (row * kTokens + t) * kChannels, kChannels, rows.begin() + row * kChannels);
    }
    std::ranges::fill(y, 7.0F);
    ASSERT_EQ(ringattn_causal_conv1d_run(convolution, &tensors), RINGATTN_OK) << ringattn_error_text();
    for (std::int64_t row = 0; row < kRows; ++row) {
      EXPECT_EQ(std::memcmp(y.data() + row * kChannels, expected.data() + (row * kTokens + t) * kChannels,
                            kChannels * sizeof(float)),
                0);
    }
    EXPECT_TRUE(std::all_of(y.end() - kChannels, y.end(), [](float value) { return value == 0.0F; }));
  }
  for (const std::int64_t untouched : {1, 3}) {
    EXPECT_TRUE(std::all_of(halos.begin() + untouched * kHalo, halos.begin() + (untouched + 1) * kHalo,
                            [](float value) { return value == -1.0F; }));
  }
  slots = {4, 0, 5, -1};
  const Numbers before = halos;
  EXPECT_EQ(ringattn_causal_conv1d_run(convolution, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_text(),
               "slots[2] is 5 (there are 5 slots). Count them from 0; a number below 0 marks a padding row.");
  tensors.initial_halos = th.get();
  th->shape[0] = kRows + 1;
  slots = {3, 0, 2, -1};
  EXPECT_OK(ringattn_causal_conv1d_run(convolution, &tensors));  // in place, said twice
  Numbers apart(halos.size());
  CTensor ta(apart.data(), kFp32, {kRows + 1, kWidth - 1, kChannels});
  tensors.initial_halos = ta.get();
  EXPECT_EQ(ringattn_causal_conv1d_run(convolution, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "slots are given");
  ringattn_causal_conv1d_destroy(convolution);
}

TEST(CSsm, UpdatesHaveTheBitsOfCppInPlaceAndInSlots) {
  constexpr std::int64_t kRows = 3, kHeads = 2, kDim = 32, kStates = 16, kSlots = 6;
  constexpr std::int64_t kState = kHeads * kDim * kStates;
  const Numbers x = normal(kRows * kHeads * kDim, 1), dt(kRows * kHeads, 0.1F), b = normal(kRows * kStates, 2);
  const Numbers c = normal(kRows * kStates, 3), a{-0.5F, -1.0F}, initial = normal(kRows * kState, 4);
  Numbers y(x.size()), states(initial.size());
  SsmJob job;
  job.spec.dtype = Dtype::kF32;
  job.spec.heads = kHeads;
  job.spec.head_dim = kDim;
  job.spec.state_dim = kStates;
  job.lengths.assign(kRows, 1);
  job.initial_states = job.final_states = job.update = true;
  const auto transport = make_self_transport();
  SsmOptions options;
  options.kernel.backend = "cpu";
  Ssm door(job, *transport, options);
  SsmInputs inputs;
  inputs.x = view(x, kRows, kHeads, kDim);
  inputs.dt = view(dt, kRows, kHeads, 1);
  inputs.b = view(b, kRows, 1, kStates);
  inputs.c = view(c, kRows, 1, kStates);
  inputs.a = a.data();
  inputs.initial_states = initial.data();
  door.run(inputs, {view(y, kRows, kHeads, kDim), states.data()});

  SelfWorld world;
  auto spec = sized<ringattn_ssm_spec>();
  spec.dtype = kFp32;
  spec.heads = kHeads;
  spec.head_dim = kDim;
  spec.state_dim = kStates;
  auto batch = sized<ringattn_ssm_batch>();
  batch.sequences = kRows;
  batch.initial_states = batch.final_states = 1;
  batch.update = 1;
  ringattn_ssm* scan = nullptr;
  ASSERT_EQ(ringattn_ssm_create(world.get(), &spec, &batch, nullptr, &scan), RINGATTN_OK) << ringattn_error_text();
  Numbers c_y(x.size()), c_states = initial, slotted(kSlots * kState, -1.0F);
  CTensor tx(x.data(), kFp32, {kRows, kHeads, kDim}), tdt(dt.data(), kFp32, {kRows, kHeads, 1});
  CTensor tb(b.data(), kFp32, {kRows, 1, kStates}), tc(c.data(), kFp32, {kRows, 1, kStates});
  CTensor ta(a.data(), kFp32, {kHeads}), ty(c_y.data(), kFp32, {kRows, kHeads, kDim});
  CTensor tf(c_states.data(), kFp32, {kRows, kHeads, kDim, kStates});
  CTensor tall(slotted.data(), kFp32, {kSlots, kHeads, kDim, kStates});
  auto tensors = sized<ringattn_ssm_tensors>();
  tensors.x = tx.get();
  tensors.dt = tdt.get();
  tensors.b = tb.get();
  tensors.c = tc.get();
  tensors.a = ta.get();
  tensors.y = ty.get();
  tensors.final_states = tf.get();
  EXPECT_OK(ringattn_ssm_run(scan, &tensors));
  EXPECT_TRUE(same(c_y, y));
  EXPECT_TRUE(same(c_states, states));

  std::array<std::int32_t, kRows> slots{5, 0, 2};
  CTensor ts(slots.data(), kInt32, {kRows});
  for (std::int64_t row = 0; row < kRows; ++row) {
    std::copy_n(initial.begin() + row * kState, kState,
                slotted.begin() + slots.at(static_cast<std::size_t>(row)) * kState);
  }
  std::ranges::fill(c_y, 7.0F);
  tensors.slots = ts.get();
  tensors.final_states = tall.get();
  EXPECT_OK(ringattn_ssm_run(scan, &tensors));
  EXPECT_TRUE(same(c_y, y));
  for (std::int64_t row = 0; row < kRows; ++row) {
    EXPECT_EQ(std::memcmp(slotted.data() + slots.at(static_cast<std::size_t>(row)) * kState,
                          states.data() + row * kState, kState * 4),
              0);
  }
  EXPECT_TRUE(std::all_of(slotted.begin() + kState, slotted.begin() + 2 * kState, [](float v) { return v == -1.0F; }));

  slots = {5, 6, 2};
  EXPECT_EQ(ringattn_ssm_run(scan, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "slots[1] is 6");
  slots = {5, -1, 2};
  tensors.initial_states = tf.get();
  EXPECT_EQ(ringattn_ssm_run(scan, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "slots are given");
  EXPECT_STREQ(ringattn_error_why(), "initial_states and final_states differ");
  ringattn_ssm_destroy(scan);

  // A program that was compiled with the previous header: without `update` and `slots`.
  constexpr std::uint64_t kBatchBefore = 32, kTensorsBefore = 104;
  const std::int64_t lengths[kRows] = {1, 1, 1};
  batch.lengths = lengths;
  batch.size = kBatchBefore;
  tensors.size = kTensorsBefore;
  tensors.final_states = tf.get();
  CTensor ti(initial.data(), kFp32, {kRows, kHeads, kDim, kStates});
  tensors.initial_states = ti.get();
  ASSERT_EQ(ringattn_ssm_create(world.get(), &spec, &batch, nullptr, &scan), RINGATTN_OK) << ringattn_error_text();
  EXPECT_OK(ringattn_ssm_run(scan, &tensors));
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(c_y[i], y[i], 1e-4F) << i;  // a prefill, not an update
  ringattn_ssm_destroy(scan);
}

}  // namespace
}  // namespace ringattn::testing
