// SPDX-License-Identifier: Apache-2.0
#include "base/device_timeouts.hpp"

#include <fmt/format.h>

namespace ringattn {

void DeviceTimeouts::check(const Deadline& deadline, const std::string& why) {
  if (!deadline.expired()) return;
  fail(ErrorCode::kPeer, fmt::format("the device's work did not end within {:g} s", deadline.seconds()), why,
       "See whether the GPU still answers (nvidia-smi).");
}

}  // namespace ringattn
