// SPDX-License-Identifier: Apache-2.0
// The SSD kernel `sm90_ssd` (Mamba-2: one decay per head), with wgmma and TMA, for H100 and H200. bf16, head_dim 64 and
// 128, state_dim 64 and 128. Views may have any alignment: rows that are not aligned to 16 bytes are copied by threads,
// which is slower and gives the same bits. Rounding is that of sm80_ssd (ssm/sm80/ssd.cuh), except that
//   - the state accumulates into the decayed state instead of from zero;
//   - for local states, the scale of x is split into a bf16 hi/lo pair, and x times it into a pair again, within 2^−16
//     of the fp32 value. The same holds for final states;
//   - for y, some factors are rounded to bf16 once, where sm80_ssd has a hi/lo pair: the state before a chunk, the
//     intra-chunk scores, and for the segment's running state the scale of x, and x times it;
//   - D is added to the intra-chunk score of a row's own token in fp32, before that is rounded.
// So its bits differ from those of other kernels.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/common/backend.hpp"
#include "kernels/ssm/ssm.hpp"

namespace ringattn::sm90 {

// Requirements of `spec` that the kernel does not support. See KernelRow::missing.
std::vector<std::string> ssd_missing(const SsmSpec& spec);

// `backend` must be a CudaBackend and must outlive the kernel.
std::unique_ptr<SsmKernel> make_ssd(const SsmSpec& spec, Backend& backend);

}  // namespace ringattn::sm90
