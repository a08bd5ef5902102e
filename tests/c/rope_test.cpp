// SPDX-License-Identifier: Apache-2.0
// RoPE through the C interface: the bits of C++, in place and back again, its frequencies, and refusals.
#include "ops/rope/rope.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/c/c_tensors.hpp"

namespace ringattn::testing {
namespace {

constexpr std::int64_t kRopeRows = 9, kRopeHeads = 3, kRopeDim = 16;

TEST(CRope, HasTheBitsOfCppAndRefusesByName) {
  SelfWorld world;
  auto spec = sized<ringattn_rope_spec>();
  spec.dtype = c_dtype(Dtype::kF32);
  spec.head_dim = kRopeDim;
  spec.type = "linear";
  spec.parameters = "factor=2";
  spec.theta = 5e5;
  ringattn_rope* rope = nullptr;
  ASSERT_EQ(ringattn_rope_create(world.get(), &spec, nullptr, &rope), RINGATTN_OK);
  auto facts = sized<ringattn_rope_facts>();
  EXPECT_OK(ringattn_rope_get_facts(rope, &facts));
  EXPECT_EQ(facts.rotary_dim, kRopeDim);
  EXPECT_EQ(facts.axes, 1);

  RopeParameters parameters;
  parameters.type = RopeType::kLinear;
  parameters.factor = 2.0;
  parameters.theta = 5e5;
  Rope cpp(make_rope_spec(parameters, Dtype::kF32, kRopeDim, RopePairs::kHalfSplit, false), {{"cpu"}, 1});
  std::vector<double> frequencies(kRopeDim / 2);
  double factor = 0.0;
  EXPECT_OK(ringattn_rope_frequencies(rope, kRopeDim / 2, frequencies.data(), &factor));
  EXPECT_EQ(frequencies, cpp.spec().frequencies);
  EXPECT_EQ(factor, 1.0);

  const Numbers rows = normal(kRopeRows * kRopeHeads * kRopeDim, 1);
  Numbers wanted = rows, found = rows;
  std::array<std::int32_t, kRopeRows> positions{7, 0, 1, 5, 100000, 2, 2, 3, 9};
  const MutableTensorView whole =
      dense_view(static_cast<void*>(wanted.data()), Dtype::kF32, kRopeRows, kRopeHeads, kRopeDim);
  const RopeTensor in_place{whole, whole};
  cpp.run({{positions.data()}, {&in_place, 1}});

  CTensor k(found.data(), spec.dtype, {kRopeRows, kRopeHeads, kRopeDim});
  CTensor at(positions.data(), DLDataType{kDLInt, 32, 1}, {kRopeRows});
  auto tensors = sized<ringattn_rope_tensors>();
  tensors.k = tensors.k_out = k.get();
  tensors.positions = at.get();
  EXPECT_OK(ringattn_rope_run(rope, &tensors));
  EXPECT_EQ(found, wanted);
  tensors.inverse = 1;
  EXPECT_OK(ringattn_rope_enqueue(rope, &tensors));
  EXPECT_OK(ringattn_rope_wait(rope));
  for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_NEAR(found[i], rows[i], 1e-5);

  tensors.k = nullptr;
  EXPECT_EQ(ringattn_rope_run(rope, &tensors), RINGATTN_USAGE);
  EXPECT_EQ(ringattn_rope_frequencies(rope, 3, frequencies.data(), &factor), RINGATTN_USAGE);
  ringattn_rope_destroy(rope);
  spec.parameters = "factor=2,alpha=3";
  EXPECT_EQ(ringattn_rope_create(world.get(), &spec, nullptr, &rope), RINGATTN_USAGE);
  EXPECT_NE(std::string(ringattn_error_text()).find("\"alpha=3\" is not a parameter"), std::string::npos);
  spec.type = "axial";
  EXPECT_EQ(ringattn_rope_create(world.get(), &spec, nullptr, &rope), RINGATTN_USAGE);
}

// Two steps into a cache: the bits of rotated rows in a decode that rotates nothing.
TEST(CRope, RotatesTheRowsOfADecode) {
  constexpr std::int64_t kLength = 8;
  SelfWorld world;
  auto spec = sized<ringattn_spec>();
  spec.dtype = c_dtype(Dtype::kF32);
  spec.heads = spec.kv_heads = kRopeHeads;
  spec.head_dim = kRopeDim;
  auto rope = sized<ringattn_rope_spec>();
  rope.dtype = spec.dtype;
  rope.head_dim = kRopeDim;
  rope.interleaved = 1;
  auto limits = sized<ringattn_decode_limits>();
  limits.sequences = 1;
  limits.rows = 2;
  limits.keys = kLength;
  Rope cpp(make_rope_spec({}, Dtype::kF32, kRopeDim, RopePairs::kInterleaved, false), {{"cpu"}, 1});
  Numbers outs[2], caches[2];
  for (const bool rotates : {false, true}) {
    ringattn_decode* decode = nullptr;
    ASSERT_EQ(rotates ? ringattn_decode_create_with_rope(world.get(), &spec, &rope, &limits, nullptr, &decode)
                      : ringattn_decode_create(world.get(), &spec, &limits, nullptr, &decode),
              RINGATTN_OK)
        << ringattn_error_text();
    Numbers k(kLength * kRopeHeads * kRopeDim), v = k;
    std::int32_t length = 0;
    for (const std::int64_t first : {0, 2}) {
      Numbers q = normal(2 * kRopeHeads * kRopeDim, 7), k_new = normal(q.size(), 8), v_new = normal(q.size(), 9);
      if (!rotates) {
        for (Numbers* const rows : {&q, &k_new}) {
          const MutableTensorView view =
              dense_view(static_cast<void*>(rows->data()), Dtype::kF32, 2, kRopeHeads, kRopeDim);
          const RopeTensor in_place{view, view};
          cpp.run({{.first = first}, {&in_place, 1}});
        }
      }
      Numbers out(q.size()), lse(2 * kRopeHeads);
      CTensor tq(q.data(), spec.dtype, {2, kRopeHeads, kRopeDim}),
          tk(k.data(), spec.dtype, {1, kLength, kRopeHeads, kRopeDim});
      CTensor tv(v.data(), spec.dtype, {1, kLength, kRopeHeads, kRopeDim}), tn(&length, DLDataType{kDLInt, 32, 1}, {1});
      CTensor tkn(k_new.data(), spec.dtype, {2, kRopeHeads, kRopeDim}),
          tvn(v_new.data(), spec.dtype, {2, kRopeHeads, kRopeDim});
      CTensor to(out.data(), spec.dtype, {2, kRopeHeads, kRopeDim}), tl(lse.data(), spec.dtype, {2, kRopeHeads});
      auto tensors = sized<ringattn_decode_tensors>();
      tensors.q = tq.get();
      tensors.k = tk.get();
      tensors.v = tv.get();
      tensors.lengths_before = tn.get();
      tensors.k_new = tkn.get();
      tensors.v_new = tvn.get();
      tensors.out = to.get();
      tensors.lse = tl.get();
      tensors.rows = 2;
      tensors.update_lengths = 1;
      EXPECT_OK(ringattn_decode_run(decode, &tensors));
      outs[rotates ? 1 : 0] = out;
    }
    caches[rotates ? 1 : 0] = k;
    ringattn_decode_destroy(decode);
  }
  EXPECT_EQ(outs[0], outs[1]);
  EXPECT_EQ(caches[0], caches[1]);
  ringattn_decode* decode = nullptr;
  EXPECT_EQ(ringattn_decode_create_with_rope(world.get(), &spec, nullptr, &limits, nullptr, &decode), RINGATTN_USAGE);
  rope.head_dim = 2 * kRopeDim;
  EXPECT_EQ(ringattn_decode_create_with_rope(world.get(), &spec, &rope, &limits, nullptr, &decode), RINGATTN_USAGE);
  EXPECT_STREQ(ringattn_error_problem(), "RoPE of fp32 rows with head_dim 32");
}

}  // namespace
}  // namespace ringattn::testing
