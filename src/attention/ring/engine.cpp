// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/engine.hpp"

#include "base/failpoint.hpp"
#include "base/named_range.hpp"

namespace ringattn {

StepCount blocks_done(const Plan& plan, std::int64_t done) {
  StepCount count{done, static_cast<std::int64_t>(plan.blocks.size())};
  double flops = 0.0;
  for (std::int64_t b = 0; b < done; ++b) flops += plan.block_flops(static_cast<std::size_t>(b));
  if (plan.flops() > 0.0) count.work = flops / plan.flops();
  return count;
}

void enqueue_blocks(const RingLoop& loop, Stream stream, const BlockDone& block_done) {
  const auto count = static_cast<std::int64_t>(loop.plan.blocks.size());
  Timeline* const timeline = loop.timeline;
  const Progress progress = [&loop] { loop.transport.progress(); };
  const auto post = [&](std::int64_t block) {
    const NamedRange range("post", block);
    if (timeline != nullptr) timeline->post(block, stream);
    if (loop.mover != nullptr) loop.mover->post(block, stream);
  };

  if (timeline != nullptr) timeline->start(stream);
  loop.step.prepare(stream, progress);
  post(0);
  loop.step.begin(stream, progress);
  for (std::int64_t b = 0; b < count; ++b) {
    const bool last = b + 1 == count;
    if (timeline != nullptr) timeline->begin_wait(b, stream);
    if (loop.mover != nullptr) {
      const NamedRange range("wait", b);
      loop.mover->wait(b, stream, loop.timeouts.for_work(loop.longest_block));
    }
    if (timeline != nullptr) timeline->begin_compute(b, stream);
    if (loop.overlap && !last) post(b + 1);

    if (b == 0) failpoint("first-block");
    if (b == count / 2) failpoint("middle-block");
    if (last) failpoint("last-block");
    {
      const NamedRange range("compute", b);
      loop.step.compute({b, b == 0, last}, stream, progress);
    }
    if (timeline != nullptr) timeline->end_compute(b, stream);

    if (!loop.overlap && !last) post(b + 1);
    if (block_done && !loop.backend.enqueues()) block_done(blocks_done(loop.plan, b + 1));
  }
  if (loop.step.finish(stream, progress) && timeline != nullptr) timeline->end(stream);
}

}  // namespace ringattn
