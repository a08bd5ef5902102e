// SPDX-License-Identifier: Apache-2.0
// Products of heads with their matrices through the C interface: the bits of C++, the absorbed form of latent attention
// with GEMMs of the caller's, and refusals.
#include "ops/batched_gemm/batched_gemm.hpp"

#include <fmt/format.h>

#include <functional>
#include <limits>
#include <string>

#include "tests/c/c_tensors.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kRows = 50, kHeads = 3, kDim = 16, kRope = 8, kLatent = 40;
const DLDataType kFp32 = c_dtype(Dtype::kF32);

class Product {
 public:
  Product(SelfWorld& world, int dim_k, int dim_n) {
    auto spec = sized<ringattn_batched_gemm_spec>();
    spec.dtype = kFp32;
    spec.heads = kHeads;
    spec.dim_k = dim_k;
    spec.dim_n = dim_n;
    EXPECT_OK(ringattn_batched_gemm_create(world.get(), &spec, nullptr, &object_));
  }
  ~Product() { ringattn_batched_gemm_destroy(object_); }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  ringattn_batched_gemm* get() const { return object_; }
  ringattn_status run(CTensor& rows, CTensor& weights, CTensor& out) const {
    const ringattn_batched_gemm_tensors tensors = {sizeof tensors, rows.get(), weights.get(), out.get(), nullptr};
    return ringattn_batched_gemm_run(object_, &tensors);
  }

 private:
  ringattn_batched_gemm* object_ = nullptr;
};

TEST(CBatchedGemm, HasTheBitsOfCppEitherWayRound) {
  const Numbers rows = normal(kRows * kHeads * kDim, 1), weights = normal(kHeads * kDim * kLatent, 2);
  Numbers out(kRows * kHeads * kLatent), c_out(out.size());
  BatchedGemmOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  BatchedGemm door({{Dtype::kF32, kDim, kLatent}, kHeads}, options);
  const GemmWeights as_it_lies{weights.data(), Dtype::kF32, kHeads, kDim, kLatent, kDim * kLatent, kLatent, 1};
  door.run({view(rows, kRows, kHeads, kDim), as_it_lies.transposed(), view(out, kRows, kHeads, kLatent)});

  SelfWorld world;
  const Product product(world, kDim, kLatent);
  auto facts = sized<ringattn_batched_gemm_facts>();
  EXPECT_OK(ringattn_batched_gemm_get_facts(product.get(), &facts));
  EXPECT_STREQ(facts.kernel, door.kernel().row->name.data());
  EXPECT_GT(facts.memory_bytes, 0U);
  CTensor tr(rows.data(), kFp32, {kRows, kHeads, kDim}), to(c_out.data(), kFp32, {kRows, kHeads, kLatent});
  CTensor across(weights.data(), kFp32, {kHeads, kLatent, kDim}, {kDim * kLatent, 1, kLatent});
  EXPECT_OK(product.run(tr, across, to));
  EXPECT_TRUE(same(c_out, out));

  Numbers turned(weights.size());  // [heads, dim_n, dim_k], dense
  for (std::int64_t i = 0; i < kHeads * kDim * kLatent; ++i) {
    const std::int64_t head = i / (kDim * kLatent), d = i / kLatent % kDim, c = i % kLatent;
    turned[static_cast<std::size_t>((head * kLatent + c) * kDim + d)] = weights[static_cast<std::size_t>(i)];
  }
  CTensor along(turned.data(), kFp32, {kHeads, kLatent, kDim});
  std::ranges::fill(c_out, -1.0F);
  const ringattn_batched_gemm_tensors tensors = {sizeof tensors, tr.get(), along.get(), to.get(), nullptr};
  EXPECT_OK(ringattn_batched_gemm_enqueue(product.get(), &tensors));
  EXPECT_OK(ringattn_batched_gemm_wait(product.get()));
  EXPECT_TRUE(same(c_out, out));
}

