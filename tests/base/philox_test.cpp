// SPDX-License-Identifier: Apache-2.0
#include "base/philox.hpp"

#include <gtest/gtest.h>

namespace ringattn {
namespace {

// Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
  const PhiloxWords zero = philox4x32_10({{0, 0, 0, 0}}, 0);
  const std::uint32_t expected_zero[] = {0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U};
  const PhiloxWords ones = philox4x32_10({{~0U, ~0U, ~0U, ~0U}}, ~std::uint64_t{0});
  const std::uint32_t expected_ones[] = {0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU};
  const PhiloxWords pi = philox4x32_10({{0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U}}, 0x299f31d0a4093822U);
  const std::uint32_t expected_pi[] = {0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(zero.word[i], expected_zero[i]);
    EXPECT_EQ(ones.word[i], expected_ones[i]);
    EXPECT_EQ(pi.word[i], expected_pi[i]);
  }
}

}  // namespace
}  // namespace ringattn
