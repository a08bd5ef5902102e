// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "c/ringattn.h"
#include "c/status.hpp"
#include "kernels/common/simd_target.hpp"
#include "ops/common/environment_facts.hpp"

extern "C" const char* ringattn_environment(void) {
  try {
    static const auto* const text = new std::string(ringattn::environment_facts());  // never destroyed, as promised
    return text->c_str();
  } catch (...) {
    return nullptr;
  }
}

extern "C" ringattn_status ringattn_set_simd_target(const char* name) {
  return ringattn::c::guarded([&] {
    ringattn::c::need(name, "name");
    ringattn::set_simd_target(name);
  });
}

extern "C" const char* ringattn_simd_target(void) {
  thread_local std::string text;
  const ringattn_status status = ringattn::c::guarded([&] { text = ringattn::simd_target(); });
  return status == RINGATTN_OK ? text.c_str() : nullptr;
}
