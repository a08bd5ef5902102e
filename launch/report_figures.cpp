// SPDX-License-Identifier: Apache-2.0
// What a report says of plans and measurements, gathered from all ranks.
#include <fmt/format.h>

#include <algorithm>

#include "attention/tokens/cost.hpp"
#include "attention/tokens/ssm_layout.hpp"
#include "base/host.hpp"
#include "launch/report.hpp"
#include "ops/common/input_cost.hpp"

namespace ringattn {

namespace {

void gather_ranks(Report& report, Backend& backend, const KernelEntry& kernel, const std::string& reason,
                  Transport& world, const Collective& collective) {
  report.ranks = world.size();
  report.transport = world.name();
  report.kernel = kernel.name;
  report.kernel_reason = reason;
  report.hosts = collective.gather(host_name());
  const std::string identity = backend.identity();
  report.devices =
      collective.gather(backend.memory() == MemoryKind::kDevice ? fmt::format("GPU {}: {}", world.device(), identity)
                                                                : fmt::format("{} ({})", cpu_model(), identity));
}

// This rank's part of the peak of its process or its device.
std::size_t peak_of(Backend& backend, const Transport& world) {
  // Ranks that are threads share the process and its memory.
  const std::size_t ranks_here = world.name().ends_with("threads") ? static_cast<std::size_t>(world.size()) : 1;
  const bool shared = backend.memory() == MemoryKind::kHost;
  return backend.peak_memory() / (shared ? ranks_here : 1);
}

// Gathers the report of attention, or of MLA over the ring.
void gather_ring(Report& report, PreparedFileJob& prepared, Transport& world, const Collective& collective) {
  const RingOp ring_op = prepared.ring();
  gather_ranks(report, ring_op.backend, *ring_op.kernel.row, ring_op.kernel.reason, world, collective);
  const JobInput& input = prepared.input();
  report.job = input.job();
  report.op = input.op();
  report.flops = job_flops(input);
  const Plan& plan = ring_op.plan;
  PlanFigures figures;
  figures.blocks = static_cast<std::int64_t>(plan.blocks.size());
  figures.layout = layout_name(ring_op.layout.request.kind);
  figures.stripe = ring_op.layout.request.stripe;
  if (input.op() == Op::kMla) {
    report.latents = input.latent().spec;
    figures.form = form_name(input.form().form);
    figures.latents = PlanFigures::MlaFigures{prepared.latent().heads_at_a_time(), 0};
    for (const std::int64_t bytes : collective.gather_values(prepared.latent().expanded_bytes_received())) {
      figures.latents->bytes_moved_expanded += bytes;
    }
  }
  figures.estimated_seconds = 0.0;
  struct Mine {
    std::int64_t bytes_received;
    std::size_t memory;
    double seconds;
  };
  for (const Mine& theirs :
       collective.gather_values(Mine{plan.bytes_received(), plan.memory_bytes, ring_op.time_estimate.seconds})) {
    figures.bytes_moved += theirs.bytes_received;
    figures.memory_per_rank = std::max(figures.memory_per_rank, theirs.memory);
    figures.estimated_seconds = std::max(*figures.estimated_seconds, theirs.seconds);
  }
  report.plan = figures;
}

}  // namespace

void gather_decode(Report& report, const JobInput& input, Decode& decode, const DecodePlanSummary& step,
                   Transport& world, const Collective& collective) {
  gather_ranks(report, decode.backend(), *decode.kernel().row, decode.kernel().reason, world, collective);
  report.flops = job_flops(input);
  report.job = input.job();
  report.op = input.op();
  PlanFigures figures;
  if (input.op() == Op::kMla) {
    report.latents = input.latent().spec;
    figures.form = form_name(input.form().form);
  }
  figures.blocks = step.kv_splits;
  figures.layout = deal_name(step.deal);
  figures.stripe = step.kv_split_keys;
  figures.bytes_moved = step.bytes_moved();
  figures.memory_per_rank = step.memory.total();
  figures.memory = step.memory;
  figures.bytes_read = step.bytes_read;
  report.plan = figures;
}

void gather_world(Report& report, PreparedFileJob& prepared, Transport& world, const Collective& collective) {
  if (prepared.input().decodes()) {
    gather_decode(report, prepared.input(), prepared.decode(), prepared.step(), world, collective);
  } else {
    gather_ring(report, prepared, world, collective);
  }
}

namespace {

void gather_ring_figures(Report& report, const RingOp& ring_op, const RankResult& result, Transport& world,
                         const Collective& collective) {
  const Plan& plan = ring_op.plan;
  RankFigures mine;
  mine.seconds = result.stats.seconds;
  mine.exposed_comm_seconds = result.stats.exposed_comm_seconds;
  mine.flops = plan.flops();
  mine.memory_peak = peak_of(ring_op.backend, world);
  mine.memory_planned = plan.memory_bytes;
  mine.tokens = result.rows;
  mine.bytes_received = plan.bytes_received();
  mine.bytes_sent = plan.bytes_sent();
  mine.non_finite = result.non_finite;
  report.figures = collective.gather_values(mine);
}

}  // namespace

void gather_decode_figures(Report& report, Decode& decode, const DecodePlanSummary& step, const RankResult& result,
                           Transport& world, const Collective& collective) {
  RankFigures mine;
  mine.seconds = result.stats.seconds;
  mine.memory_peak = peak_of(decode.backend(), world);
  mine.memory_planned = step.memory.total();
  mine.tokens = result.rows;
  mine.bytes_received = step.received[static_cast<std::size_t>(world.rank())];
  mine.non_finite = result.non_finite;
  report.figures = collective.gather_values(mine);
}

void gather_figures(Report& report, PreparedFileJob& prepared, const RankResult& result, Transport& world,
                    const Collective& collective) {
  if (prepared.input().decodes()) {
    gather_decode_figures(report, prepared.decode(), prepared.step(), result, world, collective);
  } else {
    gather_ring_figures(report, prepared.ring(), result, world, collective);
  }
}

void gather_ssm(Report& report, PreparedSsm& prepared, Transport& world, const Collective& collective) {
  Ssm& scan = prepared.ssm();
  gather_ranks(report, scan.backend(), *scan.kernel().row, scan.kernel().reason, world, collective);
  const SsmJob& job = scan.job();
  report.ssm = job;
  report.op = prepared.input().op();
  report.flops = ssm_token_flops(job) * static_cast<double>(job.tokens());
  PlanFigures figures;
  figures.blocks = static_cast<std::int64_t>(scan.layout().owners().size());
  figures.layout = layout_name(LayoutKind::kContiguous);
  figures.stripe = kSuperSegmentTokens;
  for (const std::int64_t bytes : collective.gather_values(scan.bytes_received())) figures.bytes_moved += bytes;
  figures.memory_per_rank = scan.memory().total();
  // Kernels tell how fast they compute; an update waits for memory.
  if (!job.update) figures.estimated_seconds = scan.estimated_seconds();
  figures.ssm_memory = scan.memory();
  report.plan = figures;
}

void gather_ssm_figures(Report& report, PreparedSsm& prepared, const SsmRankResult& result, Transport& world,
                        const Collective& collective) {
  Ssm& scan = prepared.ssm();
  RankFigures mine;
  mine.seconds = result.stats.seconds;
  mine.exposed_comm_seconds = result.stats.exposed_comm_seconds;
  mine.flops = ssm_token_flops(scan.job()) * static_cast<double>(result.rows);
  mine.memory_peak = peak_of(scan.backend(), world);
  mine.memory_planned = scan.memory().total();
  mine.tokens = result.rows;
  mine.bytes_received = scan.bytes_received();
  mine.non_finite.q = result.non_finite;
  report.figures = collective.gather_values(mine);
}

}  // namespace ringattn
