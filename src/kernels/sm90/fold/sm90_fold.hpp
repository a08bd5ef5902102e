// SPDX-License-Identifier: Apache-2.0
// The kernel row `sm90_fold`: Hopper's tensor cores and copy engine.
#pragma once

#include <memory>
#include <string>

#include "kernels/fold.hpp"

namespace ringattn::sm90 {

// Why it can't run here: a device that is not of compute capability 9.0, as its instructions are of that one only.
std::string fold_unavailable();

// `backend` is a CudaBackend and outlives the kernel; config.hpp says which specs it can do.
std::unique_ptr<FoldKernel> make_fold(const FoldSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
