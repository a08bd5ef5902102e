// SPDX-License-Identifier: Apache-2.0
// What the words of the measuring programs have in common: lists, numbers, and how a word is refused.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/size.hpp"

namespace ringattn {

// A program's words, by its name and its usage.
struct BenchArguments {
  const char* program;
  const char* usage;

  [[noreturn]] void refuse(std::string_view word, const char* why) const {
    fail(ErrorCode::kUsage, fmt::format("{} does not understand \"{}\"", program, word), why,
         fmt::format("It takes {}.", usage));
  }

  std::int64_t number(std::string_view text, std::int64_t least, std::int64_t most) const {
    const std::optional<std::int64_t> value = parse_size(text);
    if (!value || *value < least || *value > most) refuse(text, "a number is missing, or out of range");
    return *value;
  }
};

// main() of a program that takes words: what it returns, or the code of an error that it has said.
template <typename Run>
int run_main(Run run, int count, char** words) {
  try {
    return run(std::vector<std::string_view>(words + 1, words + count));
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return static_cast<int>(error.code());
  }
}

// The entries of a list, which commas separate.
inline std::vector<std::string_view> list_entries(std::string_view list) {
  std::vector<std::string_view> found;
  for (;;) {
    const std::size_t comma = list.find(',');
    found.push_back(list.substr(0, comma));
    if (comma == std::string_view::npos) return found;
    list.remove_prefix(comma + 1);
  }
}

}  // namespace ringattn
