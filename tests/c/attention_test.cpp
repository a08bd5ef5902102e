// SPDX-License-Identifier: Apache-2.0
// Attention through the C interface: the bits of C++, views of any strides, and refusals that say what was wrong.
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <thread>

#include "tests/c/c_tensors.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {
namespace {

Job mixed_job() {
  Job job;
  job.spec = make_spec(Dtype::kBf16, 4, 2, 64, Mask{100, 3}, 32);
  job.spec.softcap = 20.0F;
  job.spec.sinks = true;
  job.batch = packed_batch(std::vector<std::int64_t>{0, 70, 70, 300}, std::vector<std::int64_t>{0, 200, 210, 500}, {});
  return job;
}

// The structs that say the same as a Job.
struct CJob {
  explicit CJob(const Job& job) : q(job.batch.q_lengths()), k(job.batch.k_lengths()) {
    spec.dtype = c_dtype(job.spec.dtype);
    spec.heads = job.spec.heads;
    spec.kv_heads = job.spec.kv_heads;
    spec.head_dim = job.spec.head_dim;
    spec.head_dim_v = job.spec.head_dim_v;
    spec.mask = RINGATTN_WINDOW;
    spec.window_left = job.spec.mask.left;
    spec.window_right = job.spec.mask.right;
    spec.softcap = job.spec.softcap;
    spec.sinks = job.spec.sinks ? 1 : 0;
    batch.sequences = static_cast<std::int64_t>(q.size());
    batch.q_lengths = q.data();
    batch.k_lengths = k.data();
  }

  std::vector<std::int64_t> q, k;
  ringattn_spec spec = sized<ringattn_spec>();
  ringattn_batch batch = sized<ringattn_batch>();
};

class CAttention : public ::testing::Test {
 protected:
  void SetUp() override { create(); }
  void TearDown() override { ringattn_attention_destroy(attention_); }

  void create() {
    auto options = sized<ringattn_options>();
    options.block_tokens = 128;  // several, so that a run needs a workspace
    ASSERT_EQ(ringattn_attention_create(world_.get(), &c_.spec, &c_.batch, &options, &attention_), RINGATTN_OK)
        << ringattn_error_text();
  }

  SelfWorld world_;
  const Job job_ = mixed_job();
  CJob c_{job_};
  const JobTensors data_ = random_tensors(job_, 5);
  ringattn_attention* attention_ = nullptr;
};

TEST_F(CAttention, HasTheBitsOfCpp) {
  Options options;
  options.kernel.backend = "cpu";
  const JobResult expected = run_job(job_, options, data_, 1);
  const DLDataType bf16 = c_dtype(Dtype::kBf16), fp32 = c_dtype(Dtype::kF32);
  const std::int64_t rows = job_.batch.q_tokens(), keys = job_.batch.k_tokens();
  CTensor q(data_.q.data(), bf16, {rows, 4, 64}), k(data_.k.data(), bf16, {keys, 2, 64});
  CTensor v(data_.v.data(), bf16, {keys, 2, 32}), sinks(data_.sinks.data(), fp32, {4});
  std::vector<std::uint16_t> out(static_cast<std::size_t>(rows * 4 * 32) + 1, 0x7fff);
  std::vector<float> lse(static_cast<std::size_t>(rows * 4), std::numeric_limits<float>::quiet_NaN());
  // O after an offset of one number, LSE with the heads outside.
  CTensor o(out.data(), bf16, {rows, 4, 32}), l(lse.data(), fp32, {rows, 4}, {1, rows});
  o->byte_offset = 2;
  auto tensors = sized<ringattn_attention_tensors>();
  tensors.q = q.get();
  tensors.k = k.get();
  tensors.v = v.get();
  tensors.sinks = sinks.get();
  tensors.out = o.get();
  tensors.lse = l.get();
  ASSERT_EQ(ringattn_attention_run(attention_, &tensors), RINGATTN_OK) << ringattn_error_text();
  EXPECT_EQ(out[0], 0x7fff);
  EXPECT_EQ(std::memcmp(out.data() + 1, expected.out.data(), expected.out.size()), 0);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t head = 0; head < 4; ++head) {
      const float ours = lse[static_cast<std::size_t>(head * rows + row)];
      ASSERT_EQ(std::memcmp(&ours, &expected.lse[static_cast<std::size_t>(row * 4 + head)], sizeof ours), 0);
    }
  }

  // With a workspace of the caller's, without LSE, and enqueued.
  auto facts = sized<ringattn_attention_facts>();
  ASSERT_EQ(ringattn_attention_get_facts(attention_, &facts), RINGATTN_OK);
  EXPECT_EQ(facts.q_rows, rows);
  EXPECT_EQ(facts.k_rows, keys);
  EXPECT_STREQ(facts.kernel, "cpu_attention");
  std::vector<std::byte> workspace(facts.workspace_bytes);
  CTensor space(workspace.data(), {kDLUInt, 8, 1}, {static_cast<std::int64_t>(workspace.size())});
  std::fill(out.begin(), out.end(), std::uint16_t{0x7fff});
  tensors.workspace = space.get();
  tensors.lse = nullptr;
  ASSERT_EQ(ringattn_attention_enqueue(attention_, &tensors), RINGATTN_OK) << ringattn_error_text();
  ASSERT_EQ(ringattn_attention_wait(attention_), RINGATTN_OK);
  EXPECT_EQ(std::memcmp(out.data() + 1, expected.out.data(), expected.out.size()), 0);
}

