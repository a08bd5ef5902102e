// SPDX-License-Identifier: Apache-2.0
// Gradients of attention through the C interface: the bits of C++, the forward's shards, and refusals by name.
#include <array>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "tests/c/c_tensors.hpp"
#include "tests/support/backward_job.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kQueryLengths[] = {0, 30, 100}, kKeyLengths[] = {0, 40, 90};
constexpr std::int64_t kQueries = 130, kKeys = 130, kQueryHeads = 4, kKvHeads = 2, kHeadDim = 64, kHeadDimV = 32;

Job backward_job() {
  Job job;
  job.spec = make_spec(Dtype::kBf16, kQueryHeads, kKvHeads, kHeadDim, Mask{50, 3}, kHeadDimV);
  job.spec.softcap = 20.0F;
  job.spec.sinks = true;
  job.batch = packed_batch(std::vector<std::int64_t>{0, 0, 30, 130}, std::vector<std::int64_t>{0, 0, 40, 130}, {});
  return job;
}

ringattn_spec backward_spec() {
  auto spec = sized<ringattn_spec>();
  spec.dtype = c_dtype(Dtype::kBf16);
  spec.heads = kQueryHeads;
  spec.kv_heads = kKvHeads;
  spec.head_dim = kHeadDim;
  spec.head_dim_v = kHeadDimV;
  spec.mask = RINGATTN_WINDOW;
  spec.window_left = 50;
  spec.window_right = 3;
  spec.softcap = 20.0F;
  spec.sinks = 1;
  return spec;
}

ringattn_batch backward_batch() {
  auto batch = sized<ringattn_batch>();
  batch.sequences = 3;
  batch.q_lengths = kQueryLengths;
  batch.k_lengths = kKeyLengths;
  return batch;
}

// All tensors of a run on one rank, with dq, dk and dv in fp32.
struct RunTensors {
  explicit RunTensors(const BackwardTensors& data)
      : q(data.forward.q.data(), bf16, {kQueries, kQueryHeads, kHeadDim}),
        k(data.forward.k.data(), bf16, {kKeys, kKvHeads, kHeadDim}),
        v(data.forward.v.data(), bf16, {kKeys, kKvHeads, kHeadDimV}),
        sinks(data.forward.sinks.data(), fp32, {kQueryHeads}),
        out(data.out.data(), bf16, {kQueries, kQueryHeads, kHeadDimV}),
        lse(data.lse.data(), fp32, {kQueries, kQueryHeads}),
        dout(data.dout.data(), bf16, {kQueries, kQueryHeads, kHeadDimV}, {kQueryHeads * kHeadDimV, kHeadDimV, 1}),
        dlse(data.dlse.data(), fp32, {kQueries, kQueryHeads}) {
    all.q = q.get();
    all.k = k.get();
    all.v = v.get();
    all.sinks = sinks.get();
    all.out = out.get();
    all.lse = lse.get();
    all.dout = dout.get();
    all.dlse = dlse.get();
    all.dq = dq.get();
    all.dk = dk.get();
    all.dv = dv.get();
    all.dsinks = dsinks.get();
  }

  static Numbers poison(std::int64_t count) {
    return Numbers(static_cast<std::size_t>(count), std::numeric_limits<float>::quiet_NaN());
  }

  DLDataType bf16 = c_dtype(Dtype::kBf16), fp32 = c_dtype(Dtype::kF32);
  Numbers dq_data = poison(kQueries * kQueryHeads * kHeadDim), dk_data = poison(kKeys * kKvHeads * kHeadDim),
          dv_data = poison(kKeys * kKvHeads * kHeadDimV), dsinks_data = poison(kQueryHeads);
  CTensor q, k, v, sinks, out, lse, dout, dlse;
  CTensor dq{dq_data.data(), fp32, {kQueries, kQueryHeads, kHeadDim}},
      dk{dk_data.data(), fp32, {kKeys, kKvHeads, kHeadDim}}, dv{dv_data.data(), fp32, {kKeys, kKvHeads, kHeadDimV}},
      dsinks{dsinks_data.data(), fp32, {kQueryHeads}};
  ringattn_attention_backward_tensors all = sized<ringattn_attention_backward_tensors>();
};

bool same_bytes(const std::vector<std::byte>& expected, const Numbers& numbers) {
  return expected.size() == numbers.size() * sizeof(float) &&
         std::memcmp(expected.data(), numbers.data(), expected.size()) == 0;
}

