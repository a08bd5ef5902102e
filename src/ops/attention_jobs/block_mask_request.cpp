// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/block_mask_request.hpp"

#include <utility>

#include "base/rank_liveness.hpp"
#include "ops/attention_jobs/block_mask_tensors.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kSuffix = ".safetensors";

RequestedBlockMask make_requested(const BlockMaskRequest& request, const Job& job, const TopKBlocks& best) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 29;
  BlockMaskBudget budget{kMostBytes, "they lie in the host's memory, and may take no more"};
  if (request.memory_budget > 0 && request.memory_budget < static_cast<std::size_t>(kMostBytes)) {
    budget = {static_cast<std::int64_t>(request.memory_budget), "a rank's memory budget is no larger"};
  }
  if (!request.text.ends_with(kSuffix)) {
    return {std::make_shared<const BlockMask>(block_mask_from_pattern(request.text, job, best, budget)), nullptr, {}};
  }
  auto file = std::make_shared<const SafetensorsFile>(request.text);
  auto block_mask = std::make_shared<const BlockMask>(block_mask_from_file(*file, job, budget));
  std::vector<TensorSource> used = block_mask_tensors(*file);
  return {std::move(block_mask), std::move(file), std::move(used)};
}

}  // namespace

// A request and its result.
struct SharedBlockMask {
  BlockMaskRequest request;
  Job job;
  RequestedBlockMask made;

  bool answers(const BlockMaskRequest& other, const Job& of) const {
    return request.text == other.text && request.file == other.file && request.seed == other.seed &&
           request.memory_budget == other.memory_budget && job.spec == of.spec && job.format == of.format &&
           job.batch == of.batch && (made.file == nullptr || made.file->is_current());
  }
};

RequestedBlockMask requested_block_mask(const BlockMaskRequest& request, const Job& job, const TopKBlocks& best,
                                        JobShare& share) {
  const std::shared_ptr<const SharedBlockMask> shared = share.block_mask.get(
      [&](const SharedBlockMask& last) { return last.answers(request, job); },
      [&] { return std::make_shared<const SharedBlockMask>(request, job, make_requested(request, job, best)); });
  return {{shared, shared->made.block_mask.get()}, shared->made.file, shared->made.used};
}

}  // namespace ringattn
