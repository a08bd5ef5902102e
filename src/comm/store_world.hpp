// SPDX-License-Identifier: Apache-2.0
// The store's part of comm/world.cpp: runs ranks that connect at RINGATTN_STORE.
#pragma once

#include <functional>

#include "comm/world.hpp"

namespace ringattn {

// As run_process_world(). Throws kUsage if the environment doesn't say which rank this is.
int run_store_world(const WorldRequest& request, const Error* refusal, const std::function<int(Transport&)>& rank_main,
                    const std::function<void(const Error&)>& print_error);

}  // namespace ringattn
