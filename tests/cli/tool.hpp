// SPDX-License-Identifier: Apache-2.0
// The program under test, as a user starts it. RINGATTN_TOOL is its path.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/subprocess.hpp"

namespace ringattn::testing {

using Words = std::vector<std::string>;
using Variables = std::vector<std::pair<std::string, std::string>>;

inline Words operator+(Words left, const Words& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

inline Finished tool(const Words& words, const Variables& variables = {}) {
  return run_program(Words{RINGATTN_TOOL} + words, variables);
}

// Under mpirun with N ranks; only where the build found MPI.
Finished mpi_tool(int ranks, const Words& words, const Variables& variables = {});

// Flags of a job that takes milliseconds: 300 tokens, a length that divides nothing.
inline Words small_job() {
  return {"--synthetic", "7", "--seq", "300", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--dtype", "fp32"};
}

// Lines of the program's messages on stderr.
inline int count_messages(const std::string& err) {
  int count = 0;
  for (std::size_t at = err.find("ringattn: error:"); at != std::string::npos;
       at = err.find("ringattn: error:", at + 1)) {
    ++count;
  }
  return count;
}

inline bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// The last column of a result table: the digest of out.
inline std::string digest_of(const std::string& out) {
  std::string last;
  for (std::size_t begin = 0; begin < out.size();) {
    const std::size_t end = out.find('\n', begin);
    const std::string line = out.substr(begin, end - begin);
    if (!line.empty() && line[0] != '#') last = line.substr(line.rfind(' ') + 1);
    begin = end == std::string::npos ? out.size() : end + 1;
  }
  return last;
}

}  // namespace ringattn::testing
