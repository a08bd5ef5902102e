// SPDX-License-Identifier: Apache-2.0
// A prefill's last rows decoded one by one, from a cache that grows as a model's does: they must have the prefill's
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
  std::int64_t rows = 0;                 // that were decoded, of all sequences together
  std::optional<Difference> difference;  // the first, prefill's value left
};

// Checks that the job's rows can be decoded: no row may see a key after its own, each stands at a key, and latents are
// attended to in the absorbed form. Throws kUsage.
void check_replayable(const JobInput& input);

// Checks that decode steps have the bits of a prefill by this kernel: the request must choose the kernel of the same
// name for them. Throws kUnsupported, and what choosing throws.
void check_replay_kernel(const KernelEntry& prefill, const DecodeSpec& spec, const KernelRequest& request,
                         KernelScope scope = KernelScope::kThisMachine);

// Computes `input` by Attention, or latents by Mla, over `world`. Then, for each of the page sizes, decodes the last
// `rows` rows of every sequence (all of a shorter one), a row a step, from a cache that holds the keys before them and
// takes up each row's own by an append, and compares out and lse. `prefilled` is called when the prefill is done,
// `done` with each result. Collective. Throws what the two ops throw, and what the checks above do.
void replay_rows(const JobInput& input, const Options& options, std::int64_t rows,
                 std::span<const std::int64_t> page_sizes, Transport& world, const ProgressCallback& on_progress,
                 const std::function<void(PreparedJob&, const RankResult&)>& prefilled,
                 const std::function<void(const ReplayResult&)>& done);

}  // namespace ringattn
