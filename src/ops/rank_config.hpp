// SPDX-License-Identifier: Apache-2.0
// The configuration of each op that all ranks must have in common (attention/ring/handshake.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "attention/options.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "kernels/common/registry.hpp"
#include "ops/attention_backward/attention_backward.hpp"
#include "ops/conv1d/causal_conv1d.hpp"
#include "ops/decode/decode.hpp"
#include "ops/mla/mla.hpp"
#include "ops/ssd_backward/ssd_backward.hpp"
#include "ops/ssm/ssm.hpp"

namespace ringattn {

struct GatedDeltaJob;   // attention/tokens/gated_delta_job.hpp
struct GatedDeltaSpec;  // kernels/gated_delta/gated_delta.hpp
struct LinearJob;       // ops/linear/linear.hpp
struct LinearSpec;      // kernels/linear/linear.hpp

// Build, kernel, device, job, machine model and options of this rank.
std::vector<RankConfigEntry> rank_config(const Job& job, const Options& options, const AttentionChoice& choice,
                                         const Backend& backend);

std::vector<RankConfigEntry> rank_config(const BackwardJob& job, const Options& options,
                                         const KernelChoice<AttentionBackwardSpec>& choice, const Backend& backend);

// Build, kernel, device, job and options of this rank. Block masks are inputs of a step, and are compared where they
// are made (block_mask_config_entry()).
std::vector<RankConfigEntry> rank_config(const DecodeJob& job, const DecodeOptions& options, const DecodeChoice& choice,
                                         const Backend& backend);

// Digest of a block mask; null: there is none.
RankConfigEntry block_mask_config_entry(const BlockMask* block_mask);

// Build, kernels (`gemms`: of the GEMMs, or empty), device, job and its form, machine model and options of this rank.
std::vector<RankConfigEntry> rank_config(const MlaJob& job, const MlaOptions& options, const AttentionChoice& choice,
                                         std::string_view gemms, const Backend& backend);

std::vector<RankConfigEntry> rank_config(const SsmJob& job, const SsmOptions& options, const SsmJobChoice& choice,
                                         const Backend& backend);

std::vector<RankConfigEntry> rank_config(const SsdBackwardJob& job, const SsmOptions& options,
                                         const KernelChoice<SsdBackwardSpec>& choice, const Backend& backend);
std::vector<RankConfigEntry> rank_config(const CausalConv1dJob& job, const CausalConv1dOptions& options,
                                         const CausalConv1dChoice& choice, const Backend& backend);

std::vector<RankConfigEntry> rank_config(const GatedDeltaJob& job, const SsmOptions& options,
                                         const KernelChoice<GatedDeltaSpec>& choice, const Backend& backend);

std::vector<RankConfigEntry> rank_config(const LinearJob& job, const KernelChoice<LinearSpec>& choice,
                                         const Backend& backend);

// Build, device, and the two layouts of a Reshard.
std::vector<RankConfigEntry> rank_config(const Layout& from, const Layout& to, std::int64_t token_bytes,
                                         const Backend& backend);

}  // namespace ringattn
