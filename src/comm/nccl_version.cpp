// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_version.hpp"

#ifdef RINGATTN_HAVE_NCCL
#include <fmt/format.h>

#include "comm/nccl.hpp"
#include "comm/nccl_calls.hpp"
#endif

namespace ringattn {

#ifdef RINGATTN_HAVE_NCCL

std::string nccl_version() {
  if (const std::string why_not = why_no_nccl(); !why_not.empty()) return fmt::format("none ({})", why_not);
  const int version = nccl().version;
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

#else

std::string nccl_version() { return "none (this build has no NCCL)"; }

#endif

}  // namespace ringattn
