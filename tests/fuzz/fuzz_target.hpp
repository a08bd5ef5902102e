// SPDX-License-Identifier: Apache-2.0
// What a fuzz target defines. The same file is linked with libFuzzer, where clang has it, and with our own driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

// Feeds one input to the code under test; returns 0, and ends the process when a promise is broken.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace ringattn::testing {

// Inputs to start from, good and bad, and words that the format uses.
std::vector<std::string> fuzz_seeds();
std::vector<std::string> fuzz_words();

// A promise that inputs may not break, in release builds too.
inline void fuzz_check(bool kept, const char* promise, std::string_view detail = {}) {
  if (kept) return;
  std::fprintf(stderr, "broken promise: %s: %s\n", promise, std::string(detail).c_str());
  std::abort();
}

}  // namespace ringattn::testing
