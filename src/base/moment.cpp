// SPDX-License-Identifier: Apache-2.0
#include "base/moment.hpp"

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
  if (wanted == "stop" + here) std::raise(SIGSTOP);
  if (wanted == "kill" + here) std::raise(SIGKILL);
  while (wanted == "block" + here) ::pause();
}
#endif

}  // namespace ringattn
