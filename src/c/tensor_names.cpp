// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "c/ringattn.h"
#include "io/known_names.hpp"

// Not guarded(): a process that has only asked for names may still be forked.
extern "C" const char* ringattn_tensor_names(void) {
  try {
    // Never destroyed: the text is valid as long as the library is loaded.
    static const auto* const json = new std::string(ringattn::known_names_json());
    return json->c_str();
  } catch (...) {
    return nullptr;
  }
}
