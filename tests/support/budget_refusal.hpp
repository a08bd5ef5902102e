// SPDX-License-Identifier: Apache-2.0
// The message of a plan that doesn't fit its memory budget.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.hpp"

namespace ringattn::testing {

// The bytes in a refusal, the setting that it names, and what it says about blocks.
struct Refusal {
  std::size_t counted = 0;
  std::size_t named = 0;
  std::string text;
};

inline Refusal refusal_of(const Error& error) {
  EXPECT_EQ(error.code(), ErrorCode::kMemory) << error.what();
  Refusal refusal;
  refusal.text = error.what();
  const char* const text = refusal.text.c_str();
  char* unit = nullptr;
  refusal.counted = std::strtoull(std::strchr(text, '(') + 1, nullptr, 10);
  refusal.counted += std::strtoull(std::strstr(text, "scratch, and ") + 13, nullptr, 10);
  const char* const setting = std::strstr(text, "memory = ");
  EXPECT_NE(setting, nullptr) << text;
  if (setting != nullptr) refusal.named = std::strtoull(setting + 9, &unit, 10) * (unit && *unit == 'm' ? 1 << 20 : 1);
  return refusal;
}

}  // namespace ringattn::testing