TEST_F(CAttention, RefusesTensorsByName) {
  const DLDataType bf16 = c_dtype(Dtype::kBf16), fp32 = c_dtype(Dtype::kF32);
  const std::int64_t rows = job_.batch.q_tokens(), keys = job_.batch.k_tokens();
  std::vector<std::uint16_t> out(static_cast<std::size_t>(rows * 4 * 32), 0x7fff);
  struct Tensors {
    CTensor q, k, v, sinks, out, four_numbers, heads_first;
    ringattn_attention_tensors all;
  };
  struct Case {
    const char* named;
    std::function<void(Tensors& tensors)> spoil;
  };
  const std::vector<Case> cases = {
      {"q has 2 axes", [](Tensors& t) { t.q->ndim = 2; }},
      {"q is bf16 [300, 3, 64]", [](Tensors& t) { t.q->shape[1] = 3; }},
      {"q is fp16",
       [](Tensors& t) {
         t.q->dtype = {kDLFloat, 16, 1};
       }},
      {"q holds fp64",
       [](Tensors& t) {
         t.q->dtype = {kDLFloat, 64, 1};
       }},
      {"q holds vectors of 2 bf16",
       [](Tensors& t) {
         t.q->dtype = {kDLBfloat, 16, 2};
       }},
      {"axis 2 of q has a stride of 2", [](Tensors& t) { t.q->strides[2] = 2; }},
      {"v is on device type 2",
       [](Tensors& t) {
         t.v->device = {kDLCUDA, 0};
       }},
      {"v of shape [500, 2, 32] has no data", [](Tensors& t) { t.v->data = nullptr; }},
      {"k is NULL", [](Tensors& t) { t.all.k = nullptr; }},
      {"sinks", [](Tensors& t) { t.all.sinks = nullptr; }},
      {"lse is [4, 300] (it should be [300, 4])", [](Tensors& t) { t.all.lse = t.heads_first.get(); }},
      {"the workspace has 16 bytes", [](Tensors& t) { t.all.workspace = t.four_numbers.get(); }},
      {"ringattn_attention_tensors has", [](Tensors& t) { ++t.all.size; }},
      {"ringattn_attention_tensors says that it has 0 bytes", [](Tensors& t) { t.all.size = 0; }},
  };
  for (const Case& refused : cases) {
    Tensors t{{data_.q.data(), bf16, {rows, 4, 64}, {4 * 64, 64, 1}},
              {data_.k.data(), bf16, {keys, 2, 64}},
              {data_.v.data(), bf16, {keys, 2, 32}},
              {data_.sinks.data(), fp32, {4}},
              {out.data(), bf16, {rows, 4, 32}},
              {data_.sinks.data(), fp32, {4}},
              {data_.q.data(), fp32, {4, rows}},
              sized<ringattn_attention_tensors>()};
    t.all.q = t.q.get();
    t.all.k = t.k.get();
    t.all.v = t.v.get();
    t.all.sinks = t.sinks.get();
    t.all.out = t.out.get();
    refused.spoil(t);
    EXPECT_EQ(ringattn_attention_run(attention_, &t.all), RINGATTN_USAGE) << refused.named;
    EXPECT_NE(std::string(ringattn_error_text()).find(refused.named), std::string::npos) << ringattn_error_text();
    EXPECT_NE(std::string_view(ringattn_error_suggestion()), "") << refused.named;
  }
  EXPECT_EQ(out, std::vector<std::uint16_t>(out.size(), 0x7fff)) << "a refused run has written";
}

