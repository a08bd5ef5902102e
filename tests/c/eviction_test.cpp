// SPDX-License-Identifier: Apache-2.0
// Taking tokens out of keys and values through the C interface: the tokens that C++ keeps, attention over what is left
// with the bits of C++, and what is refused.
#include "kernels/quant/eviction.hpp"

#include <algorithm>
#include <array>
#include <memory>

#include "comm/self.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "ops/attention/attention.hpp"
#include "tests/c/c_tensors.hpp"

namespace ringattn::testing {
namespace {

const DLDataType kFp32 = c_dtype(Dtype::kF32);
constexpr std::int64_t kHeads = 4, kKv = 2, kDim = 32;

ringattn_spec attention_spec() {
  auto spec = sized<ringattn_spec>();
  spec.dtype = kFp32;
  spec.heads = kHeads;
  spec.kv_heads = kKv;
  spec.head_dim = kDim;
  return spec;
}

class CEviction : public ::testing::Test {
 protected:
  CEviction() {
    batch_.sequences = 2;
    batch_.q_lengths = q_lengths_.data();
    batch_.k_lengths = k_lengths_.data();
    eviction_.method = "snapkv:window=8,pool=3";
    eviction_.ratio = 0.5;
    eviction_.threads = 1;
    tensors_.q = q_.get();
    tensors_.k = k_.get();
    tensors_.v = v_.get();
    tensors_.positions = positions_.get();
    tensors_.k_kept = k_kept_.get();
    tensors_.v_kept = v_kept_.get();
  }