// q and out of one ringattn_mla, with its matrices and with the caller's GEMMs.
TEST(CBatchedGemm, IsWhatTheAbsorbedFormMakesOfItsMatrices) {
  constexpr std::int64_t kWide = kLatent + kRope;
  const Numbers q = normal(kRows * kHeads * (kDim + kRope), 1), c = normal(kRows * kLatent, 2);
  const Numbers k_rope = normal(kRows * kRope, 3), kv_b = normal(kHeads * 2 * kDim * kLatent, 4);
  const std::vector<std::int64_t> strides{2 * kDim * kLatent, kLatent, 1};
  CTensor w_uk(kv_b.data(), kFp32, {kHeads, kDim, kLatent}, strides);
  CTensor absorption(kv_b.data(), kFp32, {kHeads, kLatent, kDim}, {strides[0], 1, kLatent});
  CTensor w_uv(kv_b.data() + kDim * kLatent, kFp32, {kHeads, kDim, kLatent}, strides);
  Numbers out(kRows * kHeads * kDim), absorbed(kRows * kHeads * kWide), latents(kRows * kHeads * kLatent),
      back(out.size());
  SelfWorld world;
  auto spec = sized<ringattn_mla_spec>();
  spec.dtype = kFp32;
  spec.heads = kHeads;
  spec.head_dim = spec.head_dim_v = kDim;
  spec.rope_dim = kRope;
  spec.latent_dim = kLatent;
  auto batch = sized<ringattn_batch>();
  batch.sequences = 1;
  batch.q_lengths = &kRows;
  ringattn_mla* latent = nullptr;
  ASSERT_EQ(ringattn_mla_create(world.get(), &spec, &batch, RINGATTN_ABSORBED, nullptr, &latent), RINGATTN_OK)
      << ringattn_error_text();
  CTensor tq(q.data(), kFp32, {kRows, kHeads, kDim + kRope}), tc(c.data(), kFp32, {kRows, 1, kLatent});
  CTensor tr(k_rope.data(), kFp32, {kRows, 1, kRope}), to(out.data(), kFp32, {kRows, kHeads, kDim});
  auto tensors = sized<ringattn_mla_tensors>();
  tensors.q = tq.get();
  tensors.latent = tc.get();
  tensors.k_rope = tr.get();
  tensors.w_uk = w_uk.get();
  tensors.w_uv = w_uv.get();
  tensors.out = to.get();
  EXPECT_OK(ringattn_mla_run(latent, &tensors));

  CTensor nope(q.data(), kFp32, {kRows, kHeads, kDim}, {kHeads * (kDim + kRope), kDim + kRope, 1});
  CTensor in_latent(absorbed.data(), kFp32, {kRows, kHeads, kLatent}, {kHeads * kWide, kWide, 1});
  EXPECT_OK(Product(world, kDim, kLatent).run(nope, absorption, in_latent));
  for (std::int64_t row = 0; row < kRows * kHeads; ++row) {
    std::copy_n(q.begin() + row * (kDim + kRope) + kDim, kRope, absorbed.begin() + row * kWide + kLatent);
  }
  CTensor wide(absorbed.data(), kFp32, {kRows, kHeads, kWide}), tl(latents.data(), kFp32, {kRows, kHeads, kLatent});
  tensors.q = wide.get();
  tensors.w_uk = tensors.w_uv = nullptr;
  tensors.out = tl.get();
  EXPECT_OK(ringattn_mla_run(latent, &tensors));
  CTensor tb(back.data(), kFp32, {kRows, kHeads, kDim});
  EXPECT_OK(Product(world, kLatent, kDim).run(tl, w_uv, tb));
  EXPECT_TRUE(same(back, out));
  ringattn_mla_destroy(latent);
}

