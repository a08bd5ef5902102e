// SPDX-License-Identifier: Apache-2.0
// Expects an Error about a file (kFile) whose message has its three parts and holds a text.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/error.hpp"

namespace ringattn::testing {

template <typename F>
std::string file_error(const F& f) {
  try {
    f();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kFile) << message;
    EXPECT_NE(message.find("). "), std::string::npos) << message << ": it lacks a reason or a suggestion";
    return message;
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace ringattn::testing

#define EXPECT_FILE_ERROR(statement, text)                                          \
  do {                                                                              \
    const std::string message_ = ringattn::testing::file_error([&] { statement; }); \
    EXPECT_NE(message_.find(text), std::string::npos) << message_;                  \
  } while (false)
