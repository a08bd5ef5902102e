// SPDX-License-Identifier: Apache-2.0
// The choice of sm80_fold's configuration: a pure function of the description, which explains itself.
#include <gtest/gtest.h>

#include "kernels/sm80/config.hpp"
#include "tests/kernels/cuda/config_cases.hpp"

namespace ringattn::sm80 {
namespace {

using testing::spec_of_dims;

TEST(Sm80Config, DependsOnDtypeAndDimsOnly) {
  testing::for_specs_of(kFoldConfigs, [](const FoldConfig& config, const FoldSpec& spec) {
    const auto chosen = choose_config(spec);
    ASSERT_TRUE(chosen.has_value());
    EXPECT_EQ(chosen->head_dim_v, config.head_dim_v);
    EXPECT_EQ(chosen->key_tile, config.key_tile);
    EXPECT_EQ(chosen->query_tile(), config.query_tile());
    EXPECT_TRUE(fold_missing(spec).empty());
  });
}

TEST(Sm80Config, SaysWhatIsMissing) {
  testing::expect_missing_texts([](const FoldSpec& spec) {
    EXPECT_FALSE(choose_config(spec).has_value());
    return fold_missing(spec);
  });
}

// What a .cu file names by its dims is the table's entry.
TEST(Sm80Config, IsFoundByDims) {
  static_assert(config_for(64, 64).key_tile == 128 && config_for(192, 128).head_dim_v == 128);
  EXPECT_EQ(describe(config_for(256, 256)), describe(*choose_config(spec_of_dims(Dtype::kBf16, 256, 256))));
}

TEST(Sm80Config, DescribesItself) {
  EXPECT_EQ(describe(*choose_config(spec_of_dims(Dtype::kBf16, 128, 128))),
            "tile 128x64, 4 warps of 32 rows, 2 stages of keys, 97.5 KiB");
  EXPECT_EQ(describe(*choose_config(spec_of_dims(Dtype::kF16, 192, 128))),
            "tile 128x64, 4 warps of 32 rows, 1 stage of keys, 89.5 KiB");
}

}  // namespace
}  // namespace ringattn::sm80
