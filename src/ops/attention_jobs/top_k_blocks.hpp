// SPDX-License-Identifier: Apache-2.0
// Block masks of the top-k key blocks, selected from the rows of an input (kernels/attention/top_k_selection.hpp).
#pragma once

#include "comm/transport.hpp"
#include "kernels/attention/block_mask.hpp"
#include "kernels/common/registry.hpp"

namespace ringattn {

class JobInput;

// The backend that reads the rows and selects the blocks. All backends select the same blocks.
struct TopKDevice {
  // The job's kernel request: the backend of its attention kernel selects the blocks.
  KernelRequest request = {};
  int device = kNoDevice;  // of a device backend; kNoDevice: the host selects, whatever the request says
};

// Where the job's top-k block mask is computed: on the rank's own device if a device kernel runs the job.
TopKDevice top_k_device(const KernelRequest& request, const Transport& transport);

// The top `count` blocks by all of the input's q and k. `spec` is the input's, with the block mask's shape. Synthetic
// rows are generated in the backend's memory. Other rows are read by the host and copied while the backend works.
// Throws the errors of choose_kernel(), JobInput::read() and top_k_selection().
BlockMask top_k_blocks(const JobInput& input, const AttentionSpec& spec, int count, const TopKDevice& target);

}  // namespace ringattn
