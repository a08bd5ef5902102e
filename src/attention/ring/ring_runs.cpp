// SPDX-License-Identifier: Apache-2.0
#include "attention/ring/ring_runs.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "attention/ring/copy_tensor.hpp"
#include "attention/ring/warm_up.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

std::array<StreamRows, 2> buffers_at(std::byte* base, const WorkspaceLayout& layout) {
  return {rows_at(base, layout.buffers[0]), rows_at(base, layout.buffers[1])};
}

}  // namespace

void refuse_capture(std::string_view why, std::string_view suggestion) {
  fail(ErrorCode::kUnsupported, "a graph can't hold this run", why, suggestion);
}

RingRuns::RingRuns(const Collective& collective, Transport& transport, Backend& backend, Settings settings)
    : collective_(collective), transport_(transport), backend_(backend), settings_(std::move(settings)) {}

void RingRuns::allocate(RowCounts buffer_rows) {
  buffer_rows_ = buffer_rows;
  if (owns_block_buffers()) {
    const std::size_t bytes = block_buffers_layout(settings_.streams, buffer_rows_).bytes;
    own_buffers_ = backend_.allocate(std::max(bytes, static_cast<std::size_t>(transport_.size())));
  }
  runs_.emplace(backend_, transport_, collective_.timeouts());
}

void RingRuns::make_mover(PlannedRuns& planned) const {
  if (!several()) return;
  planned.mover.emplace(planned.plan, settings_.streams, transport_, backend_, settings_.checksum);
}

void RingRuns::connect(PlannedRuns& planned) {
  if (!owns_block_buffers()) return;
  planned.mover->announce(block_buffers(nullptr, {}), collective_.timeouts().for_peer());
  warm_up_transport(collective_, transport_, backend_, own_buffers_.data());
}

WorkspaceLayout RingRuns::workspace(std::size_t state_bytes, RowCounts staged_rows) const {
  return workspace_layout(settings_.streams, state_bytes, owns_block_buffers() ? RowCounts{} : buffer_rows_,
                          staged_rows);
}

std::array<StreamRows, 2> RingRuns::block_buffers(std::byte* workspace, const WorkspaceLayout& layout) const {
  if (!owns_block_buffers()) return buffers_at(workspace, layout);
  return buffers_at(own_buffers_.data(), block_buffers_layout(settings_.streams, buffer_rows_));
}

StreamRows RingRuns::dense_shard(std::span<const TensorView> views, StreamRows staged, Stream stream) const {
  for (std::size_t s = 0; s < staged.size(); ++s) {
    const TensorView& view = views[s];
    if (view.is_dense()) {
      // The shard is only read: its parts are only sent.
      staged[s] = static_cast<std::byte*>(const_cast<void*>(view.data));
      continue;
    }
    copy_tensor(backend_, dense_view(static_cast<void*>(staged[s]), view.dtype, view.tokens, view.heads, view.dim),
                view, stream);
  }
  return staged;
}

void RingRuns::check_capture_alone() const {
  if (!several()) return;
  refuse_capture("this run", transport_, fmt::format("exchanges blocks with {} other ranks", transport_.size() - 1));
}

void RingRuns::check_capture_of(std::span<const PreparedTask> prepared) {
  if (std::ranges::find(prepared, kNotPrepared) == prepared.end()) return;
  refuse_capture(fmt::format("its {} blocks share memory for their tables", prepared.size()),
                 "Use larger blocks, or enqueue it outside of the capture.");
}

double RingRuns::longest_block(const Plan& plan) const {
  double flops = 0.0;
  for (std::size_t block = 0; block < plan.blocks.size(); ++block) flops = std::max(flops, plan.block_flops(block));
  return flops / settings_.flops_per_second;
}

void RingRuns::enqueue(const Run& run, Stream stream, Timeline* timeline, const BlockDone& block_done) {
  PlannedRuns& planned = run.planned;
  runs_->enqueue(stream, planned.estimated_seconds, [&] {
    const bool moves = several() && run.mode == RunMode::kWhole;
    if (moves) {
      planned.mover->bind(run.shard(), run.buffers);
    } else if (!several() && run.copies_shard) {
      run.shard();
    }
    const RingLoop loop{planned.plan,
                        transport_,
                        backend_,
                        run.step,
                        moves ? &*planned.mover : nullptr,
                        timeline,
                        settings_.overlap,
                        collective_.timeouts(),
                        longest_block(planned.plan)};
    enqueue_blocks(loop, stream, block_done);
  });
}

RunStats RingRuns::run(PlannedRuns& planned, const std::function<void(Timeline*)>& enqueue,
                       const BlockDone& block_done) {
  wait();  // so that the time of earlier work is not counted
  std::optional<Timeline>& timeline = planned.timeline;
  if (!timeline) timeline.emplace(backend_, planned.plan.blocks.size(), !several());
  enqueue(&*timeline);
  runs_->wait_all([&] {
    if (!backend_.enqueues()) return;
    const auto blocks = static_cast<std::int64_t>(planned.plan.blocks.size());
    for (std::int64_t b = 0; b < blocks; ++b) {
      timeline->await_compute(b, collective_.timeouts().for_work(longest_block(planned.plan)),
                              [this] { transport_.progress(); });
      if (block_done) block_done(blocks_done(planned.plan, b + 1));
    }
  });
  return timeline->stats();
}

void RingRuns::wait() {
  if (runs_->any()) runs_->wait_all();
}

}  // namespace ringattn