TEST_F(CAttention, RefusesJobsThatContradictThemselves) {
  struct Case {
    ringattn_status status;
    const char* named;
    std::function<void(CJob& job, ringattn_options& options)> spoil;
  };
  const std::int64_t negative[] = {-1, 0, 0};
  const ringattn_run run{1, 0, 0, 70};
  const std::vector<Case> cases = {
      {RINGATTN_USAGE, "K has 3 heads", [](CJob& job, auto&) { job.spec.kv_heads = 3; }},
      {RINGATTN_USAGE, "mask 7", [](CJob& job, auto&) { job.spec.mask = 7; }},
      {RINGATTN_USAGE, "dtype is int32", [](CJob& job, auto&) { job.spec.dtype = kInt32; }},
      {RINGATTN_USAGE, "-1", [&](CJob& job, auto&) { job.batch.q_lengths = negative; }},
      {RINGATTN_USAGE, "q_lengths is NULL", [](CJob& job, auto&) { job.batch.q_lengths = nullptr; }},
      {RINGATTN_USAGE, "a batch of -1", [](CJob& job, auto&) { job.batch.sequences = -1; }},
      {RINGATTN_USAGE, "layout 9", [](CJob&, auto& options) { options.layout = 9; }},
      {RINGATTN_USAGE, "the runs of keys are missing", [](CJob&, auto& options) { options.layout = RINGATTN_RUNS; }},
      {RINGATTN_USAGE, "run 0 names rank 1",
       [&](CJob&, auto& options) {
         options.layout = RINGATTN_RUNS;
         options.query_runs = options.key_runs = &run;
         options.query_run_count = options.key_run_count = 1;
       }},
      {RINGATTN_USAGE, "no_such_kernel", [](CJob&, auto& options) { options.kernel = "no_such_kernel"; }},
      {RINGATTN_UNSUPPORTED, "head_dim", [](CJob& job, auto&) { job.spec.head_dim = 1001; }},
      {RINGATTN_MEMORY, "budget", [](CJob&, auto& options) { options.memory_budget = 100; }},
      {RINGATTN_USAGE, "ringattn_spec has", [](CJob& job, auto&) { job.spec.size += 8; }},
  };
  for (const Case& refused : cases) {
    CJob job(job_);
    auto options = sized<ringattn_options>();
    refused.spoil(job, options);
    ringattn_attention* made = nullptr;
    EXPECT_EQ(ringattn_attention_create(world_.get(), &job.spec, &job.batch, &options, &made), refused.status)
        << refused.named;
    EXPECT_EQ(made, nullptr);
    EXPECT_EQ(ringattn_error_status(), refused.status);
    EXPECT_NE(std::string(ringattn_error_text()).find(refused.named), std::string::npos) << ringattn_error_text();
  }
}

