// SPDX-License-Identifier: Apache-2.0
// What a ringattn_world is.
#pragma once

#include <memory>

#include "c/ringattn.h"
#include "comm/transport.hpp"

// Objects on a world share its transport, so that they may outlive it.
struct ringattn_world {
  std::shared_ptr<ringattn::Transport> transport;
};

namespace ringattn::c {

// The backend whose kernels work in the world's memory: "cpu", "cuda".
const char* backend_of(const Transport& transport);

}  // namespace ringattn::c
