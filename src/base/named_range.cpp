// SPDX-License-Identifier: Apache-2.0
#include "base/named_range.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <string>

#ifdef RINGATTN_HAVE_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace ringattn {

namespace {

// NVTX copies the name.
void push_range([[maybe_unused]] const std::string& name) {
#ifdef RINGATTN_HAVE_CUDA
  nvtxRangePushA(name.c_str());
#endif
}

}  // namespace

void NamedRange::begin(const char* op, const char* call) { push_range(fmt::format("ringattn.{}.{}", op, call)); }

void NamedRange::begin(const char* step, std::int64_t block) {
  push_range(fmt::format("ringattn.ring.{} {}", step, block));
}

void NamedRange::end() {
#ifdef RINGATTN_HAVE_CUDA
  nvtxRangePop();
#endif
}

}  // namespace ringattn
