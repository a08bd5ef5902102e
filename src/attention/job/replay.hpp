// SPDX-License-Identifier: Apache-2.0
// A prefill's last rows decoded one by one, from a cache that grows as a model's does: they must have the prefill's
// bits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "attention/attention.hpp"
#include "attention/check/difference.hpp"
#include "attention/files/job_input.hpp"
#include "attention/job/file_job.hpp"
#include "comm/transport.hpp"

namespace ringattn {

struct ReplayResult {
  std::int64_t page_size = 0;            // tokens; 0: a cache without pages
  std::int64_t rows = 0;                 // that were decoded, of all sequences together
  std::optional<Difference> difference;  // the first, prefill's value left
};

// Whether the job's rows can be decoded: no row may see a key behind its own, and each stands at a key. Throws kUsage.
void check_replayable(const Job& job);

// Computes `input` by Attention over `world`. Then, for each of the page sizes, decodes the last `rows` rows of every
// sequence (all of a shorter one), a row a step, from a cache that holds the keys before them and takes up each row's
// own by an append, and compares out and lse. `prefilled` is called when the prefill is done, `done` with each result.
// Collective. Throws what the two ops throw, and kUsage.
void replay_rows(const JobInput& input, const Options& options, std::int64_t rows,
                 std::span<const std::int64_t> page_sizes, Transport& world, const StepDone& step_done,
                 const std::function<void(PreparedFileJob&, const RankResult&)>& prefilled,
                 const std::function<void(const ReplayResult&)>& done);

}  // namespace ringattn
