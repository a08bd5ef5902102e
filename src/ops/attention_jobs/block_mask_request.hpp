// SPDX-License-Identifier: Apache-2.0
// A block mask as a user requests it: a pattern in words (block_mask_pattern.hpp), or a file whose name ends in
// ".safetensors" (block_mask_tensors.hpp).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "attention/tokens/job.hpp"
#include "io/safetensors_file.hpp"
#include "ops/attention_jobs/block_mask_pattern.hpp"
#include "ops/common/job_share.hpp"

namespace ringattn {

struct BlockMaskRequest {
  std::string text;  // the pattern, or the file's path
  // The input besides the job: a file, or a seed as text. Equal requests, jobs and inputs have equal block masks.
  std::shared_ptr<const void> file = nullptr;
  std::string seed = {};
  std::size_t memory_budget = 0;  // bytes that the mask may take; 0, or more than that: 512 MiB
};

struct RequestedBlockMask {
  std::shared_ptr<const BlockMask> block_mask;
  std::shared_ptr<const SafetensorsFile> file;  // the file that the mask was read from; null: a pattern
  std::vector<TensorSource> used;               // the tensors that were read from it
};

// Builds the block mask of a job that has none yet. All ranks with the same input get the same mask, wherever its
// blocks are selected (by `best`, which reads all of q and k). It is built before anything else of a job, because the
// plan depends on it. Ranks with the same share hold it once. Throws kUsage for an invalid pattern, kFile for a file
// without a mask for the job, and kMemory for a mask that exceeds the budget. The mask's size is computed before data
// are read and before it is built.
RequestedBlockMask requested_block_mask(const BlockMaskRequest& request, const Job& job, const TopKBlocks& best,
                                        JobShare& share);

}  // namespace ringattn
