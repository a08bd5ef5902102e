// SPDX-License-Identifier: Apache-2.0
// The choice of sm80_fold's configuration: a pure function of the description, which explains itself.
#include <gtest/gtest.h>

#include "kernels/sm80/config.hpp"
#include "tests/support/fold_inputs.hpp"

namespace ringattn::sm80 {
namespace {

FoldSpec spec_of(Dtype dtype, int head_dim, int head_dim_v) {
  FoldSpec spec = testing::make_spec(dtype, 8, 2, head_dim, {-1, 0});
  spec.head_dim_v = head_dim_v;
  return spec;
}

TEST(Sm80Config, DependsOnDtypeAndDimsOnly) {
  for (const FoldConfig& config : kFoldConfigs) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
      FoldSpec spec = spec_of(dtype, config.head_dim, config.head_dim_v);
      for (const Mask& mask : {Mask{-1, -1}, Mask{-1, 0}, Mask{100, 3}}) {
        spec.mask = mask;
        spec.softcap = mask.left > 0 ? 20.0F : 0.0F;
        spec.kv_heads = mask.right < 0 ? 8 : 1;
        const auto chosen = choose_config(spec);
        ASSERT_TRUE(chosen.has_value()) << config.head_dim;
        EXPECT_EQ(chosen->head_dim_v, config.head_dim_v);
        EXPECT_EQ(chosen->key_tile, config.key_tile);
        EXPECT_EQ(chosen->query_tile(), config.query_tile());
        EXPECT_TRUE(fold_missing(spec).empty());
      }
    }
  }
}

TEST(Sm80Config, SaysWhatIsMissing) {
  const auto missing = [](Dtype dtype, int head_dim, int head_dim_v) {
    const FoldSpec spec = spec_of(dtype, head_dim, head_dim_v);
    EXPECT_FALSE(choose_config(spec).has_value());
    return fold_missing(spec);
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(missing(Dtype::kF32, 128, 128), Texts{"fp32 (supported: bf16, fp16)"});
  EXPECT_EQ(missing(Dtype::kBf16, 80, 80), Texts{"head_dim 80 (supported: 64, 96, 128, 256)"});
  EXPECT_EQ(missing(Dtype::kF16, 192, 192), Texts{"head_dim 192 (supported: 64, 96, 128, 256)"});
  EXPECT_EQ(missing(Dtype::kF16, 128, 64), Texts{"head_dim 128 with head_dim_v 64 (supported: 192 with 128)"});
  EXPECT_EQ(missing(Dtype::kF32, 40, 40).size(), 2U);
}

TEST(Sm80Config, DescribesItself) {
  EXPECT_EQ(describe(*choose_config(spec_of(Dtype::kBf16, 128, 128))),
            "tile 128x64, 4 warps of 32 rows, 2 stages of keys, 97.5 KiB");
  EXPECT_EQ(describe(*choose_config(spec_of(Dtype::kF16, 192, 128))),
            "tile 128x64, 4 warps of 32 rows, 1 stage of keys, 89.5 KiB");
}

}  // namespace
}  // namespace ringattn::sm80