  static constexpr std::int64_t kQueries = 30, kKeys = 130, kKept = 65;
  const std::vector<std::int64_t> q_lengths_{10, 20}, k_lengths_{90, 40}, kept_lengths_{45, 20};
  Numbers q_rows_ = normal(kQueries * kHeads * kDim, 1), k_rows_ = normal(kKeys * kKv * kDim, 2);
  Numbers v_rows_ = normal(kKeys * kKv * kDim, 3), left_k_ = Numbers(kKept * kKv * kDim), left_v_ = left_k_;
  std::vector<std::int32_t> places_ = std::vector<std::int32_t>(kKept * kKv, -1);
  CTensor q_{q_rows_.data(), kFp32, {kQueries, kHeads, kDim}}, k_{k_rows_.data(), kFp32, {kKeys, kKv, kDim}};
  CTensor v_{v_rows_.data(), kFp32, {kKeys, kKv, kDim}}, positions_{places_.data(), kInt32, {kKept, kKv}};
  CTensor k_kept_{left_k_.data(), kFp32, {kKept, kKv, kDim}}, v_kept_{left_v_.data(), kFp32, {kKept, kKv, kDim}};
  ringattn_spec spec_ = attention_spec();
  ringattn_batch batch_ = sized<ringattn_batch>();
  ringattn_eviction eviction_ = sized<ringattn_eviction>();
  ringattn_eviction_tensors tensors_ = sized<ringattn_eviction_tensors>();
};

TEST_F(CEviction, KeepsTheTokensThatCppKeeps) {
  std::array<std::int64_t, 2> kept{};
  std::int64_t heads = 0;
  EXPECT_OK(ringattn_eviction_kept(&eviction_, &spec_, &batch_, kept.data(), &heads));
  EXPECT_EQ(kept, (std::array<std::int64_t, 2>{45, 20}));
  EXPECT_EQ(heads, kKv);
  EXPECT_OK(ringattn_evict(&eviction_, &spec_, &batch_, &tensors_));
  const Eviction eviction = parse_eviction("snapkv:window=8,pool=3");
  std::int64_t query = 0, key = 0, row = 0;
  for (std::size_t s = 0; s < 2; ++s) {
    ScoredTokens scored;
    scored.keys = rows_of_view(TensorView(view(k_rows_, kKeys, kKv, kDim)), key, k_lengths_[s]);
    scored.queries = rows_of_view(TensorView(view(q_rows_, kQueries, kHeads, kDim)), query + q_lengths_[s] - 8, 8);
    scored.position = k_lengths_[s] - 8;
    scored.mask = Mask{-1, 0};
    scored.softmax_scale = default_softmax_scale(kDim);
    const auto best = choose_tokens("scores", eviction, scored, kept.at(s));
    ASSERT_EQ(std::memcmp(best.data(), places_.data() + row * kKv, best.size() * sizeof(std::int32_t)), 0) << s;
    for (std::size_t i = 0; i < best.size(); ++i) {
      const auto from = ((key + best[i]) * kKv + static_cast<std::int64_t>(i) % kKv) * kDim;
      const auto to = (row * kKv + static_cast<std::int64_t>(i)) * kDim;
      EXPECT_EQ(std::memcmp(left_k_.data() + to, k_rows_.data() + from, kDim * 4), 0);
      EXPECT_EQ(std::memcmp(left_v_.data() + to, v_rows_.data() + from, kDim * 4), 0);
    }
    query += q_lengths_[s];
    key += k_lengths_[s];
    row += kept.at(s);
  }
  // All processors keep the same ones, and rows that were not asked for are not written.
  std::vector<std::int32_t> again(places_.size());
  CTensor other(again.data(), kInt32, {kKept, kKv});
  tensors_.positions = other.get();
  tensors_.k_kept = tensors_.v_kept = tensors_.v = nullptr;
  eviction_.threads = 0;
  EXPECT_OK(ringattn_evict(&eviction_, &spec_, &batch_, &tensors_));
  EXPECT_EQ(again, places_);
}

TEST_F(CEviction, AttentionOverWhatIsLeftHasTheBitsOfCpp) {
  ASSERT_EQ(ringattn_evict(&eviction_, &spec_, &batch_, &tensors_), RINGATTN_OK) << ringattn_error_text();
  Job job;
  job.spec = make_spec(Dtype::kF32, kHeads, kKv, kDim, Mask{-1, 0});
  job.batch.sequences = {{10, 45, 80}, {20, 20, 20}};
  set_positions(job, std::make_shared<const KeyPositions>("positions", kKv,
                                                          std::vector<KeptSequence>{{45, 90}, {20, 40}}, places_));
  ASSERT_NE(job.positions, nullptr);  // the queries stand among what was taken out
  const auto transport = make_self_transport();
  Options options;
  options.kernel.backend = "cpu";
  Attention door(job, *transport, options);
  Numbers out(q_rows_.size()), c_out(out.size());
  std::vector<std::byte> workspace(door.workspace_bytes());
  Inputs inputs;
  inputs.q = view(q_rows_, kQueries, kHeads, kDim);
  inputs.k = view(left_k_, kKept, kKv, kDim);
  inputs.v = view(left_v_, kKept, kKv, kDim);
  Outputs outputs;
  outputs.out = view(out, kQueries, kHeads, kDim);
  door.run(inputs, outputs, workspace);

  SelfWorld world;
  auto batch = sized<ringattn_batch>();
  batch.sequences = 2;
  batch.q_lengths = q_lengths_.data();
  batch.k_lengths = kept_lengths_.data();
  batch.k_positions = places_.data();
  batch.position_heads = kKv;
  batch.whole_lengths = k_lengths_.data();
  CTensor to(c_out.data(), kFp32, {kQueries, kHeads, kDim});
  auto tensors = sized<ringattn_attention_tensors>();
  tensors.q = q_.get();
  tensors.k = k_kept_.get();
  tensors.v = v_kept_.get();
  tensors.out = to.get();
  const auto compute = [&] {
    ringattn_attention* attention = nullptr;
    const ringattn_status status = ringattn_attention_create(world.get(), &spec_, &batch, nullptr, &attention);
    if (status != RINGATTN_OK) return status;
    const ringattn_status ran = ringattn_attention_run(attention, &tensors);
    ringattn_attention_destroy(attention);
    return ran;
  };
  EXPECT_OK(compute());
  EXPECT_TRUE(same(c_out, out));
  const std::vector<std::int64_t> offsets{80, 20};
  batch.q_offsets = offsets.data();
  batch.whole_lengths = nullptr;
  std::ranges::fill(c_out, 0.0F);
  EXPECT_OK(compute());
  EXPECT_TRUE(same(c_out, out));

  const auto refused = [&](const char* problem) {
    EXPECT_EQ(compute(), RINGATTN_USAGE);
    EXPECT_STREQ(ringattn_error_problem(), problem);
    EXPECT_STRNE(ringattn_error_suggestion(), "");
  };
  batch.q_offsets = nullptr;
  refused("ringattn_batch::whole_lengths is NULL");
  batch.whole_lengths = k_lengths_.data();
  batch.position_heads = 3;
  refused("positions of keys for 3 heads");
  batch.position_heads = kKv;
  std::swap(places_[0], places_[kKv]);
  EXPECT_EQ(compute(), RINGATTN_USAGE);
  EXPECT_NE(std::string(ringattn_error_problem()).find("k_positions [1, 0] is "), std::string::npos);
  batch.k_positions = nullptr;
  refused("ringattn_batch::k_positions is NULL");
  batch.k_positions = places_.data();
  auto latent = sized<ringattn_mla_spec>();
  latent.dtype = kFp32;
  latent.heads = 2;
  latent.head_dim = latent.head_dim_v = latent.latent_dim = 32;
  latent.rope_dim = 16;
  std::swap(places_[0], places_[kKv]);
  batch.position_heads = 1;
  std::vector<std::int32_t> ascending(kKept);
  for (std::size_t i = 0; i < ascending.size(); ++i) ascending[i] = static_cast<std::int32_t>(i < 45 ? i : i - 45);
  batch.k_positions = ascending.data();
  ringattn_mla* object = nullptr;
  EXPECT_EQ(ringattn_mla_create(world.get(), &latent, &batch, 0, nullptr, &object), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "ringattn_batch::k_positions is given");
  // A program that was compiled with the header before has no positions.
  batch.size = 40;
  batch.position_heads = 77;
  EXPECT_OK(compute());
}

TEST_F(CEviction, RefusesAndWritesNothing) {
  const auto refused = [&](const char* problem) {
    EXPECT_EQ(ringattn_evict(&eviction_, &spec_, &batch_, &tensors_), RINGATTN_USAGE);
    EXPECT_STREQ(ringattn_error_problem(), problem);
    EXPECT_STRNE(ringattn_error_suggestion(), "");
  };
  eviction_.method = nullptr;
  refused("ringattn_eviction::method is NULL");
  eviction_.method = "snapkw";
  refused("there is no method of eviction \"snapkw\"");
  eviction_.method = "snapkv";
  eviction_.threads = -1;
  refused("-1 threads are not possible");
  eviction_.threads = 0;
  tensors_.q = nullptr;
  refused("snapkv without queries");
  tensors_.q = q_.get();
  const std::vector<std::int64_t> of_one{0, kQueries};
  batch_.q_lengths = of_one.data();
  refused("snapkv of sequence 0 without queries of it");
  batch_.q_lengths = q_lengths_.data();
  q_rows_.back() = std::numeric_limits<float>::infinity();
  refused("q[29, 3, 31] is inf");
  q_rows_.back() = 0.0F;
  v_rows_[0] = std::numeric_limits<float>::quiet_NaN();
  refused("v[0, 0, 0] is nan");
  v_rows_[0] = 0.0F;
  tensors_.v = nullptr;
  refused("v is NULL");
  tensors_.v = v_.get();
  positions_->shape[1] = 1;
  refused("positions is [65, 1]");
  positions_->shape[1] = kKv;
  k_->shape[0] = 129;
  refused("k is fp32 [129, 2, 32]");
  k_->shape[0] = kKeys;
  spec_.k_format = "int8";
  refused("keys or values have a format");
  spec_.k_format = nullptr;
  spec_.kv_heads = 3;
  refused("K has 3 heads, Q has 4 heads");
  spec_.kv_heads = kKv;
  batch_.size = sizeof batch_ + 8;
  EXPECT_EQ(ringattn_evict(&eviction_, &spec_, &batch_, &tensors_), RINGATTN_USAGE);
  EXPECT_TRUE(std::ranges::all_of(places_, [](std::int32_t place) { return place == -1; }));
  EXPECT_TRUE(std::ranges::all_of(left_k_, [](float value) { return value == 0.0F; }));
}

}  // namespace
}  // namespace ringattn::testing
