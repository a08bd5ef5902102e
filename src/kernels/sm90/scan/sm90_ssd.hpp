// SPDX-License-Identifier: Apache-2.0
// The kernel row `sm90_ssd`: scans with one decay a head (Mamba-2) by wgmma and TMA, H100 and H200. bf16, head_dim 64
// and 128, state_dim 64 and 128, views of any alignment: where rows don't lie at multiples of 16 bytes, threads copy
// them, more slowly, and every bit is the same. What is rounded, and what is exact, is as in sm80_ssd
// (sm80/scan/ssd_tiles.cuh), but that
//   - a chunk's sum begins with the decayed state instead of zero;
//   - of weighed x it is the weight that is split_hi_lo, into two bf16 parts, and x times these into two again: within
//   2^−16
//     of its fp32 value. So are local states of segments, and with them final states;
//   - rows of y have factors that are rounded to bf16 once, as y is, where sm80_ssd has two parts: the state in front
//     of a chunk, intra_chunk_scores of tokens, and behind a chunk of the row's own segment the weight of x, and x
//     times that;
//   - D is added to the weight that a row's own token has, in fp32, before that is rounded.
// Bits are its own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.hpp"
#include "kernels/ssm.hpp"

namespace ringattn::sm90 {

// What `spec` requires that the kernel lacks; see KernelRow::missing.
std::vector<std::string> ssd_missing(const SsmSpec& spec);

// `backend` is a CudaBackend and outlives the kernel.
std::unique_ptr<SsmKernel> make_ssd(const SsmSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
