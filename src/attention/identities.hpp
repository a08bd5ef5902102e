// SPDX-License-Identifier: Apache-2.0
// What all ranks of a job of attention must have in common (attention/ring/handshake.hpp).
#pragma once

#include <vector>

#include "attention/options.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/tokens/job.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// Build, kernel, device, job, machine model and options of this rank.
std::vector<Identity> identities(const Job& job, const Options& options, const FoldChoice& choice,
                                 const Backend& backend);

}  // namespace ringattn