TEST(CBatchedGemm, RefusesWhatDoesNotFit) {
  SelfWorld world;
  auto spec = sized<ringattn_batched_gemm_spec>();
  spec.dtype = kFp32;
  ringattn_batched_gemm* none = nullptr;
  const auto not_made = [&](int heads, int dim_k, int dim_n, ringattn_status status, const std::string& words) {
    spec.heads = heads;
    spec.dim_k = dim_k;
    spec.dim_n = dim_n;
    EXPECT_EQ(ringattn_batched_gemm_create(world.get(), &spec, nullptr, &none), status) << words;
    EXPECT_NE(std::string(ringattn_error_text()).find(words), std::string::npos) << ringattn_error_text();
    EXPECT_EQ(none, nullptr);
  };
  not_made(0, kDim, kLatent, RINGATTN_USAGE, "a batched GEMM of 0 heads");
  EXPECT_STREQ(ringattn_error_suggestion(), "Say how many heads the weights have.");
  not_made(65537, kDim, kLatent, RINGATTN_USAGE, "a batched GEMM of 65537 heads");
  not_made(kHeads, 0, kLatent, RINGATTN_USAGE, "a batched GEMM with k 0 and n 40");
  not_made(kHeads, kDim, -8, RINGATTN_USAGE, "a batched GEMM with k 16 and n -8");
  not_made(kHeads, 15, kLatent, RINGATTN_UNSUPPORTED, "k 15 (supported: multiples of 8)");
  not_made(kHeads, kDim, 12, RINGATTN_UNSUPPORTED, "n 12 (supported: multiples of 8)");
  spec.dtype = kInt32;
  not_made(kHeads, kDim, kLatent, RINGATTN_USAGE, "dtype is int32");

  const Product product(world, kDim, kLatent);
  Numbers rows = normal(kRows * kHeads * kDim, 1), out(kRows * kHeads * kLatent, -1.0F);
  const Numbers weights = normal(kHeads * kDim * kLatent, 2), untouched = out;
  CTensor tr(rows.data(), kFp32, {kRows, kHeads, kDim}), tw(weights.data(), kFp32, {kHeads, kLatent, kDim});
  CTensor to(out.data(), kFp32, {kRows, kHeads, kLatent});
  const auto refused = [&](CTensor& r, CTensor& w, CTensor& o, const std::string& words) {
    EXPECT_EQ(product.run(r, w, o), RINGATTN_USAGE) << words;
    EXPECT_NE(std::string(ringattn_error_text()).find(words), std::string::npos) << ringattn_error_text();
    EXPECT_TRUE(same(out, untouched));
  };
  CTensor other_way(weights.data(), kFp32, {kHeads, kDim, kLatent});
  refused(tr, other_way, to, "weights are fp32 [3, 16, 40] (the batched GEMM was made for fp32 [3, 40, 16]");
  CTensor apart(weights.data(), kFp32, {kHeads, kLatent, kDim}, {kDim * kLatent, 2 * kDim, 2});
  refused(tr, apart, to, "axis 2 of weights has a stride of 2");
  CTensor two_heads(rows.data(), kFp32, {kRows, 2, kDim});
  refused(two_heads, tw, to, "rows are fp32 [50, 2, 16] (they should be fp32 [rows, 3 or 1, 16])");
  CTensor half(rows.data(), {kDLFloat, 16, 1}, {kRows, kHeads, kDim});
  refused(half, tw, to,
          "rows are fp16 [50, 3, 16] (the batched GEMM was made for fp32: rows, weights and out have one dtype). "
          "Convert the "
          "rows to fp32, or what they are multiplied by to fp16.");
  CTensor half_weights(weights.data(), {kDLFloat, 16, 1}, {kHeads, kLatent, kDim});
  refused(tr, half_weights, to,
          "weights are fp16 [3, 40, 16] (the batched GEMM was made for fp32: rows, weights and out have one dtype). "
          "Convert "
          "the weights to fp32");
  CTensor half_out(out.data(), {kDLFloat, 16, 1}, {kRows, kHeads, kLatent});
  refused(tr, tw, half_out, "out is fp16 [50, 3, 40] (the batched GEMM was made for fp32");
  CTensor fewer(out.data(), kFp32, {kRows - 1, kHeads, kLatent});
  refused(tr, tw, fewer, "out is fp32 [49, 3, 40] (it should be fp32 [50, 3, 40])");
  CTensor flat(rows.data(), kFp32, {kRows, kHeads * kDim});
  refused(flat, tw, to, "rows has 2 axes");
  CTensor spread(out.data(), kFp32, {kRows, kHeads, kLatent}, {0, kLatent, 1});
  refused(tr, tw, spread, "out has strides 0 and 40");
  // Strides whose rows no memory has, in either direction.
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max(), kFar = std::int64_t{1} << 61;
  for (const std::int64_t stride : {kMost, -kMost - 1, kFar, -kFar, kFar / 4}) {
    CTensor far_rows(rows.data(), kFp32, {kRows, kHeads, kDim}, {stride, kDim, 1});
    refused(far_rows, tw, to, fmt::format("rows have strides of {} and 16", stride));
    CTensor far_out(out.data(), kFp32, {kRows, kHeads, kLatent}, {stride, kLatent, 1});
    refused(tr, tw, far_out, fmt::format("out has strides of {} and 40", stride));
    CTensor far_heads(out.data(), kFp32, {kRows, kHeads, kLatent}, {kLatent, stride, 1});
    refused(tr, tw, far_heads, fmt::format("out has strides of 40 and {}", stride));
    CTensor far_weights(weights.data(), kFp32, {kHeads, kLatent, kDim}, {kDim * kLatent, stride, 1});
    refused(tr, far_weights, to, fmt::format("weights have strides of {} and 640", stride));
  }
  CTensor in_rows(rows.data(), kFp32, {8, kHeads, kLatent}), some(rows.data(), kFp32, {8, kHeads, kDim});
  refused(some, tw, in_rows, "out overlaps rows");
  CTensor in_weights(weights.data() + kLatent, kFp32, {8, kHeads, kLatent});
  refused(some, tw, in_weights, "out overlaps weights");
  auto tensors = sized<ringattn_batched_gemm_tensors>();
  tensors.rows = tr.get();
  tensors.out = to.get();
  EXPECT_EQ(ringattn_batched_gemm_enqueue(product.get(), &tensors), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "weights is NULL");

  CTensor no_rows(nullptr, kFp32, {0, kHeads, kDim}), no_out(nullptr, kFp32, {0, kHeads, kLatent});
  EXPECT_OK(product.run(no_rows, tw, no_out));
}

}  // namespace
}  // namespace ringattn::testing
