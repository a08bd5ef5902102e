// SPDX-License-Identifier: Apache-2.0
// What all ranks of a job must have in common (attention/ring/handshake.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "attention/convolution.hpp"
#include "attention/decode.hpp"
#include "attention/latent.hpp"
#include "attention/options.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/scan.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// Build, kernel, device, job, machine model and options of this rank.
std::vector<Identity> identities(const Job& job, const Options& options, const FoldChoice& choice,
                                 const Backend& backend);

// Build, kernel, device, job and options of this rank. A step is given its lists of key blocks, which are compared by
// whoever makes them (lists_identity()).
std::vector<Identity> identities(const DecodeJob& job, const DecodeOptions& options, const DecodeChoice& choice,
                                 const Backend& backend);

// What all lists say; null: there are none.
Identity lists_identity(const TileLists* lists);

// Build, kernels (`products`: of products, or empty), device, job and its form, machine model and options of this rank.
std::vector<Identity> identities(const LatentJob& job, const LatentOptions& options, const FoldChoice& choice,
                                 std::string_view products, const Backend& backend);

std::vector<Identity> identities(const ScanJob& job, const ScanOptions& options, const ScanJobChoice& choice,
                                 const Backend& backend);

std::vector<Identity> identities(const ConvolutionJob& job, const ConvolutionOptions& options,
                                 const ConvolutionChoice& choice, const Backend& backend);

// Build, device and the way of rows from one layout to another.
std::vector<Identity> identities(const Layout& from, const Layout& to, std::int64_t token_bytes,
                                 const Backend& backend);

}  // namespace ringattn