class CAttentionBackward : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(ringattn_attention_create(world_.get(), &spec_, &batch_, nullptr, &attention_), RINGATTN_OK)
        << ringattn_error_text();
    ASSERT_EQ(ringattn_attention_backward_create_from(attention_, RINGATTN_GRADIENTS_FP32, &backward_), RINGATTN_OK)
        << ringattn_error_text();
  }
  void TearDown() override {
    ringattn_attention_destroy(attention_);
    ringattn_attention_backward_destroy(backward_);
  }

  SelfWorld world_;
  const Job job_ = backward_job();
  const ringattn_spec spec_ = backward_spec();
  const ringattn_batch batch_ = backward_batch();
  const BackwardTensors data_ = random_backward_tensors(job_, 5);
  ringattn_attention* attention_ = nullptr;
  ringattn_attention_backward* backward_ = nullptr;
};

TEST_F(CAttentionBackward, HasTheBitsOfCpp) {
  Options options;
  options.kernel.backend = "cpu";
  const BackwardResult expected = run_backward({job_, Dtype::kF32}, options, data_, 1);
  RunTensors run(data_);
  ASSERT_EQ(ringattn_attention_backward_run(backward_, &run.all), RINGATTN_OK) << ringattn_error_text();
  EXPECT_TRUE(same_bytes(expected.dq, run.dq_data));
  EXPECT_TRUE(same_bytes(expected.dk, run.dk_data));
  EXPECT_TRUE(same_bytes(expected.dv, run.dv_data));
  EXPECT_TRUE(same(expected.dsinks.front(), run.dsinks_data));

  RunTensors enqueued(data_);
  ASSERT_EQ(ringattn_attention_backward_enqueue(backward_, &enqueued.all), RINGATTN_OK) << ringattn_error_text();
  ASSERT_EQ(ringattn_attention_backward_wait(backward_), RINGATTN_OK) << ringattn_error_text();
  EXPECT_TRUE(same(enqueued.dsinks_data, run.dsinks_data));

  // With the caller's workspace and LSE, dLSE and dO in other strides.
  auto facts = sized<ringattn_attention_facts>();
  ASSERT_EQ(ringattn_attention_backward_get_facts(backward_, &facts), RINGATTN_OK);
  EXPECT_EQ(facts.q_rows, kQueries);
  EXPECT_EQ(facts.k_rows, kKeys);
  EXPECT_NE(facts.kernel, nullptr);
  std::vector<std::byte> workspace(facts.workspace_bytes);
  CTensor space(workspace.data(), {kDLUInt, 8, 1}, {static_cast<std::int64_t>(workspace.size())});
  Numbers lse(data_.lse.size()), dlse(data_.lse.size());
  for (std::int64_t row = 0; row < kQueries; ++row) {
    for (std::int64_t head = 0; head < kQueryHeads; ++head) {
      const auto here = static_cast<std::size_t>(row * kQueryHeads + head);
      const auto there = static_cast<std::size_t>(head * kQueries + row);
      lse[there] = data_.lse[here];
      dlse[there] = data_.dlse[here];
    }
  }
  CTensor heads_first(lse.data(), run.fp32, {kQueries, kQueryHeads}, {1, kQueries});
  CTensor gradient_heads_first(dlse.data(), run.fp32, {kQueries, kQueryHeads}, {1, kQueries});
  RunTensors again(data_);
  again.all.lse = heads_first.get();
  again.all.dlse = gradient_heads_first.get();
  again.all.workspace = space.get();
  ASSERT_EQ(ringattn_attention_backward_run(backward_, &again.all), RINGATTN_OK) << ringattn_error_text();
  EXPECT_TRUE(same(again.dq_data, run.dq_data));
  EXPECT_TRUE(same(again.dk_data, run.dk_data));
  EXPECT_TRUE(same(again.dv_data, run.dv_data));
}

