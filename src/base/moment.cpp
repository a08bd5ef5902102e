// SPDX-License-Identifier: Apache-2.0
#include "base/moment.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "base/pulse.hpp"

namespace ringattn {

#if defined(RINGATTN_MOMENTS)
void moment(const char* place) {
  const char* const wanted = std::getenv("TEST_RINGATTN_MOMENT");
  const Pulse* const pulse = Pulse::current();
  if (wanted == nullptr || pulse == nullptr) return;
  const std::string here = ":" + std::to_string(pulse->rank()) + ":" + place;
  const char* const mark = std::getenv("TEST_RINGATTN_MOMENT_FILE");
  if (mark != nullptr && std::string(wanted).ends_with(here)) {
    if (const int file = ::open(mark, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600); file >= 0) ::close(file);
  }
  if (wanted == "stop" + here) std::raise(SIGSTOP);
  if (wanted == "kill" + here) std::raise(SIGKILL);
  while (wanted == "block" + here) ::pause();
}
#endif

}  // namespace ringattn
