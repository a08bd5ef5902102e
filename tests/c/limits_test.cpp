// SPDX-License-Identifier: Apache-2.0
// What every op of the C interface refuses: absurd numbers of threads and seconds, outputs that overlap inputs, and
// processes that were forked from one that computes.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "tests/c/every_op.hpp"

namespace ringattn::testing {
namespace {

// Steps of these numbers of sequences and keys; a page of 0: a dense cache.
ringattn_decode* make_decode(SelfWorld& world, std::int64_t sequences, std::int64_t keys, std::int64_t page_size) {
  const ringattn_spec spec = attention_spec();
  auto limits = sized<ringattn_decode_limits>();
  limits.sequences = sequences;
  limits.keys = keys;
  limits.page_size = page_size;
  ringattn_decode* decode = nullptr;
  EXPECT_OK(ringattn_decode_create(world.get(), &spec, &limits, nullptr, &decode));
  return decode;
}

TEST(CLimits, ThreadsAndSecondsAreThoseOfTheProgram) {
  Ops ops;
  for (const auto& [name, make] : ops.all()) {
    auto options = sized<ringattn_options>();
    const bool copies = name == "reshard";  // and computes nothing, so it has no threads
    EXPECT_EQ(make(options), RINGATTN_OK) << name << ": " << ringattn_error_text();
    for (const int threads : {-1, 4097, 50000, 1000000}) {
      options.threads = threads;
      EXPECT_EQ(make(options), RINGATTN_USAGE) << name << ", " << threads << " threads";
      EXPECT_EQ(ringattn_error_problem(),
                copies ? "ringattn_options::threads is set" : std::to_string(threads) + " threads are not possible")
          << name;
    }
    options.threads = 3;
    EXPECT_EQ(make(options), copies ? RINGATTN_USAGE : RINGATTN_OK) << name << ": " << ringattn_error_text();
    options.threads = 0;
    for (const double seconds : {std::nan(""), -1.0, 0.0001, 1e7, std::numeric_limits<double>::infinity()}) {
      options.timeout_seconds = seconds;
      EXPECT_EQ(make(options), RINGATTN_USAGE) << name << ", " << seconds << " seconds";
      // No peers to wait for.
      const bool has_none = name == "compression" || name == "batched gemm" || name == "rope";
      EXPECT_NE(std::string(ringattn_error_text()).find(has_none ? "timeout_seconds" : "time limit"), std::string::npos)
          << ringattn_error_text();
    }
  }
  auto where = sized<ringattn_world_options>();
  where.abi = RINGATTN_ABI;
  ringattn_world* world = nullptr;
  for (const double seconds : {std::nan(""), -1.0, 1e7}) {
    EXPECT_EQ(ringattn_world_store(&where, "127.0.0.1:1", 0, 1, nullptr, seconds, &world), RINGATTN_USAGE) << seconds;
    EXPECT_EQ(world, nullptr);
  }
}

// The target is one for the process, so that it does not change while ops exist.
TEST(CLimits, SimdTargetsAreThoseOfTheProcessor) {
  EXPECT_STREQ(ringattn_simd_target(), "auto");
  EXPECT_EQ(ringattn_set_simd_target(nullptr), RINGATTN_USAGE);
  EXPECT_EQ(ringattn_set_simd_target("avx1024"), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "there is no SIMD target \"avx1024\"");
  if (ringattn_set_simd_target("neon") != RINGATTN_OK) {
    ASSERT_EQ(ringattn_set_simd_target("sse4"), RINGATTN_OK);
  }
  const std::string target = ringattn_simd_target();
  {
    SelfWorld world;
    const ringattn_spec spec = attention_spec();
    auto batch = sized<ringattn_batch>();
    batch.sequences = 1;
    batch.q_lengths = &kTokens;
    ringattn_attention* attention = nullptr;
    ASSERT_EQ(ringattn_attention_create(world.get(), &spec, &batch, nullptr, &attention), RINGATTN_OK);
    auto facts = sized<ringattn_attention_facts>();
    ASSERT_EQ(ringattn_attention_get_facts(attention, &facts), RINGATTN_OK);
    EXPECT_STREQ(facts.machine, target == "sse4" ? "SSE4" : "NEON");
    EXPECT_EQ(ringattn_set_simd_target("auto"), RINGATTN_USAGE);
    EXPECT_STREQ(ringattn_error_why(),
                 ("ops with " + target + " exist, and the target is one for the process").c_str());
    EXPECT_OK(ringattn_set_simd_target(target.c_str()));
    ringattn_attention_destroy(attention);
  }
  EXPECT_OK(ringattn_set_simd_target("auto"));
}

TEST(CLimits, AttentionDoesNotWriteOverWhatItReads) {
  SelfWorld world;
  const ringattn_spec spec = attention_spec();
  auto batch = sized<ringattn_batch>();
  batch.sequences = 1;
  batch.q_lengths = &kTokens;
  ringattn_attention* attention = nullptr;
  ASSERT_EQ(ringattn_attention_create(world.get(), &spec, &batch, nullptr, &attention), RINGATTN_OK);
  constexpr std::int64_t kRow = kHeads * kDim;
  Numbers fused = normal(4 * kTokens * kRow, 1), apart(kTokens * kRow);
  const auto run = [&](const DLTensor* q, const DLTensor* k, const DLTensor* out) {
    auto tensors = sized<ringattn_attention_tensors>();
    tensors.q = q;
    tensors.k = tensors.v = k;
    tensors.out = out;
    return ringattn_attention_run(attention, &tensors);
  };
  const std::vector<std::int64_t> shape{kTokens, kHeads, kDim};
  CTensor q(fused.data(), kFp32, shape), k(fused.data() + kTokens * kRow, kFp32, shape);
  CTensor behind(fused.data() + kRow, kFp32, shape), before_k(fused.data() + kTokens * kRow - 1, kFp32, shape);
  for (const auto& [out, problem] : {std::pair{&q, "out overlaps q"},
                                     {&behind, "out overlaps q"},
                                     {&k, "out overlaps k"},
                                     {&before_k, "out overlaps q"}}) {
    EXPECT_EQ(run(q.get(), k.get(), out->get()), RINGATTN_USAGE);
    EXPECT_STREQ(ringattn_error_problem(), problem);
  }
  CTensor elsewhere(apart.data(), kFp32, shape), next(fused.data() + 2 * kTokens * kRow, kFp32, shape);
  EXPECT_OK(run(q.get(), k.get(), elsewhere.get()));
  EXPECT_OK(run(q.get(), k.get(), next.get()));
  EXPECT_TRUE(std::equal(apart.begin(), apart.end(), fused.begin() + 2 * kTokens * kRow));

  // Columns of one projection, whose rows take turns, and heads that do.
  const Numbers whole = fused;
  for (const std::vector<std::int64_t>& strides :
       {std::vector<std::int64_t>{4 * kRow, kDim, 1}, std::vector<std::int64_t>{4 * kRow, 4 * kDim, 1}}) {
    const std::int64_t column = strides[1] == kDim ? kRow : kDim;
    fused = whole;
    CTensor q_columns(fused.data(), kFp32, shape, strides), k_columns(fused.data() + column, kFp32, shape, strides);
    CTensor out(fused.data() + 3 * column, kFp32, shape, strides),
        half(fused.data() + column / 2, kFp32, shape, strides);
    EXPECT_OK(run(q_columns.get(), k_columns.get(), out.get()));
    EXPECT_EQ(run(q_columns.get(), k_columns.get(), half.get()), RINGATTN_USAGE);
  }
  ringattn_attention_destroy(attention);
}

TEST(CLimits, SsmAndConv1dDoNotWriteOverWhatTheyRead) {
  SelfWorld world;
  auto batch = sized<ringattn_ssm_batch>();
  batch.sequences = 1;
  batch.lengths = &kTokens;
  auto ssm_spec = sized<ringattn_ssm_spec>();
  ssm_spec.dtype = kFp32;
  ssm_spec.heads = kHeads;
  ssm_spec.head_dim = ssm_spec.state_dim = 16;
  ringattn_ssm* scan = nullptr;
  ASSERT_EQ(ringattn_ssm_create(world.get(), &ssm_spec, &batch, nullptr, &scan), RINGATTN_OK);
  Numbers x = normal(kTokens * kHeads * 16, 1), dt = normal(kTokens * kHeads, 2), b = normal(kTokens * 16, 3);
  Numbers a{-1.0F, -2.0F}, y(x.size());
  CTensor tx(x.data(), kFp32, {kTokens, kHeads, 16}), tdt(dt.data(), kFp32, {kTokens, kHeads, 1});
  CTensor tb(b.data(), kFp32, {kTokens, 1, 16}), ta(a.data(), kFp32, {kHeads}),
      ty(y.data(), kFp32, {kTokens, kHeads, 16});
  auto tensors = sized<ringattn_ssm_tensors>();
  tensors.x = tensors.y = tx.get();
  tensors.dt = tdt.get();
  tensors.b = tensors.c = tb.get();
  tensors.a = ta.get();
  EXPECT_EQ(ringattn_ssm_run(scan, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "y overlaps x");
  tensors.y = ty.get();
  EXPECT_OK(ringattn_ssm_run(scan, &tensors));
  ringattn_ssm_destroy(scan);

  auto spec = sized<ringattn_causal_conv1d_spec>();
  spec.dtype = kFp32;
  spec.width = 4;
  spec.channels = 16;
  ringattn_causal_conv1d* convolution = nullptr;
  ASSERT_EQ(ringattn_causal_conv1d_create(world.get(), &spec, &batch, nullptr, &convolution), RINGATTN_OK);
  const Numbers weight = normal(16 * 4, 4);
  CTensor rows(x.data(), kFp32, {kTokens, 1, 16}, {32, 16, 1}),
      beside(x.data() + 16, kFp32, {kTokens, 1, 16}, {32, 16, 1});
  CTensor overlapping(x.data() + 8, kFp32, {kTokens, 1, 16}, {32, 16, 1}), tw(weight.data(), kFp32, {16, 4});
  auto of = sized<ringattn_causal_conv1d_tensors>();
  of.x = rows.get();
  of.weight = tw.get();
  for (const CTensor* out : {&rows, &overlapping}) {
    of.y = const_cast<CTensor*>(out)->get();
    EXPECT_EQ(ringattn_causal_conv1d_run(convolution, &of), RINGATTN_USAGE);
    EXPECT_STREQ(ringattn_error_problem(), "y overlaps x");
  }
  of.y = beside.get();
  EXPECT_OK(ringattn_causal_conv1d_run(convolution, &of));
  ringattn_causal_conv1d_destroy(convolution);
}

// NumPy gives an axis of one element, as table[None] has, a stride of 0.
TEST(CLimits, AnAxisOfOneElementHasAnyStride) {
  SelfWorld world;
  ringattn_decode* const decode = make_decode(world, 1, 64, 16);
  ASSERT_NE(decode, nullptr);
  const Numbers q = normal(kHeads * kDim, 1), cache = normal(4 * 16 * kHeads * kDim, 2);
  const std::int32_t pages[] = {2, 0, 3, 1};
  std::int32_t length = 50;
  std::array<Numbers, 2> out{Numbers(q.size()), Numbers(q.size())};
  for (const std::int64_t stride : {0, 4}) {
    CTensor tq(q.data(), kFp32, {1, kHeads, kDim}, {stride, kDim, 1}), tk(cache.data(), kFp32, {4, 16, kHeads, kDim});
    CTensor table(pages, kInt32, {1, 4}, {stride, 1}), lengths(&length, kInt32, {1}, {stride});
    CTensor to(out[stride == 0 ? 0 : 1].data(), kFp32, {1, kHeads, kDim}, {stride, kDim, 1});
    auto tensors = sized<ringattn_decode_tensors>();
    tensors.q = tq.get();
    tensors.k = tensors.v = tk.get();
    tensors.block_table = table.get();
    tensors.lengths = lengths.get();
    tensors.out = to.get();
    EXPECT_OK(ringattn_decode_run(decode, &tensors)) << stride;
  }
  EXPECT_TRUE(same(out[0], out[1]));
  ringattn_decode_destroy(decode);
}

// One check of what is written for all ops: results in a cache, in new rows, in each other, and rows over each other.
TEST(CLimits, ADecodeStepDoesNotWriteOverWhatItReads) {
  SelfWorld world;
  ringattn_decode* const decode = make_decode(world, 1, 16, 0);
  ASSERT_NE(decode, nullptr);
  Numbers k = normal(16 * kHeads * kDim, 1), v = normal(k.size(), 2), rows = normal(2 * kHeads * kDim, 3);
  Numbers out(rows.size()), lse(kHeads);
  std::int32_t length = 3;
  CTensor tq(rows.data(), kFp32, {1, kHeads, kDim}), tnew(rows.data() + kHeads * kDim, kFp32, {1, kHeads, kDim});
  CTensor tk(k.data(), kFp32, {1, 16, kHeads, kDim}), tv(v.data(), kFp32, {1, 16, kHeads, kDim});
  CTensor tn(&length, kInt32, {1}), to(out.data(), kFp32, {1, kHeads, kDim}), tl(lse.data(), kFp32, {1, kHeads});
  auto tensors = sized<ringattn_decode_tensors>();
  tensors.q = tq.get();
  tensors.k = tk.get();
  tensors.v = tv.get();
  tensors.k_new = tensors.v_new = tnew.get();
  tensors.lengths_before = tn.get();
  const Numbers k_before = k;
  const auto refused = [&](float* at, const std::vector<std::int64_t>& strides, float* lse_at, const char* problem) {
    CTensor there(at, kFp32, {1, kHeads, kDim}, strides), lse_there(lse_at, kFp32, {1, kHeads});
    tensors.out = there.get();
    tensors.lse = lse_there.get();
    EXPECT_EQ(ringattn_decode_run(decode, &tensors), RINGATTN_USAGE) << problem;
    EXPECT_STREQ(ringattn_error_problem(), problem);
  };
  const std::vector<std::int64_t> dense{kHeads * kDim, kDim, 1};
  refused(v.data() + 7 * kHeads * kDim, dense, lse.data(), "out overlaps v");
  refused(k.data() + 1, dense, lse.data(), "out overlaps k");
  refused(rows.data() + kHeads * kDim, dense, lse.data(), "out overlaps k_new");
  refused(out.data(), dense, out.data() + 5, "out overlaps lse");
  refused(out.data(), dense, v.data(), "lse overlaps v");
  refused(out.data(), {kHeads * kDim, 0, 1}, lse.data(),
          fmt::format("out has strides {} and 0", kHeads * kDim).c_str());
  EXPECT_TRUE(same(k, k_before));
  tensors.out = to.get();
  tensors.lse = tl.get();
  EXPECT_OK(ringattn_decode_run(decode, &tensors));
  ringattn_decode_destroy(decode);
}

// A length that was negative before it grew: the new row would have no place, or that of another one.
TEST(CLimits, LengthsThatGrowAreNotNegative) {
  SelfWorld world;
  ringattn_decode* const decode = make_decode(world, 2, 16, 0);
  ASSERT_NE(decode, nullptr);
  const Numbers rows = normal(2 * kHeads * kDim, 1);
  Numbers k = normal(2 * 16 * kHeads * kDim, 2), out(rows.size());
  const Numbers before = k;
  std::array<std::int32_t, 2> lengths{3, -1};
  CTensor q(rows.data(), kFp32, {2, kHeads, kDim}), tk(k.data(), kFp32, {2, 16, kHeads, kDim});
  CTensor tn(lengths.data(), kInt32, {2}), to(out.data(), kFp32, {2, kHeads, kDim});
  auto tensors = sized<ringattn_decode_tensors>();
  tensors.q = tensors.k_new = tensors.v_new = q.get();
  tensors.k = tensors.v = tk.get();
  tensors.lengths_before = tn.get();
  tensors.out = to.get();
  tensors.update_lengths = 1;
  EXPECT_EQ(ringattn_decode_run(decode, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "sequence 1 has -1 keys");
  EXPECT_EQ(lengths, (std::array<std::int32_t, 2>{3, -1}));
  EXPECT_TRUE(same(k, before));
  lengths[1] = 0;
  EXPECT_OK(ringattn_decode_run(decode, &tensors));
  EXPECT_EQ(lengths, (std::array<std::int32_t, 2>{4, 1}));
  ringattn_decode_destroy(decode);
}

// OpenMP's threads don't come along, so work would wait for them without an end.
TEST(CLimits, ForkedProcessesAreRefused) {
  Ops ops;
  for (const auto& [name, make] : ops.all()) ASSERT_EQ(make(sized<ringattn_options>()), RINGATTN_OK) << name;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int wrong = 0;
    for (const auto& [name, make] : ops.all()) wrong += make(sized<ringattn_options>()) != RINGATTN_UNSUPPORTED;
    wrong += std::string(ringattn_error_text()).find("forked from one that had used ringattn") == std::string::npos;
    auto where = sized<ringattn_world_options>();
    where.abi = RINGATTN_ABI;
    ringattn_world* world = nullptr;
    wrong += ringattn_world_self(&where, &world) != RINGATTN_UNSUPPORTED || world != nullptr;
    ringattn_world_destroy(ops.world.get());  // which stays the parent's
    ::_exit(wrong);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  for (const auto& [name, make] : ops.all()) EXPECT_EQ(make(sized<ringattn_options>()), RINGATTN_OK) << name;
}

}  // namespace
}  // namespace ringattn::testing
