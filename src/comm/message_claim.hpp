// SPDX-License-Identifier: Apache-2.0
// Who of a host's ranks prints a failure where they can't ask each other.
#pragma once

#include <string>

namespace ringattn {

class MessageClaim {
 public:
  // Reads the environment, which MPI writes to while it starts: before that.
  MessageClaim();

  // Whether the calling process is the first of its job's on this host to ask. A file tells, in the folder that the
  // launcher has made for the job there and takes away after it; where it has made none, each process is the first.
  bool try_claim() const noexcept;

 private:
  std::string file_;  // empty: there is no such folder
};

}  // namespace ringattn
