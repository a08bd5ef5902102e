// SPDX-License-Identifier: Apache-2.0
// The one error type of the library, and the grammar of its messages: "problem (why). suggestion."
// Library code throws Error and never prints or exits; launch/main turns it into one message and one exit code.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace ringattn {

// Values are the program's exit codes.
enum class ErrorCode : int {
  kWrongResult = 1,  // wrong result, difference or gate
  kUsage = 2,        // flags, environment, config, unknown names, contradictions, also between ranks
  kFile = 3,         // a file is missing, malformed, unwritable or exists
  kUnsupported = 4,  // can't be done here: forced kernel, missing device or library, unlike programs
  kMemory = 5,       // budget or device too small
  kPeer = 6,         // a peer failed or a deadline passed
  kInternal = 7,     // a bug
};

// Short stable name of a code, as it stands in reports: "usage", "file", ...
std::string_view error_name(ErrorCode code);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string message) : std::runtime_error(std::move(message)), code_(code) {}

  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// Throws Error with the text "problem (why). suggestion."; only a bug may lack one.
[[noreturn]] void fail(ErrorCode code, std::string_view problem, std::string_view why = {},
                       std::string_view suggestion = {});

// The candidate nearest to `name` by edit distance, or empty if none is near enough to be meant.
// Serves "Did you mean …?" suggestions. `candidates` yields string_view-like values.
std::string nearest_name(std::string_view name, const std::string_view* candidates, std::size_t count);

}  // namespace ringattn
