// SPDX-License-Identifier: Apache-2.0
// The reports of jobs around the ring, for any op: shape, plan, figures of a run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/ring/engine.hpp"
#include "attention/ring/plan.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/layout.hpp"
#include "comm/collective.hpp"
#include "ops/jobs/op_job.hpp"

namespace ringattn {

// The job of queries, keys and values.

// The shape settings that the job's tensors determine. `op`: name in op_table().
InputShape attention_shape(std::string_view op, const Job& job);
// Members of the object "job" of a report.
void write_attention_spec(JsonWriter& json, const AttentionSpec& spec);
void write_attention_tokens(JsonWriter& json, const Batch& batch);
// heads, kv, dim, dtype and mask, for columns of one word each.
std::vector<Cell> spec_cells(const AttentionSpec& spec);
// heads, dims, dtype and mask of a benchmark's point. `mask_more`: text about the mask, after softcap and sinks.
std::vector<std::pair<std::string, BenchValue>> bench_members(const AttentionSpec& spec,
                                                              const std::string& mask_more = {});

// Its plan and runs.

// "striped, stripe 128 tokens"
std::string layout_text(const LayoutRequest& request);
// ", 1.5 MiB sent"; empty if ranks send nothing to each other.
std::string sent_text(const PlanFigures& plan);
// "layout: striped, stripe 128 tokens; 3 blocks, 1.5 MiB sent, 20 MiB planned for a rank"
std::string plan_text(const LayoutRequest& request, const PlanFigures& plan);
// Collective.
PlanFigures plan_figures(const Collective& collective, const Plan& plan, const JobLayout& layout,
                         const TimeEstimate& estimate);
// A line for each block.
std::vector<std::string> block_lines(const Plan& plan);
// The figures of a run on this rank, without its tokens and non-finite values.
// Samples of a loaded job's runs, in the requested modes. `run` does one run. Collective.
std::vector<Measurement> measure_runs(const Collective& collective, const MeasureRequest& request,
                                      const std::function<RunStats(RunMode)>& run);
RankFigures run_figures(const Plan& plan, const RunStats& stats);
std::vector<TraceEvent> block_events(const std::vector<BlockTimes>& blocks);
// A result's row: tokens, the job's shape, time, rate, exposed communication, memory and the digest of `tensor`.
std::vector<Cell> ring_cells(const Job& job, const OpJob::Totals& totals, std::string_view tensor);

}  // namespace ringattn
