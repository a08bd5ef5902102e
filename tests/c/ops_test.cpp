// SPDX-License-Identifier: Apache-2.0
// Decode, MLA, SSM, gated delta rules and reshards through the C interface have the bits of C++.
#include <array>
#include <cmath>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "ops/decode/decode.hpp"
#include "ops/gated_delta/gated_delta.hpp"
#include "ops/mla/mla_decode.hpp"
#include "ops/ssm/ssm.hpp"
#include "tests/c/c_tensors.hpp"

namespace ringattn::testing {
namespace {

const DLDataType kFp32 = c_dtype(Dtype::kF32);
KernelRequest on_host() { return {.backend = "cpu", .kernel = "auto"}; }

TEST(CDecode, HasTheBitsOfCppAndGrows) {
  constexpr std::int64_t kSequences = 2, kHeads = 4, kKv = 2, kDim = 64, kPage = 16, kPages = 6;
  const Numbers q = normal(kSequences * kHeads * kDim, 1), k_new = normal(kSequences * kKv * kDim, 2);
  const Numbers v_new = normal(kSequences * kKv * kDim, 3);
  Numbers k = normal(kPages * kPage * kKv * kDim, 4), v = normal(kPages * kPage * kKv * kDim, 5);
  Numbers c_k = k, c_v = v;
  const std::vector<std::int32_t> table{4, 1, 0, 5, 2, 3};
  std::vector<std::int32_t> lengths{40, 15}, c_lengths = lengths;

  Numbers out(q.size()), lse(kSequences * kHeads), c_out(q.size()), c_lse(lse.size());
  DecodeJob job;
  job.spec = make_spec(Dtype::kF32, kHeads, kKv, kDim, Mask{-1, 0});
  job.limits = {kSequences, 1, 48};
  job.page_size = kPage;
  const auto transport = make_self_transport();
  DecodeOptions options;
  options.kernel = on_host();
  Decode door(job, *transport, options);
  DecodeInputs inputs;
  inputs.q = view(q, kSequences, kHeads, kDim);
  inputs.k = cache_view(k.data(), Dtype::kF32, kPages, kPage, kKv, kDim);
  inputs.v = cache_view(v.data(), Dtype::kF32, kPages, kPage, kKv, kDim);
  inputs.block_table = {table.data(), 3};
  inputs.table_pages = 3;
  inputs.lengths_before = lengths.data();
  inputs.update_lengths = true;
  inputs.k_new = view(k_new, kSequences, kKv, kDim);
  inputs.v_new = view(v_new, kSequences, kKv, kDim);
  door.run(inputs, {view(out, kSequences, kHeads, kDim), {lse.data(), kHeads, 1}});

  SelfWorld world;
  auto spec = sized<ringattn_spec>();
  spec.dtype = kFp32;
  spec.heads = kHeads;
  spec.kv_heads = kKv;
  spec.head_dim = kDim;
  auto limits = sized<ringattn_decode_limits>();
  limits.sequences = kSequences;
  limits.keys = 48;
  limits.page_size = kPage;
  ringattn_decode* decode = nullptr;
  auto ring = sized<ringattn_options>();
  ring.stripe = 64;
  EXPECT_EQ(ringattn_decode_create(world.get(), &spec, &limits, &ring, &decode), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "ringattn_options::stripe is set");
  ASSERT_EQ(ringattn_decode_create(world.get(), &spec, &limits, nullptr, &decode), RINGATTN_OK)
      << ringattn_error_text();
  CTensor tq(q.data(), kFp32, {kSequences, kHeads, kDim}), tk(c_k.data(), kFp32, {kPages, kPage, kKv, kDim});
  CTensor tv(c_v.data(), kFp32, {kPages, kPage, kKv, kDim}), tt(table.data(), kInt32, {kSequences, 3});
  CTensor tn(c_lengths.data(), kInt32, {kSequences}), tkn(k_new.data(), kFp32, {kSequences, kKv, kDim});
  CTensor tvn(v_new.data(), kFp32, {kSequences, kKv, kDim}), to(c_out.data(), kFp32, {kSequences, kHeads, kDim});
  CTensor tl(c_lse.data(), kFp32, {kSequences, kHeads});
  auto tensors = sized<ringattn_decode_tensors>();
  tensors.q = tq.get();
  tensors.k = tk.get();
  tensors.v = tv.get();
  tensors.block_table = tt.get();
  tensors.lengths_before = tn.get();
  tensors.k_new = tkn.get();
  tensors.v_new = tvn.get();
  tensors.out = to.get();
  tensors.lse = tl.get();
  tensors.update_lengths = 1;
  EXPECT_OK(ringattn_decode_run(decode, &tensors));
  EXPECT_EQ(c_lengths, lengths);
  EXPECT_EQ(c_lengths, (std::vector<std::int32_t>{41, 16}));
  EXPECT_EQ(std::memcmp(c_out.data(), out.data(), out.size() * 4), 0);
  EXPECT_EQ(std::memcmp(c_lse.data(), lse.data(), lse.size() * 4), 0);
  EXPECT_EQ(std::memcmp(c_k.data(), k.data(), k.size() * 4), 0);
  EXPECT_EQ(std::memcmp(c_v.data(), v.data(), v.size() * 4), 0);

  // The same step again: by lengths with its rows, by those before it, left as they are, and as a program says it that
  // was compiled with the header of interface 4, whose `grow` lies where update_lengths does.
  for (const bool before : {false, true}) {
    std::vector<std::int32_t> kept{before ? 40 : 41, before ? 15 : 16};
    CTensor given(kept.data(), kInt32, {kSequences});
    tensors.lengths = before ? nullptr : given.get();
    tensors.lengths_before = before ? given.get() : nullptr;
    tensors.update_lengths = 0;
    std::ranges::fill(c_out, -1.0F);
    EXPECT_OK(ringattn_decode_run(decode, &tensors));
    EXPECT_EQ(std::memcmp(c_out.data(), out.data(), out.size() * 4), 0) << before;
    EXPECT_EQ(kept, (std::vector<std::int32_t>{before ? 40 : 41, before ? 15 : 16}));
    tensors.lengths = tensors.lengths_before = given.get();
    EXPECT_EQ(ringattn_decode_run(decode, &tensors), RINGATTN_USAGE);
    EXPECT_STREQ(ringattn_error_problem(), "lengths and lengths_before are given");
    tensors.lengths_before = nullptr;
    tensors.update_lengths = 1;
    EXPECT_EQ(ringattn_decode_run(decode, &tensors), RINGATTN_USAGE);
    EXPECT_STREQ(ringattn_error_problem(), "update_lengths is set beside lengths");
    if (!before) continue;
    tensors.size = offsetof(ringattn_decode_tensors, lengths_before);
    std::ranges::fill(c_out, -1.0F);
    EXPECT_OK(ringattn_decode_run(decode, &tensors));
    EXPECT_EQ(std::memcmp(c_out.data(), out.data(), out.size() * 4), 0);
    EXPECT_EQ(kept, (std::vector<std::int32_t>{41, 16}));
    tensors.size = sizeof tensors;
  }
  tensors.lengths = nullptr;
  tensors.lengths_before = tn.get();

  auto facts = sized<ringattn_decode_facts>();
  EXPECT_OK(ringattn_decode_get_facts(decode, &facts));
  EXPECT_EQ(facts.kv_split_keys, door.kv_split_keys());
  EXPECT_EQ(facts.partition_stride, 1);
  std::int64_t first = -1, count = -1;
  EXPECT_OK(ringattn_decode_owned(decode, 2, &first, &count));
  EXPECT_EQ(first, 0);
  EXPECT_EQ(count, 2);
  for (const std::int64_t sequences : {std::int64_t{-1}, std::int64_t{1} << 62}) {
    EXPECT_EQ(ringattn_decode_owned(decode, sequences, &first, &count), RINGATTN_USAGE);
    EXPECT_NE(std::string(ringattn_error_text()).find("it has 0 to 1048576"), std::string::npos);
  }
  EXPECT_EQ(ringattn_decode_cache_tokens(decode, 30), 30);

  CTensor none(nullptr, kInt32, {0, 3});
  tensors.rows = 3;
  EXPECT_EQ(ringattn_decode_run(decode, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "a step has 2 rows of q, 3 a sequence");
  tensors.rows = 1;
  tensors.block_table = none.get();
  EXPECT_EQ(ringattn_decode_enqueue(decode, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_why(), "it should be [2, pages]");
  EXPECT_EQ(c_lengths, lengths) << "a refused step has grown sequences";
  EXPECT_OK(ringattn_decode_wait(decode));
  ringattn_decode_destroy(decode);
}

TEST(CMla, HasTheBitsOfCppInBothFormsAndWhenDecoded) {
  constexpr std::int64_t kTokens = 50, kHeads = 2, kDim = 32, kRope = 16, kLatent = 64;
  const Numbers q = normal(kTokens * kHeads * (kDim + kRope), 1), c = normal(kTokens * kLatent, 2);
  const Numbers k_rope = normal(kTokens * kRope, 3), w_uk = normal(kHeads * kDim * kLatent, 4);
  const Numbers w_uv = normal(kHeads * kDim * kLatent, 5);
  const GemmWeights uk{w_uk.data(), Dtype::kF32, kHeads, kDim, kLatent, kDim * kLatent, kLatent, 1};
  const GemmWeights uv{w_uv.data(), Dtype::kF32, kHeads, kDim, kLatent, kDim * kLatent, kLatent, 1};
  SelfWorld world;
  auto spec = sized<ringattn_mla_spec>();
  spec.dtype = kFp32;
  spec.heads = kHeads;
  spec.head_dim = spec.head_dim_v = kDim;
  spec.rope_dim = kRope;
  spec.latent_dim = kLatent;
  auto batch = sized<ringattn_batch>();
  const std::int64_t tokens = kTokens;
  batch.sequences = 1;
  batch.q_lengths = &tokens;
  CTensor tq(q.data(), kFp32, {kTokens, kHeads, kDim + kRope}), tc(c.data(), kFp32, {kTokens, 1, kLatent});
  CTensor tr(k_rope.data(), kFp32, {kTokens, 1, kRope}), tuk(w_uk.data(), kFp32, {kHeads, kDim, kLatent});
  CTensor tuv(w_uv.data(), kFp32, {kHeads, kDim, kLatent});
  Numbers absorbed;
  for (const auto& [form, number] :
       {std::pair{MlaForm::kExpanded, RINGATTN_EXPANDED}, std::pair{MlaForm::kAbsorbed, RINGATTN_ABSORBED}}) {
    MlaJob job;
    job.spec.dtype = Dtype::kF32;
    job.spec.heads = kHeads;
    job.spec.head_dim = job.spec.head_dim_v = kDim;
    job.spec.rope_dim = kRope;
    job.spec.latent_dim = kLatent;
    job.spec.softmax_scale = default_softmax_scale(job.spec);
    job.batch = uniform_batch(1, kTokens, kTokens);
    job.form = form;
    const auto transport = make_self_transport();
    MlaOptions options;
    options.ring.kernel = on_host();
    Mla door(job, *transport, options);
    Numbers out(kTokens * kHeads * kDim), lse(kTokens * kHeads), c_out(out.size()), c_lse(lse.size());
    std::vector<std::byte> workspace(door.workspace_bytes());
    MlaInputs inputs;
    inputs.q = view(q, kTokens, kHeads, kDim + kRope);
    inputs.latent = view(c, kTokens, 1, kLatent);
    inputs.k_rope = view(k_rope, kTokens, 1, kRope);
    inputs.w_uk = uk;
    inputs.w_uv = uv;
    door.run(inputs, {view(out, kTokens, kHeads, kDim), {lse.data(), kHeads, 1}}, workspace);

    ringattn_mla* latent = nullptr;
    ASSERT_EQ(ringattn_mla_create(world.get(), &spec, &batch, number, nullptr, &latent), RINGATTN_OK)
        << ringattn_error_text();
    auto facts = sized<ringattn_mla_facts>();
    EXPECT_OK(ringattn_mla_get_facts(latent, &facts));
    EXPECT_EQ(facts.form, number);
    EXPECT_EQ(facts.q_rows, kTokens);
    CTensor to(c_out.data(), kFp32, {kTokens, kHeads, kDim}), tl(c_lse.data(), kFp32, {kTokens, kHeads});
    auto tensors = sized<ringattn_mla_tensors>();
    tensors.q = tq.get();
    tensors.latent = tc.get();
    tensors.k_rope = tr.get();
    tensors.w_uk = tuk.get();
    tensors.w_uv = tuv.get();
    tensors.out = to.get();
    tensors.lse = tl.get();
    EXPECT_OK(ringattn_mla_run(latent, &tensors));
    EXPECT_EQ(std::memcmp(c_out.data(), out.data(), out.size() * 4), 0);
    EXPECT_EQ(std::memcmp(c_lse.data(), lse.data(), lse.size() * 4), 0);
    std::vector<std::int64_t> places(kTokens);
    EXPECT_OK(ringattn_mla_rows(latent, RINGATTN_KEYS, kTokens, nullptr, places.data()));
    EXPECT_EQ(places.back(), kTokens - 1);
    ringattn_mla_destroy(latent);
    absorbed = c_out;
  }

  // The last token again, over a cache of all others.
  constexpr std::int64_t kWidth = kLatent + kRope;
  Numbers cache(64 * kWidth);
  for (std::int64_t token = 0; token + 1 < kTokens; ++token) {
    std::copy_n(c.data() + token * kLatent, kLatent, cache.data() + token * kWidth);
    std::copy_n(k_rope.data() + token * kRope, kRope, cache.data() + token * kWidth + kLatent);
  }
  auto limits = sized<ringattn_decode_limits>();
  limits.sequences = 1;
  limits.keys = 64;
  ringattn_mla_decode* decode = nullptr;
  ASSERT_EQ(ringattn_mla_decode_create(world.get(), &spec, &limits, nullptr, &decode), RINGATTN_OK)
      << ringattn_error_text();
  std::int32_t length = kTokens - 1;
  Numbers out(kHeads * kDim);
  CTensor last_q(q.data() + (kTokens - 1) * kHeads * (kDim + kRope), kFp32, {1, kHeads, kDim + kRope});
  CTensor last_c(c.data() + (kTokens - 1) * kLatent, kFp32, {1, 1, kLatent}), tn(&length, kInt32, {1});
  CTensor last_r(k_rope.data() + (kTokens - 1) * kRope, kFp32, {1, 1, kRope}),
      tcache(cache.data(), kFp32, {1, 64, 1, kWidth});
  CTensor to(out.data(), kFp32, {1, kHeads, kDim});
  auto tensors = sized<ringattn_mla_decode_tensors>();
  tensors.q = last_q.get();
  tensors.cache = tcache.get();
  tensors.lengths_before = tn.get();
  tensors.latent = last_c.get();
  tensors.k_rope = last_r.get();
  tensors.w_uk = tuk.get();
  tensors.w_uv = tuv.get();
  tensors.out = to.get();
  tensors.update_lengths = 1;
  EXPECT_OK(ringattn_mla_decode_run(decode, &tensors));
  EXPECT_EQ(length, kTokens);
  EXPECT_EQ(std::memcmp(out.data(), absorbed.data() + absorbed.size() - out.size(), out.size() * 4), 0);
  EXPECT_EQ(ringattn_mla_decode_cache_tokens(decode, 33), 33);
  ringattn_mla_decode_destroy(decode);
}

// FP8 rows; their bits are compared in tests/python/ops_test.py, which reads by this interface.
TEST(CMla, FormatsAndWhatDoesNotFitThem) {
  constexpr std::int64_t kTokens = 5, kRowBytes = 128 + 4 + 2 * 16;
  SelfWorld world;
  auto spec = sized<ringattn_mla_spec>();
  spec.dtype = {kDLBfloat, 16, 1};
  spec.heads = 1;
  spec.head_dim = spec.head_dim_v = 32;
  spec.rope_dim = 16;
  spec.latent_dim = 128;
  auto batch = sized<ringattn_batch>();
  const std::int64_t tokens = kTokens;
  batch.sequences = 1;
  batch.q_lengths = &tokens;
  ringattn_mla* latent = nullptr;
  for (const auto& [format, problem] :
       {std::pair{"int8", "latents stored as int8"}, std::pair{"latent rope 8", "latents stored as latent rope 8"},
        std::pair{"latents", "\"latents\" is not a storage format"}}) {
    spec.format = format;
    EXPECT_EQ(ringattn_mla_create(world.get(), &spec, &batch, 0, nullptr, &latent), RINGATTN_USAGE);
    EXPECT_NE(std::string(ringattn_error_text()).find(problem), std::string::npos) << ringattn_error_text();
  }
  spec.format = "latent rope 16";
  ASSERT_EQ(ringattn_mla_create(world.get(), &spec, &batch, 0, nullptr, &latent), RINGATTN_OK) << ringattn_error_text();
  std::vector<std::uint16_t> numbers(kTokens * 48), matrices(std::size_t{32} * 128), out(kTokens * 32);
  std::vector<std::uint8_t> rows(kTokens * kRowBytes);
  const DLDataType bytes{kDLUInt, 8, 1};
  CTensor tq(numbers.data(), spec.dtype, {kTokens, 1, 48}), tw(matrices.data(), spec.dtype, {1, 32, 128});
  CTensor to(out.data(), spec.dtype, {kTokens, 1, 32}), tr(rows.data(), bytes, {kTokens, 1, kRowBytes});
  CTensor short_rows(rows.data(), bytes, {kTokens, 1, kRowBytes - 1}),
      k_rope(numbers.data(), spec.dtype, {kTokens, 1, 16});
  auto tensors = sized<ringattn_mla_tensors>();
  tensors.q = tq.get();
  tensors.w_uk = tensors.w_uv = tw.get();
  tensors.out = to.get();
  tensors.latent = tr.get();
  EXPECT_OK(ringattn_mla_run(latent, &tensors));
  tensors.k_rope = k_rope.get();
  EXPECT_EQ(ringattn_mla_run(latent, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "k_rope is given");
  tensors.k_rope = nullptr;
  tensors.latent = short_rows.get();
  EXPECT_EQ(ringattn_mla_run(latent, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_why(), "it should be [5, 1, 164]");
  tensors.latent = tq.get();
  EXPECT_EQ(ringattn_mla_run(latent, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "latent holds bf16");
  ringattn_mla_destroy(latent);
}

TEST(CSsm, HasTheBitsOfCpp) {
  constexpr std::int64_t kTokens = 200, kHeads = 2, kDim = 32, kStates = 16;
  const Numbers x = normal(kTokens * kHeads * kDim, 1), dt(kTokens * kHeads, 0.1F), b = normal(kTokens * kStates, 2);
  const Numbers c = normal(kTokens * kStates, 3), a{-0.5F, -1.0F}, d{0.25F, 2.0F};
  const Numbers initial = normal(3 * kHeads * kDim * kStates, 4);
  Numbers y(x.size()), states(initial.size()), c_y(x.size()), c_states(initial.size());
  const std::vector<std::int64_t> lengths{150, 0, 50};
  SsmJob job;
  job.spec.dtype = Dtype::kF32;
  job.spec.heads = kHeads;
  job.spec.head_dim = kDim;
  job.spec.state_dim = kStates;
  job.spec.skip = true;
  job.lengths = lengths;
  job.initial_states = job.final_states = true;
  const auto transport = make_self_transport();
  SsmOptions options;
  options.kernel = on_host();
  Ssm door(job, *transport, options);
  SsmInputs inputs;
  inputs.x = view(x, kTokens, kHeads, kDim);
  inputs.dt = view(dt, kTokens, kHeads, 1);
  inputs.b = view(b, kTokens, 1, kStates);
  inputs.c = view(c, kTokens, 1, kStates);
  inputs.a = a.data();
  inputs.d = d.data();
  inputs.initial_states = initial.data();
  door.run(inputs, {view(y, kTokens, kHeads, kDim), states.data()});

  SelfWorld world;
  auto spec = sized<ringattn_ssm_spec>();
  spec.dtype = kFp32;
  spec.heads = kHeads;
  spec.head_dim = kDim;
  spec.state_dim = kStates;
  spec.skip = 1;
  auto batch = sized<ringattn_ssm_batch>();
  batch.sequences = 3;
  batch.lengths = lengths.data();
  batch.initial_states = batch.final_states = 1;
  ringattn_ssm* scan = nullptr;
  ASSERT_EQ(ringattn_ssm_create(world.get(), &spec, &batch, nullptr, &scan), RINGATTN_OK) << ringattn_error_text();
  CTensor tx(x.data(), kFp32, {kTokens, kHeads, kDim}), tdt(dt.data(), kFp32, {kTokens, kHeads, 1});
  CTensor tb(b.data(), kFp32, {kTokens, 1, kStates}), tc(c.data(), kFp32, {kTokens, 1, kStates});
  CTensor ta(a.data(), kFp32, {kHeads}), td(d.data(), kFp32, {kHeads}), ty(c_y.data(), kFp32, {kTokens, kHeads, kDim});
  CTensor ti(initial.data(), kFp32, {3, kHeads, kDim, kStates}), tf(c_states.data(), kFp32, {3, kHeads, kDim, kStates});
  auto tensors = sized<ringattn_ssm_tensors>();
  tensors.x = tx.get();
  tensors.dt = tdt.get();
  tensors.b = tb.get();
  tensors.c = tc.get();
  tensors.a = ta.get();
  tensors.d = td.get();
  tensors.initial_states = ti.get();
  tensors.y = ty.get();
  tensors.final_states = tf.get();
  EXPECT_OK(ringattn_ssm_run(scan, &tensors));
  EXPECT_EQ(std::memcmp(c_y.data(), y.data(), y.size() * 4), 0);
  EXPECT_EQ(std::memcmp(c_states.data(), states.data(), states.size() * 4), 0);
  constexpr std::int64_t kState = kHeads * kDim * kStates;
  EXPECT_EQ(std::memcmp(&c_states[kState], &initial[kState], kState * 4), 0);  // of the empty sequence

  auto facts = sized<ringattn_ssm_facts>();
  EXPECT_OK(ringattn_ssm_get_facts(scan, &facts));
  EXPECT_EQ(facts.rows, kTokens);
  std::array<std::int32_t, 3> beginning{-1, -1, -1}, ending{-1, -1, -1};
  EXPECT_OK(ringattn_ssm_sequences(scan, beginning.data(), ending.data()));
  EXPECT_EQ(beginning, (std::array<std::int32_t, 3>{0, 1, 2}));
  EXPECT_EQ(ending, beginning);
  ti->shape[0] = 1;
  EXPECT_EQ(ringattn_ssm_run(scan, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "initial_states is [1, 2, 32, 16]");
  ringattn_ssm_destroy(scan);
}

TEST(CGatedDelta, HasTheBitsOfCpp) {
  constexpr std::int64_t kKeyHeads = 1, kHeads = 2, kKeyDim = 16, kValueDim = 8, kState = kHeads * kKeyDim * kValueDim;
  const std::vector<std::int64_t> lengths{kSegmentTokens + 40, 0, 17};
  constexpr std::int64_t kTokens = kSegmentTokens + 57;
  const Numbers q = normal(kTokens * kKeyHeads * kKeyDim, 1), k = normal(kTokens * kKeyHeads * kKeyDim, 2);
  const Numbers v = normal(kTokens * kHeads * kValueDim, 3), initial = normal(3 * kState, 4);
  Numbers log_decay = normal(kTokens * kHeads * kKeyDim, 5), beta = normal(kTokens * kHeads, 6);
  for (float& value : log_decay) value = -0.01F * std::abs(value);
  for (float& value : beta) value = 0.5F / (1.0F + value * value);
  Numbers out(v.size()), states(3 * kState), c_out(v.size()), c_states(3 * kState);
  GatedDeltaJob job;
  job.spec.dtype = Dtype::kF32;
  job.spec.key_heads = kKeyHeads;
  job.spec.value_heads = kHeads;
  job.spec.key_dim = kKeyDim;
  job.spec.value_dim = kValueDim;
  job.spec.key_decays = job.spec.qk_l2norm = true;
  job.spec.scale = 0.5F;
  job.lengths = lengths;
  job.initial_states = job.final_states = true;
  const auto transport = make_self_transport();
  SsmOptions on_cpu;
  on_cpu.kernel = on_host();
  GatedDelta rule(job, *transport, on_cpu);
  GatedDeltaInputs inputs;
  inputs.q = view(q, kTokens, kKeyHeads, kKeyDim);
  inputs.k = view(k, kTokens, kKeyHeads, kKeyDim);
  inputs.v = view(v, kTokens, kHeads, kValueDim);
  inputs.log_decay = view(log_decay, kTokens, kHeads, kKeyDim);
  inputs.beta = view(beta, kTokens, kHeads, 1);
  inputs.initial_states = initial.data();
  rule.run(inputs, {view(out, kTokens, kHeads, kValueDim), states.data()});

  SelfWorld world;
  auto spec = sized<ringattn_gated_delta_spec>();
  spec.dtype = kFp32;
  spec.key_heads = kKeyHeads;
  spec.value_heads = kHeads;
  spec.key_dim = kKeyDim;
  spec.value_dim = kValueDim;
  spec.key_decays = spec.qk_l2norm = 1;
  spec.scale = 0.5F;
  auto batch = sized<ringattn_ssm_batch>();
  batch.sequences = 3;
  batch.lengths = lengths.data();
  batch.initial_states = batch.final_states = 1;
  auto options = sized<ringattn_options>();
  ringattn_gated_delta* delta = nullptr;
  options.block_tokens = 64;
  EXPECT_EQ(ringattn_gated_delta_create(world.get(), &spec, &batch, &options, &delta), RINGATTN_USAGE);
  EXPECT_NE(std::string(ringattn_error_text()).find("a gated delta rule"), std::string::npos) << ringattn_error_text();
  ASSERT_EQ(ringattn_gated_delta_create(world.get(), &spec, &batch, nullptr, &delta), RINGATTN_OK)
      << ringattn_error_text();
  CTensor tq(q.data(), kFp32, {kTokens, kKeyHeads, kKeyDim}), tk(k.data(), kFp32, {kTokens, kKeyHeads, kKeyDim});
  CTensor tv(v.data(), kFp32, {kTokens, kHeads, kValueDim}), tb(beta.data(), kFp32, {kTokens, kHeads, 1});
  CTensor tg(log_decay.data(), kFp32, {kTokens, kHeads, kKeyDim}),
      to(c_out.data(), kFp32, {kTokens, kHeads, kValueDim});
  CTensor ti(initial.data(), kFp32, {3, kHeads, kKeyDim, kValueDim});
  CTensor tf(c_states.data(), kFp32, {3, kHeads, kKeyDim, kValueDim});
  auto tensors = sized<ringattn_gated_delta_tensors>();
  tensors.q = tq.get();
  tensors.k = tk.get();
  tensors.v = tv.get();
  tensors.log_decay = tg.get();
  tensors.beta = tb.get();
  tensors.initial_states = ti.get();
  tensors.out = to.get();
  tensors.final_states = tf.get();
  EXPECT_OK(ringattn_gated_delta_run(delta, &tensors));
  EXPECT_EQ(std::memcmp(c_out.data(), out.data(), out.size() * 4), 0);
  EXPECT_EQ(std::memcmp(c_states.data(), states.data(), states.size() * 4), 0);
  EXPECT_EQ(std::memcmp(&c_states[kState], &initial[kState], kState * 4), 0);  // of the empty sequence
  auto facts = sized<ringattn_ssm_facts>();
  EXPECT_OK(ringattn_gated_delta_get_facts(delta, &facts));
  EXPECT_EQ(facts.rows, kTokens);
  EXPECT_EQ(facts.ending, 3);
  tg->shape[2] = 1;
  EXPECT_EQ(ringattn_gated_delta_run(delta, &tensors), RINGATTN_USAGE);
  ringattn_gated_delta_destroy(delta);
}

// Rows of two packed sequences on ranks of which the second has none in the first layout, the third none in the other.
TEST(CReshard, MovesRowsToTheLayoutOfRunsAndBack) {
  constexpr std::int64_t kRowBytes = 6, kTokens = 12;
  const std::vector<std::int64_t> lengths{9, 0, 3};
  const std::vector<ringattn_run> zigzag{{0, 0, 0, 3}, {0, 0, 6, 9}, {2, 0, 3, 6}, {2, 2, 0, 3}};
  const std::vector<ringattn_run> even{{0, 0, 0, 5}, {1, 0, 5, 9}, {1, 2, 0, 3}};
  const std::vector<std::vector<int>> tokens_from{{0, 1, 2, 6, 7, 8}, {}, {3, 4, 5, 9, 10, 11}};
  const std::vector<std::vector<int>> tokens_to{{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9, 10, 11}, {}};
  const std::array<std::int64_t, 3> received{2, 7, 0};  // tokens
  const auto rows_of = [](const std::vector<int>& tokens) {
    std::vector<std::uint8_t> rows;
    for (const int token : tokens) {
      for (int byte = 0; byte < kRowBytes; ++byte) rows.push_back(static_cast<std::uint8_t>(16 * token + byte));
    }
    return rows;
  };
  auto where = sized<ringattn_world_options>();
  where.abi = RINGATTN_ABI;
  std::array<ringattn_world*, 3> worlds{};
  ASSERT_EQ(ringattn_world_threads(&where, 3, worlds.data()), RINGATTN_OK);
  const auto move = [&](std::size_t rank) {
    auto spec = sized<ringattn_reshard_spec>(), back = spec;
    spec.token_bytes = back.token_bytes = kRowBytes;
    spec.sequences = back.sequences = 3;
    spec.lengths = back.lengths = lengths.data();
    spec.from_run_count = back.to_run_count = std::ssize(zigzag);
    spec.from_runs = back.to_runs = zigzag.data();
    spec.to_run_count = back.from_run_count = std::ssize(even);
    spec.to_runs = back.from_runs = even.data();
    ringattn_reshard *there = nullptr, *returned = nullptr;
    EXPECT_OK(ringattn_reshard_create(worlds[rank], &spec, nullptr, &there));
    EXPECT_OK(ringattn_reshard_create(worlds[rank], &back, nullptr, &returned));
    const std::vector<std::uint8_t> x = rows_of(tokens_from[rank]), moved = rows_of(tokens_to[rank]);
    auto facts = sized<ringattn_reshard_facts>();
    EXPECT_OK(ringattn_reshard_get_facts(there, &facts));
    EXPECT_EQ(facts.from_rows * kRowBytes, std::ssize(x));
    EXPECT_EQ(facts.to_rows * kRowBytes, std::ssize(moved));
    EXPECT_EQ(facts.bytes_received, kRowBytes * received[rank]);
    EXPECT_STREQ(facts.kernel, "cpu_copy");
    std::vector<std::uint8_t> y(moved.size()), again(x.size());
    const DLDataType bytes{kDLUInt, 8, 1}, halves{kDLFloat, 16, 1};
    CTensor tx(x.data(), bytes, {std::ssize(x) / kRowBytes, kRowBytes});
    CTensor ty(y.data(), halves, {std::ssize(y) / kRowBytes, 1, kRowBytes / 2});
    CTensor tz(again.data(), bytes, {std::ssize(x)});
    auto tensors = sized<ringattn_reshard_tensors>(), to_x = tensors;
    tensors.x = x.empty() ? nullptr : tx.get();
    to_x.x = tensors.y = y.empty() ? nullptr : ty.get();
    to_x.y = x.empty() ? nullptr : tz.get();
    EXPECT_OK(ringattn_reshard_enqueue(there, &tensors));
    EXPECT_OK(ringattn_reshard_run(returned, &to_x));
    EXPECT_OK(ringattn_reshard_wait(there));
    EXPECT_EQ(y, moved) << rank;
    EXPECT_EQ(again, x) << rank;
    ringattn_reshard_destroy(there);
    ringattn_reshard_destroy(returned);
  };
  std::thread second(move, 1), third(move, 2);
  move(0);
  second.join();
  third.join();
  for (ringattn_world* world : worlds) ringattn_world_destroy(world);

  SelfWorld self;
  const ringattn_run whole{0, 0, 0, kTokens}, half{0, 0, 0, 6};
  const std::int64_t length = kTokens;
  auto spec = sized<ringattn_reshard_spec>();
  spec.token_bytes = 4;
  spec.sequences = spec.from_run_count = spec.to_run_count = 1;
  spec.lengths = &length;
  spec.from_runs = &whole;
  spec.to_runs = &half;
  ringattn_reshard* reshard = nullptr;
  EXPECT_EQ(ringattn_reshard_create(self.get(), &spec, nullptr, &reshard), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "ringattn_reshard_spec::to_runs: token 6 of sequence 0 belongs to no rank");
  spec.to_runs = nullptr;
  EXPECT_EQ(ringattn_reshard_create(self.get(), &spec, nullptr, &reshard), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "ringattn_reshard_spec::to_runs is NULL");
  spec.to_runs = &whole;
  auto options = sized<ringattn_options>();
  options.threads = 2;
  EXPECT_EQ(ringattn_reshard_create(self.get(), &spec, &options, &reshard), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "ringattn_options::threads is set");
  ASSERT_EQ(ringattn_reshard_create(self.get(), &spec, nullptr, &reshard), RINGATTN_OK);
  Numbers x(kTokens), y(kTokens);
  CTensor tx(x.data(), kFp32, {kTokens}), ty(y.data(), kFp32, {kTokens - 1}), same(x.data(), kFp32, {kTokens});
  auto tensors = sized<ringattn_reshard_tensors>();
  tensors.x = tx.get();
  EXPECT_EQ(ringattn_reshard_run(reshard, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "y is NULL");
  tensors.y = ty.get();
  EXPECT_EQ(ringattn_reshard_run(reshard, &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(
      ringattn_error_text(),
      "y has 44 bytes (this rank has 12 rows of 4 bytes in to_runs). Pass this rank's rows, ascending by run.");
  tensors.y = same.get();
  EXPECT_EQ(ringattn_reshard_run(reshard, &tensors), RINGATTN_USAGE);
  ringattn_reshard_destroy(reshard);
}

}  // namespace
}  // namespace ringattn::testing