TEST(CWorld, AnObjectKeepsItsWorld) {
  const Job job = mixed_job();
  CJob c(job);
  ringattn_attention* attention = nullptr;
  {
    SelfWorld world;
    EXPECT_EQ(ringattn_world_size(world.get()), 1);
    EXPECT_EQ(ringattn_world_rank(world.get()), 0);
    ASSERT_EQ(ringattn_attention_create(world.get(), &c.spec, &c.batch, nullptr, &attention), RINGATTN_OK);
  }
  std::vector<std::int64_t> tokens(300), places(300);
  EXPECT_EQ(ringattn_attention_rows(attention, RINGATTN_QUERIES, 300, tokens.data(), places.data()), RINGATTN_OK);
  EXPECT_EQ(tokens[70], 70);
  EXPECT_EQ(places[70], 0) << "a sequence without queries lies between";
  EXPECT_EQ(ringattn_attention_rows(attention, RINGATTN_KEYS, 300, tokens.data(), nullptr), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "the arrays have 300 rows");
  EXPECT_STREQ(ringattn_error_why(), "this rank has 500");
  EXPECT_EQ(ringattn_attention_wait(attention), RINGATTN_OK);
  ringattn_attention_destroy(attention);
  ringattn_attention_destroy(nullptr);
}

// Two threads play rank 0. One of them waits for rank 1, so that the other one finds the world at work.
TEST(CWorld, RefusesASecondCallAtATime) {
  const Job job = mixed_job();
  CJob c(job);
  auto options = sized<ringattn_world_options>();
  options.abi = RINGATTN_ABI;
  ringattn_world* worlds[2] = {};
  ASSERT_EQ(ringattn_world_threads(&options, 2, worlds), RINGATTN_OK);
  struct Call {
    ringattn_attention* made = nullptr;
    ringattn_status status = RINGATTN_OK;
    std::string text;
  };
  std::array<Call, 3> calls;
  std::atomic<int> returned = 0;
  const auto make = [&](int rank, Call& call) {
    call.status = ringattn_attention_create(worlds[rank], &c.spec, &c.batch, nullptr, &call.made);
    if (call.status != RINGATTN_OK) call.text = ringattn_error_text();
    ++returned;
  };
  std::thread first(make, 0, std::ref(calls[0]));
  std::thread second(make, 0, std::ref(calls[1]));
  while (returned == 0) std::this_thread::yield();
  make(1, calls[2]);
  first.join();
  second.join();
  const Call& refused = calls[calls[0].made == nullptr ? 0 : 1];
  EXPECT_EQ(refused.status, RINGATTN_USAGE);
  EXPECT_EQ(refused.text,
            "this world is at work in another thread (calls on a world and its objects take turns). Give each thread a "
            "world of its own, or guard a shared one with a lock.");
  EXPECT_EQ(refused.made, nullptr);
  for (const Call& call : calls) {
    if (&call == &refused) continue;
    EXPECT_EQ(call.status, RINGATTN_OK) << call.text;
    EXPECT_EQ(ringattn_attention_wait(call.made), RINGATTN_OK);
    ringattn_attention_destroy(call.made);
  }
  for (ringattn_world* world : worlds) ringattn_world_destroy(world);
}

TEST(CWorld, RefusesDevicesThatThereAreNot) {
  auto options = sized<ringattn_world_options>();
  options.abi = RINGATTN_ABI;
  options.device_type = 99;
  ringattn_world* world = nullptr;
  EXPECT_EQ(ringattn_world_self(&options, &world), RINGATTN_UNSUPPORTED);
  options.device_type = kDLCUDA;
  options.device_id = 4096;
  EXPECT_NE(ringattn_world_self(&options, &world), RINGATTN_OK);
  EXPECT_EQ(ringattn_world_threads(&options, 2, &world), RINGATTN_UNSUPPORTED);
  options.device_type = 0;
  EXPECT_EQ(ringattn_world_threads(&options, 0, &world), RINGATTN_USAGE);
  EXPECT_EQ(ringattn_world_self(nullptr, &world), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "ringattn_world_options is NULL");
  EXPECT_EQ(world, nullptr);
}

}  // namespace
}  // namespace ringattn::testing
