// SPDX-License-Identifier: Apache-2.0
// Lists of key blocks that follow from the rows of an input (kernels/attention/top_k_selection.hpp).
#pragma once

#include "comm/transport.hpp"
#include "kernels/attention/block_mask.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

class JobInput;

// Whose memory rows are read into, and who chooses. The blocks are the same.
struct TopKDevice {
  // The job's kernel request: the backend of its attention kernel selects the blocks.
  KernelRequest request = {};
  int device = kNoDevice;  // of a device backend; kNoDevice: the host chooses, whatever the request says
};

// Where the job's top-k block masks are computed: on the rank's own device if a device kernel runs the job.
TopKDevice top_k_device(const KernelRequest& request, const Transport& transport);

// The top `count` blocks by all of the input's q and k; `spec` is the input's, with the block mask's shape. Rows that
// a seed makes are made in the backend's memory, others are read by the host and copied, while the backend works.
// Throws what choose_kernel(), JobInput::read() and top_k_selection() throw.
BlockMask top_k_blocks(const JobInput& input, const AttentionSpec& spec, int count, const TopKDevice& target);

}  // namespace ringattn
