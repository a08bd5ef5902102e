// SPDX-License-Identifier: Apache-2.0
// Decodes the last rows of a prefill one by one, from a cache that grows as in a model. They must have the prefill's
// bits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "comm/transport.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/decode.hpp"
#include "ops/attention/attention.hpp"
#include "ops/attention_jobs/job_input.hpp"
#include "ops/attention_jobs/prepared_job.hpp"
#include "ops/common/difference.hpp"

namespace ringattn {

struct ReplayResult {
  std::int64_t page_size = 0;            // tokens; 0: a cache without pages
  std::int64_t rows = 0;                 // decoded rows of all sequences together
  std::optional<Difference> difference;  // the first difference; left: the prefill's value
};

// Checks that the job's rows can be decoded: no row sees a key after its own, each has a key at its position, and MLA
// is in the absorbed form. Throws kUsage.
void check_replayable(const JobInput& input);

// Checks that decode steps have the bits of a prefill by this kernel: the request must choose the kernel of the same
// name for them. Throws kUnsupported, and the errors of the kernel choice.
void check_replay_kernel(const KernelEntry& prefill, const DecodeSpec& spec, const KernelRequest& request,
                         KernelScope scope = KernelScope::kThisMachine);

// Computes `input` by Attention, or by Mla, over `world`. Then, for each of the page sizes, decodes the last `rows`
// rows of every sequence (all rows of a shorter one), one row per step, from a cache that holds the keys before them
// and to which each step appends the row's own. Compares out and lse. Calls `prefilled` after the prefill, and `done`
// with each result. Collective. Throws the errors of the two ops and of the checks above.
void replay_rows(const JobInput& input, const Options& options, std::int64_t rows,
                 std::span<const std::int64_t> page_sizes, Transport& world, const ProgressCallback& on_progress,
                 const std::function<void(PreparedJob&, const RankResult&)>& prefilled,
                 const std::function<void(const ReplayResult&)>& done);

}  // namespace ringattn
