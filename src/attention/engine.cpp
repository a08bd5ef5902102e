// SPDX-License-Identifier: Apache-2.0
#include "attention/engine.hpp"

#include <algorithm>
#include <chrono>
#include <vector>

#include "attention/block_mover.hpp"

namespace ringattn {

namespace {

using Clock = std::chrono::steady_clock;

// The rank's own K and V as dense rows, which transfers and assembled tiles need: the caller's memory where it is
// dense, else a copy in the workspace.
KvRows dense_shard(const EngineRun& run) {
  const auto dense = [&run](const TensorView& view, std::size_t staged) {
    if (view.is_dense()) {
      // Parts of the shard are only ever sent from here.
      return static_cast<std::byte*>(const_cast<void*>(view.data));
    }
    std::byte* copy = run.workspace + staged;
    const auto element = static_cast<std::int64_t>(size_of(view.dtype));
    for (std::int64_t head = 0; head < view.heads; ++head) {
      run.backend.copy_rows(copy + head * view.dim * element, view.heads * view.dim * element, view.at(0, head),
                            view.token_stride * element, view.dim * element, view.tokens, run.stream);
    }
    return copy;
  };
  if (run.plan.world == 1) return {};
  return {dense(run.inputs.k, run.layout.staged[0]), dense(run.inputs.v, run.layout.staged[1])};
}

}  // namespace

RunStats run_engine(const EngineRun& run) {
  const auto& blocks = run.plan.blocks;
  const auto count = static_cast<std::int64_t>(blocks.size());
  BlockMover::Memory memory{dense_shard(run), {}};
  for (std::size_t parity = 0; parity < 2; ++parity) {
    memory.buffers[parity] = {run.workspace + run.layout.buffers[parity][0],
                              run.workspace + run.layout.buffers[parity][1]};
  }
  BlockMover mover(run.plan, run.spec, run.transport, run.backend, memory, run.options.checksum);

  RunStats stats;
  stats.blocks.resize(blocks.size());
  const Clock::time_point start = Clock::now();
  const auto now = [start] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const Progress progress = [&run] { run.transport.progress(); };
  const FoldOutput output{run.outputs.out, run.outputs.lse, run.inputs.sinks};
  double longest_fold = 0.0;
  for (const BlockPlan& block : blocks) longest_fold = std::max(longest_fold, block.flops);
  longest_fold /= run.options.machine.flops_per_second;
  const auto deadline = [&] { return Deadline::after(run.options.timeout_seconds + 10.0 * longest_fold); };
  std::vector<Mark> folded;  // one a block
  const auto await_fold = [&](std::int64_t block) {
    run.backend.synchronize(folded[static_cast<std::size_t>(block)], deadline(), progress);
    if (run.block_done) run.block_done(block + 1, count);
  };
  const auto post = [&](std::int64_t block) {
    stats.blocks[static_cast<std::size_t>(block)].posted = now();
    mover.post(block, run.stream);
  };

  const std::int64_t ahead = run.backend.blocks_ahead();
  post(0);
  for (std::int64_t b = 0; b < count; ++b) {
    BlockTimes& times = stats.blocks[static_cast<std::size_t>(b)];
    times.wait_begin = now();
    mover.wait(b, run.stream, deadline());
    times.fold_begin = now();
    stats.exposed_seconds += times.fold_begin - times.wait_begin;
    if (run.options.overlap && b + 1 < count) post(b + 1);

    const BlockPlan& block = blocks[static_cast<std::size_t>(b)];
    const KeySource sources[] = {{run.inputs.k, run.inputs.v}, mover.buffer_source(b)};
    FoldTask task;
    task.q = run.inputs.q;
    task.queries = run.plan.queries;
    task.key_lengths = run.plan.key_lengths;
    task.key_runs = block.key_runs;
    task.tiles = block.tiles;
    task.sources = sources;
    task.state = run.workspace + run.layout.state;
    task.resume = b > 0;
    task.save = b + 1 < count || run.options.state_out;
    task.finish = b + 1 < count ? nullptr : &output;
    run.kernel.fold(task, run.stream, progress);
    times.fold_end = now();

    if (!run.options.overlap && b + 1 < count) post(b + 1);
    folded.push_back(run.backend.mark(run.stream));
    if (b >= ahead) await_fold(b - ahead);
  }
  if (run.options.state_out) {
    run.kernel.export_state(run.workspace + run.layout.state, run.inputs.q.tokens, *run.outputs.state, run.stream);
  }
  for (std::int64_t b = std::max<std::int64_t>(0, count - ahead); b < count; ++b) await_fold(b);
  run.backend.synchronize(run.backend.mark(run.stream), deadline(), progress);
  stats.seconds = now();
  return stats;
}

}  // namespace ringattn
