// SPDX-License-Identifier: Apache-2.0
// What every kernel with a table of configurations promises of its choice: sm80_attention's and sm90_attention's tests
// share it. Head dims and tiles stand here and in those tests as numbers, and not as the tables under test have them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/common/registry.hpp"
#include "tests/support/attention_inputs.hpp"

namespace ringattn::testing {

inline AttentionSpec spec_of_dims(Dtype dtype, int head_dim, int head_dim_v) {
  return make_spec(dtype, 8, 2, head_dim, {-1, 0}, head_dim_v);
}

struct HeadDims {
  int head_dim;
  int head_dim_v;
};
inline constexpr HeadDims kTensorCoreDims[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};

inline bool any_is(std::span<const HeadDims> list, int head_dim, int head_dim_v) {
  return std::ranges::any_of(
      list, [&](const HeadDims& dims) { return dims.head_dim == head_dim && dims.head_dim_v == head_dim_v; });
}

// Specs of the dims with all else varied: none of it may decide which config is chosen.
inline std::vector<AttentionSpec> specs_of(int head_dim, int head_dim_v) {
  std::vector<AttentionSpec> specs;
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    AttentionSpec spec = spec_of_dims(dtype, head_dim, head_dim_v);
    for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{100, 3}}) {
      spec.mask = mask;
      spec.softcap = mask.left > 0 ? 20.0F : 0.0F;
      spec.sinks = mask.left > 0;
      spec.softmax_scale = mask.right < 0 ? -1.0F : 0.1F;
      spec.kv_heads = mask.right < 0 ? 8 : 1;
      specs.push_back(spec);
    }
  }
  return specs;
}

// A kernel of the table is made for kTensorCoreDims, for `others`, and for no more: `able(spec)` and what it says is
// missing agree.
template <class Able, class Missing>
void expect_taken_dims(Able able, Missing missing, std::span<const HeadDims> others = {}) {
  for (int dim = 8; dim <= 640; dim += 8) {
    for (const int dim_v : {dim, 64, 128, 192, 256, 512}) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
        const AttentionSpec spec = spec_of_dims(dtype, dim, dim_v);
        const bool supported =
            dtype != Dtype::kF32 && (any_is(kTensorCoreDims, dim, dim_v) || any_is(others, dim, dim_v));
        EXPECT_EQ(able(spec), supported) << describe(spec);
        EXPECT_EQ(missing(spec).empty(), supported) << describe(spec);
      }
    }
  }
}

// What the kernel that is really made for the dims says of its tiles.
inline void expect_made_tiles(std::string_view name, const HeadDims& dims, int query_tile, int key_tile) {
  const auto table = kernel_table<AttentionSpec>();
  const auto row = std::ranges::find(table, name, &AttentionRow::name);
  ASSERT_NE(row, table.end()) << "the table has no " << name;
  const auto backend = row->make_backend({1, kNoDevice});
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    const AttentionSpec spec = spec_of_dims(dtype, dims.head_dim, dims.head_dim_v);
    const auto kernel = row->make_kernel(spec, *backend);
    EXPECT_EQ(kernel->key_tile(), key_tile) << describe(spec);
    EXPECT_EQ(kernel->query_tile(), query_tile) << describe(spec);
  }
}

// `missing(spec)` is the kernel's attention_missing(); `unequal` and `equal` are the head dims that it names.
template <class Missing>
void expect_missing_texts(Missing missing, const std::string& unequal = "192 with 128",
                          const std::string& equal = "64, 96, 128, 256") {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(missing(spec_of_dims(Dtype::kF32, 128, 128)), Texts{"fp32 (supported: bf16, fp16)"});
  EXPECT_EQ(missing(spec_of_dims(Dtype::kBf16, 80, 80)), Texts{"head_dim 80 (supported: " + equal + ")"});
  EXPECT_EQ(missing(spec_of_dims(Dtype::kF16, 192, 192)), Texts{"head_dim 192 (supported: " + equal + ")"});
  EXPECT_EQ(missing(spec_of_dims(Dtype::kF16, 128, 64)),
            Texts{"head_dim 128 with head_dim_v 64 (supported: " + unequal + ")"});
  EXPECT_EQ(missing(spec_of_dims(Dtype::kF32, 40, 40)),
            (Texts{"fp32 (supported: bf16, fp16)", "head_dim 40 (supported: " + equal + ")"}));
}

}  // namespace ringattn::testing
