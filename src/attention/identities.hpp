// SPDX-License-Identifier: Apache-2.0
// What all ranks of a job must have in common (attention/ring/handshake.hpp).
#pragma once

#include <vector>

#include "attention/decode.hpp"
#include "attention/latent.hpp"
#include "attention/options.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/tokens/job.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// Build, kernel, device, job, machine model and options of this rank.
std::vector<Identity> identities(const Job& job, const Options& options, const FoldChoice& choice,
                                 const Backend& backend);

// Build, kernel, device, job and options of this rank.
std::vector<Identity> identities(const DecodeJob& job, const DecodeOptions& options, const DecodeChoice& choice,
                                 const Backend& backend);

// Build, kernels, device, job and its form, machine model and options of this rank.
std::vector<Identity> identities(const LatentJob& job, const LatentOptions& options, const FoldChoice& choice,
                                 const KernelEntry& products, const Backend& backend);

}  // namespace ringattn
