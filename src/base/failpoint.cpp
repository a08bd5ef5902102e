// SPDX-License-Identifier: Apache-2.0
#include "base/failpoint.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "base/rank_liveness.hpp"

namespace ringattn {

#if defined(RINGATTN_FAILPOINTS)
void failpoint(const char* name) {
  const char* const wanted = std::getenv("TEST_RINGATTN_FAILPOINT");
  const RankLiveness* const liveness = RankLiveness::current();
  if (wanted == nullptr || liveness == nullptr) return;
  const std::string text(wanted);
  const std::size_t ranks = text.find(':') + 1;
  const std::size_t end = text.rfind(':');
  const std::string rank = "," + std::to_string(liveness->rank()) + ",";
  if (text.substr(end + 1) != name) return;
  if (("," + text.substr(ranks, end - ranks) + ",").find(rank) == std::string::npos) return;
  if (const char* const mark = std::getenv("TEST_RINGATTN_FAILPOINT_FILE")) {
    if (const int file = ::open(mark, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600); file >= 0) ::close(file);
  }
  const std::string action = text.substr(0, ranks - 1);
  if (action == "stop") std::raise(SIGSTOP);
  if (action == "kill") std::raise(SIGKILL);
  while (action == "block") ::pause();
}
#endif

}  // namespace ringattn
