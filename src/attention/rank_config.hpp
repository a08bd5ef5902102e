// SPDX-License-Identifier: Apache-2.0
// What all ranks of a job must have in common (attention/ring/handshake.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "attention/causal_conv1d.hpp"
#include "attention/decode.hpp"
#include "attention/mla.hpp"
#include "attention/options.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ssm.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

// Build, kernel, device, job, machine model and options of this rank.
std::vector<RankConfigEntry> rank_config(const Job& job, const Options& options, const AttentionChoice& choice,
                                         const Backend& backend);

// Build, kernel, device, job and options of this rank. A step is given its lists of key blocks, which are compared by
// whoever makes them (block_mask_config_entry()).
std::vector<RankConfigEntry> rank_config(const DecodeJob& job, const DecodeOptions& options, const DecodeChoice& choice,
                                         const Backend& backend);

// What all lists say; null: there are none.
RankConfigEntry block_mask_config_entry(const BlockMask* block_mask);

// Build, kernels (`products`: of products, or empty), device, job and its form, machine model and options of this rank.
std::vector<RankConfigEntry> rank_config(const MlaJob& job, const MlaOptions& options, const AttentionChoice& choice,
                                         std::string_view gemms, const Backend& backend);

std::vector<RankConfigEntry> rank_config(const SsmJob& job, const SsmOptions& options, const SsmJobChoice& choice,
                                         const Backend& backend);

std::vector<RankConfigEntry> rank_config(const CausalConv1dJob& job, const CausalConv1dOptions& options,
                                         const CausalConv1dChoice& choice, const Backend& backend);

// Build, device and the way of rows from one layout to another.
std::vector<RankConfigEntry> rank_config(const Layout& from, const Layout& to, std::int64_t token_bytes,
                                         const Backend& backend);

}  // namespace ringattn
