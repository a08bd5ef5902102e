// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/attention_ring_step.hpp"

namespace ringattn {

AttentionTask block_task(const Plan& plan, const ArrivedBlock& block, std::span<const PageRun> tiles,
                         std::span<const KeySource> sources, const AttentionOutput& output, bool exports) {
  const BlockPlan& planned = plan.blocks[static_cast<std::size_t>(block.index)];
  AttentionTask task;
  task.queries = plan.queries;
  task.key_lengths = plan.key_lengths;
  task.key_runs = planned.key_runs;
  task.tiles = tiles;
  task.sources = sources;
  task.block_mask = plan.block_mask.get();
  task.positions = plan.positions.get();
  task.resume = !block.first;
  task.save = !block.last || exports;
  task.finish = block.last ? &output : nullptr;
  return task;
}

void AttentionRingStep::compute(const ArrivedBlock& block, Stream stream, const Progress& progress) {
  const KeySource sources[] = {memory_.own, memory_.buffers[static_cast<std::size_t>(block.index % 2)]};
  const BlockPlan& planned = plan_.blocks[static_cast<std::size_t>(block.index)];
  AttentionTask task = block_task(plan_, block, planned.tiles, sources, memory_.output, memory_.exports.has_value());
  task.q = memory_.q;
  task.state = memory_.state;
  task.prepared = prepared_[static_cast<std::size_t>(block.index)];
  if (memory_.pages != nullptr) {
    map_pages(*memory_.pages, memory_.page_rows, plan_, planned, *memory_.map);
    task.tiles = *memory_.map;
    task.page_runs = page_runs_per_tile(plan_.kernel.key_tile, memory_.pages->k.page_size);
  }
  kernel_.attend(task, stream, progress);
}

bool AttentionRingStep::finish(Stream stream, const Progress&) {
  if (!memory_.exports) return false;
  kernel_.export_state(memory_.state, memory_.q.tokens, *memory_.exports, stream);
  return true;
}

std::vector<PreparedTask> prepare_tasks(const Plan& plan, const AttentionSpec& spec, AttentionKernel& kernel,
                                        bool state_out, const TilesOf& tiles_of) {
  const KeySource sources[2];
  const AttentionOutput output;
  std::int64_t rows = 0;
  for (const QueryRun& run : plan.queries) rows += run.rows;
  std::vector<PreparedTask> prepared;
  const auto count = static_cast<std::int64_t>(plan.blocks.size());
  for (std::int64_t b = 0; b < count; ++b) {
    const auto index = static_cast<std::size_t>(b);
    AttentionTask task = block_task(plan, {b, b == 0, b + 1 == count},
                                    tiles_of ? tiles_of(index) : std::span<const PageRun>(plan.blocks[index].tiles),
                                    sources, output, state_out);
    task.q = dense_view(static_cast<const void*>(nullptr), spec.dtype, rows, spec.heads, spec.head_dim);
    prepared.push_back(kernel.prepare(task));
  }
  return prepared;
}

}  // namespace ringattn
