// SPDX-License-Identifier: Apache-2.0
#include "comm/message_claim.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

namespace ringattn {

MessageClaim::MessageClaim() {
  // Variables of PMIx, through which mpirun and srun start ranks.
  const char* const folder = std::getenv("PMIX_SERVER_TMPDIR");
  const char* const job = std::getenv("PMIX_NAMESPACE");
  if (folder != nullptr && job != nullptr) file_ = fmt::format("{}/ringattn-message.{}", folder, job);
}

bool MessageClaim::try_claim() const noexcept {
  if (file_.empty()) return true;
  const int file = ::open(file_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return errno != EEXIST;
  ::close(file);
  return true;
}

}  // namespace ringattn
