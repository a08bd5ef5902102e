// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_version.hpp"

#include <fmt/format.h>

#ifdef RINGATTN_HAVE_NCCL
#include <nccl.h>
#endif

namespace ringattn {

#ifdef RINGATTN_HAVE_NCCL

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "unknown (ncclGetVersion failed)";
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

#else

std::string nccl_version() { return "none (this build has no NCCL)"; }

#endif

}  // namespace ringattn
