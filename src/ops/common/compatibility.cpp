// SPDX-License-Identifier: Apache-2.0
#include "ops/common/compatibility.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace ringattn {

KernelRequest compatible_request(const KernelRequest& request, const Transport& transport) {
  KernelRequest fitting = request;
  if (transport.size() > 1 && request.backend == "auto" && request.kernel == "auto") {
    fitting.backend = transport.memory() == MemoryKind::kDevice ? "cuda" : "cpu";
  }
  return fitting;
}

void check_compatible(const KernelEntry& kernel, const Backend& backend, const Transport& transport) {
  if (transport.size() == 1 || backend.memory() == transport.memory()) return;
  fail(ErrorCode::kUnsupported, fmt::format("kernel {} and transport {} don't fit", kernel.name, transport.name()),
       "one works in host memory, the other in device memory",
       {"Choose both with ", setting("backend"), " and ", setting("transport"), "."});
}

void check_checksum(const Backend& backend) {
  if (backend.memory() != MemoryKind::kDevice) return;
  fail(ErrorCode::kUnsupported, "checksums of device memory are not computed",
       {setting("checksum"), " works on the host"}, {"Leave it out, or use ", setting("backend", "cpu"), "."});
}

}  // namespace ringattn