TEST_F(CAttentionBackward, RefusesTensorsByName) {
  struct Case {
    const char* named;
    std::function<void(RunTensors& run)> spoil;
  };
  const std::vector<Case> cases = {
      {"lse is NULL", [](RunTensors& r) { r.all.lse = nullptr; }},
      {"dout is NULL", [](RunTensors& r) { r.all.dout = nullptr; }},
      {"dk is NULL", [](RunTensors& r) { r.all.dk = nullptr; }},
      {"dq is fp32 [130, 3, 64]", [](RunTensors& r) { r.dq->shape[1] = 3; }},
      {"dv is bf16", [](RunTensors& r) { r.dv->dtype = r.bf16; }},
      {"dlse is [130, 3]", [](RunTensors& r) { r.dlse->shape[1] = 3; }},
      {"axis 2 of dout has a stride of 2", [](RunTensors& r) { r.dout->strides[2] = 2; }},
      {"dsinks", [](RunTensors& r) { r.all.dsinks = nullptr; }},
      {"dsinks is on device type 2",
       [](RunTensors& r) {
         r.dsinks->device = {kDLCUDA, 0};
       }},
      {"dk", [](RunTensors& r) { r.dk->data = r.dq->data; }},
      {"ringattn_attention_backward_tensors has", [](RunTensors& r) { ++r.all.size; }},
  };
  for (const Case& refused : cases) {
    RunTensors run(data_);
    refused.spoil(run);
    EXPECT_EQ(ringattn_attention_backward_run(backward_, &run.all), RINGATTN_USAGE) << refused.named;
    EXPECT_NE(std::string(ringattn_error_text()).find(refused.named), std::string::npos) << ringattn_error_text();
    EXPECT_NE(std::string_view(ringattn_error_suggestion()), "") << refused.named;
  }
}

TEST_F(CAttentionBackward, RefusesJobsWithoutGradients) {
  ringattn_attention_backward* made = nullptr;
  ringattn_spec compressed = spec_;
  compressed.k_format = compressed.v_format = "int8";
  EXPECT_EQ(ringattn_attention_backward_create(world_.get(), &compressed, &batch_, 0, nullptr, &made),
            RINGATTN_UNSUPPORTED);
  EXPECT_STREQ(ringattn_error_problem(), "no gradients for compressed keys");
  EXPECT_EQ(ringattn_attention_backward_create_from(attention_, 7, &made), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "gradients 7 are not known");
  EXPECT_EQ(ringattn_attention_backward_create_from(nullptr, 0, &made), RINGATTN_USAGE);
  EXPECT_EQ(ringattn_attention_backward_create_from(attention_, 0, nullptr), RINGATTN_USAGE);
  auto options = sized<ringattn_options>();
  options.kernel = "cpu_attention";  // a forward kernel
  EXPECT_EQ(ringattn_attention_backward_create(world_.get(), &spec_, &batch_, 0, &options, &made),
            RINGATTN_UNSUPPORTED);
  EXPECT_NE(std::string(ringattn_error_text()).find("cpu_attention_backward"), std::string::npos)
      << ringattn_error_text();
  EXPECT_EQ(made, nullptr);
}

// The stripe that a layout has by default depends on the kernel, but not the gradients' shards.
TEST(CAttentionBackwardWorlds, HasTheForwardsShards) {
  auto spec = backward_spec();
  spec.sinks = 0;
  const ringattn_batch batch = backward_batch();
  auto where = sized<ringattn_world_options>();
  where.abi = RINGATTN_ABI;
  std::array<ringattn_world*, 2> worlds{};
  ASSERT_EQ(ringattn_world_threads(&where, 2, worlds.data()), RINGATTN_OK);
  const auto compare = [&](ringattn_world* world) {
    ringattn_attention* attention = nullptr;
    ringattn_attention_backward* backward = nullptr;
    ASSERT_EQ(ringattn_attention_create(world, &spec, &batch, nullptr, &attention), RINGATTN_OK);
    ASSERT_EQ(ringattn_attention_backward_create_from(attention, RINGATTN_GRADIENTS_AS_INPUTS, &backward), RINGATTN_OK)
        << ringattn_error_text();
    auto facts = sized<ringattn_attention_facts>(), gradients = sized<ringattn_attention_facts>();
    EXPECT_OK(ringattn_attention_get_facts(attention, &facts));
    EXPECT_OK(ringattn_attention_backward_get_facts(backward, &gradients));
    EXPECT_EQ(facts.q_rows, gradients.q_rows);
    EXPECT_EQ(facts.k_rows, gradients.k_rows);
    for (const auto& [side, rows] : {std::pair{RINGATTN_QUERIES, facts.q_rows}, {RINGATTN_KEYS, facts.k_rows}}) {
      std::vector<std::int64_t> tokens(static_cast<std::size_t>(rows)), own(static_cast<std::size_t>(rows));
      EXPECT_OK(ringattn_attention_rows(attention, side, rows, tokens.data(), nullptr));
      EXPECT_OK(ringattn_attention_backward_rows(backward, side, rows, own.data(), nullptr));
      EXPECT_EQ(tokens, own);
    }
    ringattn_attention_backward_destroy(backward);
    ringattn_attention_destroy(attention);
  };
  std::thread other(compare, worlds[1]);
  compare(worlds[0]);
  other.join();
  for (ringattn_world* world : worlds) ringattn_world_destroy(world);
}

}  // namespace
}  // namespace ringattn::testing
