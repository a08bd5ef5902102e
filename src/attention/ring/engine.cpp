// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/engine.hpp"

#include <algorithm>
#include <vector>

#include "attention/ring/block_mover.hpp"
#include "comm/patience.hpp"

namespace ringattn {

namespace {

// The rank's own K and V as dense rows, which transfers and assembled tiles need: the caller's memory where it is
// dense, else a copy in the workspace.
KvRows dense_shard(const EngineRun& run) {
  const auto dense = [&run](const TensorView& view, std::byte* copy) {
    if (view.is_dense()) {
      // Parts of the shard are only ever sent from here.
      return static_cast<std::byte*>(const_cast<void*>(view.data));
    }
    const auto element = static_cast<std::int64_t>(size_of(view.dtype));
    for (std::int64_t head = 0; head < view.heads; ++head) {
      run.backend.copy_rows(copy + head * view.dim * element, view.heads * view.dim * element, view.at(0, head),
                            view.token_stride * element, view.dim * element, view.tokens, run.stream);
    }
    return copy;
  };
  if (run.plan.world == 1) return {};
  return {dense(run.inputs.k, run.staged.k), dense(run.inputs.v, run.staged.v)};
}

// What was marked in a block.
struct BlockMarks {
  Mark posted = 0;
  Mark wait_begin = 0;
  Mark fold_begin = 0;
  Mark fold_end = 0;
};

RunStats stats_of(Backend& backend, Mark start, Mark end, const std::vector<BlockMarks>& marks) {
  RunStats stats;
  for (const BlockMarks& block : marks) {
    const auto since_start = [&](Mark mark) { return backend.elapsed(start, mark); };
    stats.blocks.push_back({since_start(block.posted), since_start(block.wait_begin), since_start(block.fold_begin),
                            since_start(block.fold_end)});
    stats.exposed_seconds += backend.elapsed(block.wait_begin, block.fold_begin);
  }
  stats.seconds = backend.elapsed(start, end);
  return stats;
}

}  // namespace

RunStats run_engine(const EngineRun& run) {
  const auto& blocks = run.plan.blocks;
  const auto count = static_cast<std::int64_t>(blocks.size());
  const Progress progress = [&run] { run.transport.progress(); };
  const FoldOutput output{run.outputs.out, run.outputs.lse, run.inputs.sinks};
  double longest_fold = 0.0;
  for (const BlockPlan& block : blocks) longest_fold = std::max(longest_fold, block.flops);
  longest_fold /= run.options.machine.flops_per_second;
  const Patience patience(run.options.timeout_seconds);
  const auto deadline = [&] { return patience.for_work(longest_fold); };

  run.backend.forget_marks();
  const Mark start = run.backend.mark(run.stream);
  std::vector<BlockMarks> marks(blocks.size());
  BlockMover mover(run.plan, run.spec, run.transport, run.backend, {dense_shard(run), run.buffers},
                   run.options.checksum);
  const bool moves = run.mode == RunMode::kWhole;
  // Where nothing is ever exchanged, nothing is marked around it: two marks on a GPU are 3 us apart.
  const bool alone = run.plan.world == 1;
  Mark last = start;
  const auto mark_now = [&] { return last = run.backend.mark(run.stream); };
  const auto mark_exchange = [&] { return alone ? last : mark_now(); };
  const auto post = [&](std::int64_t block) {
    marks[static_cast<std::size_t>(block)].posted = mark_exchange();
    if (moves) mover.post(block, run.stream);
  };
  const auto await_fold = [&](std::int64_t block) {
    run.backend.synchronize(marks[static_cast<std::size_t>(block)].fold_end, deadline(), progress);
    if (run.block_done) run.block_done(block + 1, count);
  };

  const std::int64_t ahead = run.backend.blocks_ahead();
  post(0);
  for (std::int64_t b = 0; b < count; ++b) {
    BlockMarks& mark = marks[static_cast<std::size_t>(b)];
    mark.wait_begin = mark_exchange();
    if (moves) mover.wait(b, run.stream, deadline());
    mark.fold_begin = mark_exchange();
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
    task.state = run.state;
    task.resume = b > 0;
    task.save = b + 1 < count || run.options.state_out;
    task.finish = b + 1 < count ? nullptr : &output;
    run.kernel.fold(task, run.stream, progress);
    mark.fold_end = mark_now();

    if (!run.options.overlap && b + 1 < count) post(b + 1);
    if (b >= ahead) await_fold(b - ahead);
  }
  if (run.options.state_out) {
    run.kernel.export_state(run.state, run.inputs.q.tokens, *run.outputs.state, run.stream);
  }
  // Before the host waits, which is not the job's time.
  const Mark end = run.options.state_out ? run.backend.mark(run.stream) : last;
  for (std::int64_t b = std::max<std::int64_t>(0, count - ahead); b < count; ++b) await_fold(b);
  run.backend.synchronize(end, deadline(), progress);
  progress();  // a peer that gave up may have let this rank's stream go on: its failure must be heard before the end
  mover.settle();
  return stats_of(run.backend, start, end, marks);
}

}  // namespace ringattn
