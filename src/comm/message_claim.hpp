// SPDX-License-Identifier: Apache-2.0
// Decides which of a host's ranks prints a failure when they can't communicate.
#pragma once

#include <string>

namespace ringattn {

class MessageClaim {
 public:
  // Reads the environment. Construct it before MPI starts, because MPI changes the environment.
  MessageClaim();

  // Returns true for the first process of the job on this host that calls it. The first caller creates a file in the
  // directory that the launcher made for the job and removes after it. Without such a directory every caller is the
  // first.
  bool try_claim() const noexcept;

 private:
  std::string file_;  // empty: there is no such directory
};

}  // namespace ringattn
