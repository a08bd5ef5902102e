// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/backward_ring_step.hpp"

#include "ops/attention_backward/backward_work.hpp"

namespace ringattn {

void BackwardRingStep::prepare(Stream stream, const Progress& progress) {
  kernel_.row_stats(memory_.stats, stream, progress);
  if (memory_.sinks != nullptr) memory_.sinks->sum_own(memory_.stats.sink_terms, stream);
}

BackwardTask BackwardRingStep::task_of(const Plan& direction, const ArrivedBlock& block) const {
  const BlockPlan& planned = direction.blocks[static_cast<std::size_t>(block.index)];
  BackwardTask task;
  task.sequences = sequences_;
  task.runs = planned.key_runs;
  task.tiles = planned.tiles;
  task.resume = !block.first;
  task.save = !block.last;
  return task;
}

void BackwardRingStep::compute(const ArrivedBlock& block, Stream stream, const Progress& progress) {
  const auto parity = static_cast<std::size_t>(block.index % 2);
  const BackwardKeySource key_sources[] = {memory_.keys, memory_.key_buffers[parity]};
  DqTask dq{task_of(plan_, block), memory_.q,   memory_.dout,
            memory_.stats.stats,   key_sources, block.last ? &memory_.dq : nullptr};
  dq.rows = plan_.queries;
  dq.state = memory_.dq_state;
  const BackwardQuerySource query_sources[] = {memory_.queries, memory_.query_buffers[parity]};
  DkvTask dkv{task_of(*plan_.to_keys, block),
              memory_.keys.k,
              memory_.keys.v,
              query_sources,
              block.last ? &memory_.dk : nullptr,
              block.last ? &memory_.dv : nullptr};
  dkv.rows = keys_;
  dkv.state = memory_.dkv_state;
  if (has_same_pairs(plan_)) {
    kernel_.add_dq_and_dkv(dq, dkv, stream, progress);
  } else {
    kernel_.add_dq(dq, stream, progress);
    kernel_.add_dkv(dkv, stream, progress);
  }
}

// The ranks exchange their sums last, after the blocks that other ranks wait for have been sent.
bool BackwardRingStep::finish(Stream stream, const Progress&) {
  if (memory_.sinks == nullptr) return false;
  if (memory_.exchanges) memory_.sinks->exchange(stream, memory_.seconds);
  memory_.sinks->sum_all(memory_.dsinks, stream);
  return true;
}

}  // namespace ringattn
