// SPDX-License-Identifier: Apache-2.0
// The choice of sm90_attention's configuration: a pure function of the description, which explains itself, and keeps to
// what an SM has.
#include <gtest/gtest.h>

#include "kernels/attention/sm90/config.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/mla/sm90/config.hpp"
#include "tests/kernels/attention/config_cases.hpp"

namespace ringattn::sm90 {
namespace {

constexpr int kMultiprocessorRegisters = 65536;
constexpr int kMaxSharedBytes = 227 * 1024;  // of a CTA
constexpr int kPanelBytes = 1024;            // a tile's panels are swizzled in pieces of this size

using testing::spec_of_dims;

struct Expected {
  testing::HeadDims dims;
  int key_tile;
  int threads;
  int registers;       // of all threads, once they have changed hands
  int tile_kibibytes;  // of Q, K and V tiles in shared memory
};
// Two or three warpgroups consume, and one produces (TMA). Q tiles are of 64 rows, 2 bytes a column, padded to 64
// columns.
constexpr Expected kExpected[] = {{{64, 64}, 128, 512, 65536, (2 * 3 * 64 * 128 + 4 * 128 * 256) / 1024},
                                  {{96, 96}, 128, 512, 65536, (2 * 3 * 64 * 256 + 2 * 128 * 512) / 1024},
                                  {{128, 128}, 128, 512, 65536, (2 * 3 * 64 * 256 + 2 * 128 * 512) / 1024},
                                  {{192, 128}, 112, 512, 65536, (3 * 64 * 384 + 2 * 112 * (384 + 256)) / 1024},
                                  {{256, 256}, 80, 384, 64512, (2 * 64 * 512 + 2 * 80 * 1024) / 1024}};

TEST(Sm90Config, DependsOnDtypeAndDimsOnly) {
  for (const Expected& expected : kExpected) {
    for (const AttentionSpec& spec : testing::specs_of(expected.dims.head_dim, expected.dims.head_dim_v)) {
      SCOPED_TRACE(ringattn::describe(spec));
      const auto chosen = choose_config(spec);
      ASSERT_TRUE(chosen.has_value());
      EXPECT_EQ(chosen->head_dim, expected.dims.head_dim);
      EXPECT_EQ(chosen->head_dim_v, expected.dims.head_dim_v);
      EXPECT_EQ(chosen->key_tile, expected.key_tile);
      EXPECT_EQ(chosen->threads(), expected.threads);
      EXPECT_EQ(chosen->tile_bytes(), expected.tile_kibibytes * 1024);
      EXPECT_EQ(128 * (chosen->producer_registers() + (expected.threads / 128 - 1) * chosen->consumer_registers()),
                expected.registers);
    }
  }
}

TEST(Sm90Config, TakesItsHeadDimsAndNoOthers) {
  testing::expect_taken_dims([](const AttentionSpec& spec) { return choose_config(spec).has_value(); },
                             attention_missing);
}

TEST(Sm90Config, EveryConfigurationHasAKernel) {
  for (const Expected& expected : kExpected) {
    testing::expect_made_tiles("sm90_attention", expected.dims, /*query_tile=*/64, expected.key_tile);
  }
}

TEST(Sm90Config, SaysWhatIsMissing) {
  testing::expect_missing_texts([](const AttentionSpec& spec) {
    EXPECT_FALSE(choose_config(spec).has_value());
    return attention_missing(spec);
  });
}

// The table of latents has no head_dim that is head_dim_v, and names what it has.
TEST(Sm90Config, NamesTheDimsOfLatents) {
  const std::vector<std::string> missing = mla_missing({make_spec(Dtype::kBf16, 8, 1, 128, {-1, 0}), false, {}});
  ASSERT_FALSE(missing.empty());
  EXPECT_EQ(missing.front(), "head_dim 128 (supported: 576 with 512)");
}

// What the kernel asks of the hardware; what else lies in shared memory is checked where it is laid out.
TEST(Sm90Config, FitsAMultiprocessor) {
  for (const AttentionConfig& config : kAttentionConfigs) {
    SCOPED_TRACE(describe(config));
    EXPECT_LT(config.tile_bytes(), kMaxSharedBytes);
    for (const int bytes : {config.q_bytes(), config.k_bytes(), config.v_bytes()}) EXPECT_EQ(bytes % kPanelBytes, 0);
    EXPECT_GE(config.k_bytes(), config.key_tile * config.head_dim * 2);
    EXPECT_GE(config.stages, 1);
    EXPECT_GE(config.q_stages, 1);
    EXPECT_EQ(config.key_tile % 16, 0);  // the second MMA takes 16 keys at a time
    EXPECT_LE(config.key_tile, 256);     // rows of one copy

    EXPECT_LE(128 * (config.producer_registers() + config.warpgroups * config.consumer_registers()),
              kMultiprocessorRegisters);
    for (const int registers : {config.producer_registers(), config.consumer_registers()}) {
      EXPECT_EQ(registers % 8, 0);
      EXPECT_GE(registers, 24);
      EXPECT_LE(registers, 256);
    }
    // Registers change hands after the launch, which gives every thread as many.
    EXPECT_LE(config.producer_registers(), kMultiprocessorRegisters / config.threads());
    EXPECT_GE(config.consumer_registers(), kMultiprocessorRegisters / config.threads() / 8 * 8);
  }
}

// What a .cu file names by its dims is the table's entry.
TEST(Sm90Config, IsFoundByDims) {
  static_assert(config_for(192, 128).key_tile == 112 && config_for(256, 256).key_tile == 80);
  EXPECT_EQ(describe(config_for(128, 128)), describe(*choose_config(spec_of_dims(Dtype::kBf16, 128, 128))));
}

// What the kernel takes for granted of a device.
TEST(Sm90Config, KnowsItsDevices) {
  EXPECT_EQ(device_obstacle(kReservedBytes, 132), "");
  EXPECT_EQ(device_obstacle(kReservedBytes, kMaxCtas), "");
  EXPECT_EQ(device_obstacle(2048, 132), "its driver reserves 2048 bytes of a CTA's shared memory, not 1024");
  EXPECT_EQ(device_obstacle(kReservedBytes, 161), "it has 161 multiprocessors, and the kernel supports at most 160");
}

TEST(Sm90Config, DescribesItself) {
  EXPECT_EQ(describe(*choose_config(spec_of_dims(Dtype::kBf16, 128, 128))),
            "tile 3x64x128, cluster of 2 CTAs, 2 stages of keys, 224.0 KiB, 160 registers");
  EXPECT_EQ(describe(*choose_config(spec_of_dims(Dtype::kF16, 64, 64))),
            "tile 3x64x128 overlapped, 4 stages of keys, 176.0 KiB, 160 registers");
  EXPECT_EQ(describe(*choose_config(spec_of_dims(Dtype::kBf16, 256, 256))),
            "tile 2x64x80 overlapped, cluster of 2 CTAs, 2 stages of keys, 224.0 KiB, 232 registers");
}

// The swizzle repeats every eight rows.
TEST(Sm90Config, SharesOfCtasAreWholeSwizzles) {
  for (const AttentionConfig& config : kAttentionConfigs) {
    EXPECT_EQ(config.key_tile, config.key_box_rows() * config.cluster_ctas);
    EXPECT_EQ(config.key_box_rows() % 8, 0);
  }
}

TEST(Sm90Config, ListsWhatIsCompiled) {
  const std::vector<std::string> lines = attention_configs();
  ASSERT_EQ(lines.size(), 5U);
  EXPECT_EQ(lines[2], "head_dim 128: tile 3x64x128, cluster of 2 CTAs, 2 stages of keys, 224.0 KiB, 160 registers");
  EXPECT_TRUE(lines[3].starts_with("head_dim 192/128: "));
}

}  // namespace
}  // namespace ringattn::sm90
