// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/backward_work.hpp"

#include <algorithm>

#include "attention/tokens/cost.hpp"
#include "base/aligned.hpp"
#include "ops/attention_backward/sink_gradient.hpp"

namespace ringattn {

namespace {

ScoreSharing sharing_of(bool same_pairs, const Options& options) {
  const bool any_memory = options.memory_budget == 0 && options.block_tokens == 0;
  return same_pairs && any_memory ? ScoreSharing::kIfFaster : ScoreSharing::kNever;
}

}  // namespace

BackwardPairFlops backward_pair_flops(const AttentionSpec& spec) {
  const double element = 2.0 * spec.heads;  // a multiplication and an addition
  return {element * (2 * spec.head_dim + spec.head_dim_v), element * (2 * spec.head_dim + 2 * spec.head_dim_v)};
}

double backward_flops(const BackwardJob& job) { return 2.5 * job_flops(job.forward); }

RowStreams backward_streams(const AttentionSpec& spec) {
  constexpr bool kQueries = true;
  return {{"k", k_token_bytes(spec)},
          {"v", v_token_bytes(spec)},
          {"q", q_token_bytes(spec), kQueries},
          {"dout", out_token_bytes(spec), kQueries},
          {"row stats", kRowStats * lse_token_bytes(spec), kQueries}};
}

AttentionBackwardSpec backward_spec(const BackwardJob& job) { return {job.forward.spec, job.gradients}; }

MachineModel backward_machine(const MachineModel& given, const KernelRow<AttentionBackwardSpec>& kernel,
                              const BackwardJob& job, const Backend& backend, std::int64_t tokens) {
  const AttentionBackwardSpec spec = backward_spec(job);
  return job_machine(given, kernel, machine_speed(given, kernel, spec, spec.forward.dtype, backend, tokens));
}

std::vector<BackwardSequence> backward_sequences(const Batch& batch) {
  std::vector<BackwardSequence> sequences;
  sequences.reserve(batch.sequences.size());
  for (const Sequence& s : batch.sequences) sequences.push_back({s.q_len, s.k_len, s.q_offset});
  return sequences;
}

RingJob backward_ring_job(const BackwardJob& job, const AttentionBackwardKernel& kernel, const Options& options) {
  const AttentionSpec& spec = job.forward.spec;
  const BackwardPairFlops flops = backward_pair_flops(spec);
  const auto gradient = static_cast<std::int64_t>(size_of(job.gradients));
  RingJob ring;
  ring.work.batch = job.forward.batch;
  ring.work.mask = spec.mask;
  ring.work.streams = backward_streams(spec);
  ring.work.pair_flops = flops.dq;
  ring.work.query_pair_flops = flops.dkv;
  ring.kernel = {kernel.key_tile(), kBackwardTile};
  // q, O and LSE of the forward, dO, row stats and dQ; and besides K and V, dK and dV.
  ring.query_bytes = query_bytes(spec) + out_token_bytes(spec) + kRowStats * lse_token_bytes(spec) +
                     (spec.sinks ? lse_token_bytes(spec) : 0) + std::int64_t{spec.heads} * spec.head_dim * gradient;
  ring.key_bytes = std::int64_t{spec.kv_heads} * (spec.head_dim + spec.head_dim_v) * gradient;
  ring.state_bytes = [&kernel](const RowCounts& rows) {
    return aligned(kernel.dq_state_bytes(rows.queries)) + kernel.dkv_state_bytes(rows.keys);
  };
  const std::int64_t queries = job.forward.batch.q_tokens();
  const std::int64_t rows = std::max(queries, job.forward.batch.k_tokens());
  const std::size_t sinks = spec.sinks ? sink_gradient_bytes(job.forward.batch, spec.heads) : 0;
  const ScoreSharing alone = sharing_of(true, options);  // for one rank that has all queries
  ring.scratch_bytes = [&kernel, rows, queries, sinks, alone](const AttentionLimits& limits) {
    const std::int64_t tiles = limits.tiles + rows / kBackwardTile + 2 * limits.sequences;
    return sinks + kernel.scratch_bytes({std::max(rows, limits.rows), limits.query_runs + tiles, tiles, tiles,
                                         limits.sequences, limits.rows == queries ? alone : ScoreSharing::kNever});
  };
  return ring;
}

BackwardLimits backward_limits(const Plan& plan, const Options& options) {
  BackwardLimits limits;
  for (const Plan* const direction : {&plan, plan.to_keys.get()}) {
    std::int64_t rows = 0;
    for (const QueryRun& run : direction->queries) rows += run.rows;
    limits.rows = std::max(limits.rows, rows);
    limits.row_runs = std::max(limits.row_runs, static_cast<std::int64_t>(direction->queries.size()));
    for (const BlockPlan& block : direction->blocks) {
      limits.tile_runs = std::max(limits.tile_runs, static_cast<std::int64_t>(block.key_runs.size()));
      limits.tiles = std::max(limits.tiles, static_cast<std::int64_t>(block.tiles.size()));
    }
  }
  limits.sequences = static_cast<std::int64_t>(plan.key_lengths.size());
  limits.sharing = sharing_of(has_same_pairs(plan), options);
  return limits;
}

bool has_same_pairs(const Plan& plan) { return plan.world == 1 && plan.blocks.size() == 1; }

}  // namespace ringattn
