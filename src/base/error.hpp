// SPDX-License-Identifier: Apache-2.0
// The library's only error type, and the form of its messages: "problem (why). suggestion."
// Library code throws Error and never prints or exits. launch/ turns an Error into one message, spelled with the
// program's flags, and one exit code.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "base/message_template.hpp"

namespace ringattn {

// Values are the program's exit codes.
enum class ErrorCode : int {
  kWrongResult = 1,  // wrong result, difference or gate
  kUsage = 2,        // flags, environment, config, unknown names, contradictions, also between ranks
  kFile = 3,         // a file is missing, malformed, unwritable or exists
  kUnsupported = 4,  // not possible here: forced kernel, missing device or library, mismatched programs
  kMemory = 5,       // budget or device too small
  kPeer = 6,         // a peer failed or a deadline passed
  kInternal = 7,     // a bug
};

// Short stable name of a code, as reports spell it: "usage", "file", ...
std::string_view error_name(ErrorCode code);

// The rank on which an error happened.
struct ErrorLocation {
  int rank = 0;
  std::string host;

  bool operator==(const ErrorLocation&) const = default;
};

// what() is the message for a caller of the library. message().text(vocabulary) spells settings in another vocabulary.
class Error : public std::runtime_error {
 public:
  // A message that is known only as a whole is passed as the problem, without the other parts.
  explicit Error(ErrorCode code, MessageTemplate problem, MessageTemplate why = {}, MessageTemplate suggestion = {});

  ErrorCode code() const { return code_; }
  const MessageTemplate& problem() const { return parts_->problem; }
  const MessageTemplate& why() const { return parts_->why; }
  const MessageTemplate& suggestion() const { return parts_->suggestion; }
  MessageTemplate message() const;
  // nullptr while the error has not left its rank.
  const ErrorLocation* location() const { return location_.get(); }
  void set_location(ErrorLocation location) { location_ = std::make_shared<const ErrorLocation>(std::move(location)); }

 private:
  struct Parts {
    MessageTemplate problem, why, suggestion;
  };

  ErrorCode code_;
  // Shared, because copying an exception must not throw.
  std::shared_ptr<const Parts> parts_;
  std::shared_ptr<const ErrorLocation> location_;
};

// Throws Error with the text "problem (why). suggestion." Only the report of a bug may lack a part.
[[noreturn]] void fail(ErrorCode code, const MessageTemplate& problem, const MessageTemplate& why = {},
                       const MessageTemplate& suggestion = {});

// Serializes an error for other ranks: parts, settings and location included. The first byte is the code, which is
// never 0.
std::string pack_error(const Error& error);
// The inverse of pack_error(). From truncated bytes it restores the parts that are there.
Error unpack_error(std::string_view bytes);

// The candidate nearest to `name` by edit distance, or an empty string if none is near enough to be meant. Used for
// "Did you mean …?".
std::string nearest_name(std::string_view name, const std::string_view* candidates, std::size_t count);

}  // namespace ringattn
