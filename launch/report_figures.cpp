// SPDX-License-Identifier: Apache-2.0
// What a report says of plans and measurements, gathered from all ranks.
#include <fmt/format.h>

#include <algorithm>

#include "attention/files/input_cost.hpp"
#include "attention/tokens/cost.hpp"
#include "attention/tokens/scan_deal.hpp"
#include "base/host.hpp"
#include "launch/report.hpp"

namespace ringattn {

namespace {

void gather_ranks(Report& report, Backend& backend, const KernelEntry& kernel, const std::string& reason,
                  Transport& world, const Meeting& meeting) {
  report.ranks = world.size();
  report.transport = world.name();
  report.kernel = kernel.name;
  report.kernel_reason = reason;
  report.hosts = meeting.gather(host_name());
  const std::string identity = backend.identity();
  report.devices =
      meeting.gather(backend.memory() == MemoryKind::kDevice ? fmt::format("GPU {}: {}", world.device(), identity)
                                                             : fmt::format("{} ({})", cpu_model(), identity));
}

// This rank's part of the peak of its process or its device.
std::size_t peak_of(Backend& backend, const Transport& world) {
  // Ranks that are threads share the process and its memory.
  const std::size_t ranks_here = world.name().ends_with("threads") ? static_cast<std::size_t>(world.size()) : 1;
  const bool shared = backend.memory() == MemoryKind::kHost;
  return backend.peak_memory() / (shared ? ranks_here : 1);
}

// Of attention and of latents.
void gather_ring(Report& report, PreparedFileJob& prepared, Transport& world, const Meeting& meeting) {
  const RingDoor door = prepared.ring();
  gather_ranks(report, door.backend, *door.kernel.row, door.kernel.reason, world, meeting);
  const JobInput& input = prepared.input();
  report.job = input.job();
  report.op = input.op();
  report.flops = job_flops(input);
  const Plan& plan = door.plan;
  PlanFigures figures;
  figures.blocks = static_cast<std::int64_t>(plan.blocks.size());
  figures.layout = layout_name(door.layout.request.kind);
  figures.stripe = door.layout.request.stripe;
  if (input.op() == Op::kLatent) {
    report.latents = input.latent().spec;
    figures.form = form_name(input.form().form);
    figures.latents = PlanFigures::Latents{prepared.latent().heads_at_a_time(), 0};
    for (const std::int64_t bytes : meeting.gather_values(prepared.latent().expanded_bytes_received())) {
      figures.latents->bytes_moved_expanded += bytes;
    }
  }
  figures.predicted_seconds = 0.0;
  struct Mine {
    std::int64_t bytes_received;
    std::size_t memory;
    double seconds;
  };
  for (const Mine& theirs :
       meeting.gather_values(Mine{plan.bytes_received(), plan.memory_bytes, door.prediction.seconds})) {
    figures.bytes_moved += theirs.bytes_received;
    figures.memory_per_rank = std::max(figures.memory_per_rank, theirs.memory);
    figures.predicted_seconds = std::max(*figures.predicted_seconds, theirs.seconds);
  }
  report.plan = figures;
}

}  // namespace

void gather_step(Report& report, const JobInput& input, Decode& decode, const StepForecast& step, Transport& world,
                 const Meeting& meeting) {
  gather_ranks(report, decode.backend(), *decode.kernel().row, decode.kernel().reason, world, meeting);
  report.flops = job_flops(input);
  report.job = input.job();
  report.op = input.op();
  PlanFigures figures;
  if (input.op() == Op::kLatent) {
    report.latents = input.latent().spec;
    figures.form = form_name(input.form().form);
  }
  figures.blocks = step.groups;
  figures.layout = deal_name(step.deal);
  figures.stripe = step.group_keys;
  figures.bytes_moved = step.bytes_moved();
  figures.memory_per_rank = step.memory.total();
  figures.memory = step.memory;
  figures.bytes_read = step.bytes_read;
  report.plan = figures;
}

void gather_world(Report& report, PreparedFileJob& prepared, Transport& world, const Meeting& meeting) {
  if (prepared.input().decodes()) {
    gather_step(report, prepared.input(), prepared.decode(), prepared.step(), world, meeting);
  } else {
    gather_ring(report, prepared, world, meeting);
  }
}

namespace {

void gather_ring_figures(Report& report, const RingDoor& door, const RankResult& result, Transport& world,
                         const Meeting& meeting) {
  const Plan& plan = door.plan;
  RankFigures mine;
  mine.seconds = result.stats.seconds;
  mine.exposed_seconds = result.stats.exposed_seconds;
  mine.flops = plan.flops();
  mine.memory_peak = peak_of(door.backend, world);
  mine.memory_planned = plan.memory_bytes;
  mine.tokens = result.rows;
  mine.bytes_received = plan.bytes_received();
  mine.bytes_sent = plan.bytes_sent();
  mine.non_finite = result.non_finite;
  report.figures = meeting.gather_values(mine);
}

}  // namespace

void gather_step_figures(Report& report, Decode& decode, const StepForecast& step, const RankResult& result,
                         Transport& world, const Meeting& meeting) {
  RankFigures mine;
  mine.seconds = result.stats.seconds;
  mine.memory_peak = peak_of(decode.backend(), world);
  mine.memory_planned = step.memory.total();
  mine.tokens = result.rows;
  mine.bytes_received = step.received[static_cast<std::size_t>(world.rank())];
  mine.non_finite = result.non_finite;
  report.figures = meeting.gather_values(mine);
}

void gather_figures(Report& report, PreparedFileJob& prepared, const RankResult& result, Transport& world,
                    const Meeting& meeting) {
  if (prepared.input().decodes()) {
    gather_step_figures(report, prepared.decode(), prepared.step(), result, world, meeting);
  } else {
    gather_ring_figures(report, prepared.ring(), result, world, meeting);
  }
}

void gather_scan(Report& report, PreparedScan& prepared, Transport& world, const Meeting& meeting) {
  Scan& scan = prepared.scan();
  gather_ranks(report, scan.backend(), *scan.kernel().row, scan.kernel().reason, world, meeting);
  const ScanJob& job = scan.job();
  report.scan = job;
  report.op = prepared.input().op();
  report.flops = scan_token_flops(job) * static_cast<double>(job.tokens());
  PlanFigures figures;
  figures.blocks = static_cast<std::int64_t>(scan.layout().owners().size());
  figures.layout = layout_name(LayoutKind::kContiguous);
  figures.stripe = kSuperSegmentTokens;
  for (const std::int64_t bytes : meeting.gather_values(scan.bytes_received())) figures.bytes_moved += bytes;
  figures.memory_per_rank = scan.memory().total();
  // Kernels tell how fast they compute; an update waits for memory.
  if (!job.update) figures.predicted_seconds = scan.predicted_seconds();
  figures.scan_memory = scan.memory();
  report.plan = figures;
}

void gather_scan_figures(Report& report, PreparedScan& prepared, const ScanRankResult& result, Transport& world,
                         const Meeting& meeting) {
  Scan& scan = prepared.scan();
  RankFigures mine;
  mine.seconds = result.stats.seconds;
  mine.exposed_seconds = result.stats.waiting_seconds;
  mine.flops = scan_token_flops(scan.job()) * static_cast<double>(result.rows);
  mine.memory_peak = peak_of(scan.backend(), world);
  mine.memory_planned = scan.memory().total();
  mine.tokens = result.rows;
  mine.bytes_received = scan.bytes_received();
  mine.non_finite.q = result.non_finite;
  report.figures = meeting.gather_values(mine);
}

}  // namespace ringattn
