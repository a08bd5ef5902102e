// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "c/ringattn.h"
#include "ops/common/environment_facts.hpp"

extern "C" const char* ringattn_environment(void) {
  try {
    static const auto* const text = new std::string(ringattn::environment_facts());  // never destroyed, as promised
    return text->c_str();
  } catch (...) {
    return nullptr;
  }
}
