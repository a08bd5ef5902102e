// SPDX-License-Identifier: Apache-2.0
// Lists of key tiles as a user asks for them: a pattern in words (block_mask_pattern.hpp), or a file whose name ends in
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
  std::size_t memory_budget = 0;  // bytes that they may take; 0, or more than that: 512 MiB
};

struct RequestedBlockMask {
  std::shared_ptr<const BlockMask> block_mask;
  std::shared_ptr<const SafetensorsFile> file;  // that they were read from; null: a pattern
  std::vector<TensorSource> used;               // tensors of it
};

// Builds the block mask of a job that has none yet. All ranks with the same input get the same mask, wherever its
// blocks are selected (`best`, which sees all of q and k). It is made before anything else of a job, because plans
// depend on it for what is sent to whom. Ranks with the same share have it once. Throws
// kUsage for words that make no pattern, kFile for a file that holds no mask for the job, and kMemory for a mask that
// exceeds the budget. Its size is computed before data are read and before it is made.
RequestedBlockMask requested_block_mask(const BlockMaskRequest& request, const Job& job, const TopKBlocks& best,
                                        JobShare& share);

}  // namespace ringattn
