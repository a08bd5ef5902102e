// SPDX-License-Identifier: Apache-2.0
#include "ops/common/values.hpp"

#include <gtest/gtest.h>

#include "base/size.hpp"

namespace ringattn {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

TEST(Sizes, TakeSuffixesOf1024) {
  EXPECT_EQ(parse_size("0"), 0);
  EXPECT_EQ(parse_size("4096"), 4096);
  EXPECT_EQ(parse_size("8k"), 8192);
  EXPECT_EQ(parse_size("2M"), 2 << 20);
  EXPECT_EQ(parse_size("3g"), std::int64_t{3} << 30);
  EXPECT_EQ(parse_size("9223372036854775807"), kMost);
  EXPECT_EQ(parse_size("8589934591g"), std::int64_t{8589934591} << 30);
}

TEST(Sizes, RefuseEverythingElse) {
  for (const char* text : {"", "k", "-1", "+1", " 1", "1 ", "1.5k", "1e3", "0x10", "8kb", "8kk", "1t", "k8",
                           "9223372036854775808", "8589934592g", "9007199254740992k", "18446744073709551616"}) {
    EXPECT_EQ(parse_size(text), std::nullopt) << text;
  }
}

TEST(Lists, HoldValuesAndRanges) {
  using List = std::vector<std::int64_t>;
  const auto parse = [](std::string_view text) { return parse_size_list(text, "tokens", 1, kMaxTokens); };
  EXPECT_EQ(parse("8k"), (List{8192}));
  EXPECT_EQ(parse("8k,64k"), (List{8192, 65536}));
  EXPECT_EQ(parse("8k-64k*2"), (List{8192, 16384, 32768, 65536}));
  EXPECT_EQ(parse("1-30*3,7"), (List{1, 3, 9, 27, 7}));
  EXPECT_EQ(parse("5-5*2"), (List{5}));
  for (const char* text : {"", ",", "8k,", "8k-2m", "2m-8k*2", "8k-2m*1", "8k-2m*0", "8k-2m*", "-1", "0", "8k;9k",
                           "1-*2", "8k-2m*2*2", "1-2-3*2"}) {
    EXPECT_THROW(parse(text), BadValue) << text;
  }
}

TEST(Lists, AreBounded) {
  std::string text = "1";
  for (int i = 0; i < 1000; ++i) text += ",1";
  EXPECT_THROW(parse_size_list(text, "tokens", 1, kMaxTokens), BadValue);
  EXPECT_EQ(parse_size_list("1-1152921504606846976*2", "tokens", 1, kMaxTokens).size(), 61U);  // no overflow at the end
}

TEST(Numbers, AreWholeFiniteAndWithinTheirBounds) {
  EXPECT_EQ(parse_integer("-5", -5, 5), -5);
  EXPECT_THROW(parse_integer("6", -5, 5), BadValue);
  EXPECT_THROW(parse_integer("5.0", -5, 5), BadValue);
  EXPECT_THROW(parse_integer("5x", -5, 5), BadValue);
  EXPECT_EQ(parse_seed("18446744073709551615"), std::numeric_limits<std::uint64_t>::max());
  EXPECT_THROW(parse_seed("18446744073709551616"), BadValue);
  EXPECT_THROW(parse_seed("-1"), BadValue);
  EXPECT_EQ(parse_real("0.125"), 0.125);
  EXPECT_EQ(parse_real("1e3"), 1000.0);
  for (const char* text : {"", "nan", "inf", "-inf", "1e999", "1,5", "1.5s", "0x1p3"}) {
    EXPECT_THROW(parse_real(text), BadValue) << text;
  }
}

TEST(Choices, SuggestTheNearest) {
  constexpr std::string_view kChoices[] = {"full", "causal"};
  EXPECT_EQ(parse_choice("causal", kChoices), 1U);
  try {
    parse_choice("casual", kChoices);
    FAIL() << "\"casual\" was accepted";
  } catch (const BadValue& bad) {
    EXPECT_EQ(bad.accepted, "full or causal");
    EXPECT_EQ(bad.suggestion, "Did you mean \"causal\"?");
  }
}

TEST(Bytes, ArePrintedForPeople) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(0x1p40), "1.0 TiB");
}

}  // namespace
}  // namespace ringattn
