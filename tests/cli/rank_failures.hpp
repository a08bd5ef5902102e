// SPDX-License-Identifier: Apache-2.0
// Failures on ranks of the program, however they were started: one message, and one exit code.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>

#include "tests/cli/tool.hpp"
#include "tests/support/temporary_folder.hpp"

namespace ringattn::testing {

// What fails on all ranks alike. `start`: runs the program with these words as several ranks.
inline void expect_one_message_and_one_code(const std::function<Finished(const Words&)>& start) {
  const TemporaryFolder folder;
  const std::string bad = folder.write("bad.safetensors", "nonsense");
  struct Case {
    Words words;
    int code;
  };
  const Case cases[] = {{{"run", "--softcp", "1"}, 2},
                        {{"run"}, 2},
                        {{"run", "--ranks", "2", "--synthetic", "7"}, 2},
                        {{"run", "--transport", "threads", "--synthetic", "7"}, 2},
                        {{"frobnicate"}, 2},
                        {{"plan", "--mask", "none"}, 2},
                        {{"run", "--input", bad, "--output", folder.file("out")}, 3},
                        {{"verify", "--against", folder.file("none"), "--synthetic", "7", "--seq", "64"}, 3},
                        {{"run", "--synthetic", "7", "--head-dim", "12", "--backend", "cpu"}, 4},
                        {{"run", "--synthetic", "7", "--memory", "4k", "--backend", "cpu"}, 5}};
  for (const Case& failing : cases) {
    const Finished run = start(failing.words);
    EXPECT_EQ(run.code, failing.code) << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
  }
  EXPECT_EQ(folder.entries().size(), 1U);
}

// Code that runs only on the first process, and so fails only there: at once, as no other process joins a collective.
// `start`: as above, and returns the first process's code.
inline void expect_the_first_process_speaks(const std::function<Finished(const Words&)>& start) {
  constexpr std::chrono::seconds kAtOnce{9};  // below the time after which a rank gives up to be heard by the others
  const TemporaryFolder folder;
  const std::string there = folder.write("there.json", "{}");
  const Words cases[] = {
      {"compress", "--method", "int4", "--input", folder.file("none"), "--output", folder.file("out")},
      {"plan", "--seq", "1k", "--json", there},
      {"info", "--json", there}};
  for (const Words& words : cases) {
    const auto begun = std::chrono::steady_clock::now();
    const Finished run = start(words);
    EXPECT_LT(std::chrono::steady_clock::now() - begun, kAtOnce) << words.front();
    EXPECT_EQ(run.code, 3) << run.err;
    EXPECT_EQ(count_messages(run.err), 1) << run.err;
  }
  EXPECT_EQ(folder.entries().size(), 1U);
}

}  // namespace ringattn::testing
