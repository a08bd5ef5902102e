// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "attention/files/known_names.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"

extern "C" const char* ringattn_tensor_names(void) {
  const char* text = nullptr;
  ringattn::c::guarded([&] {
    // Never destroyed: the text is valid as long as the library is loaded.
    static const auto* const json = new std::string(ringattn::known_names_json());
    text = json->c_str();
  });
  return text;
}
