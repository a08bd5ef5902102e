// SPDX-License-Identifier: Apache-2.0
// The parts of a report about ranks, plans and measurements, gathered from all ranks.
#include <fmt/format.h>

#include "base/host.hpp"
#include "base/numa.hpp"
#include "launch/report.hpp"

namespace ringattn {

void prepare_job(Report& report, const Options& options, Transport& world, const Collective& collective) {
  OpJob& job = *report.job;
  job.prepare(world, options);
  report.ranks = world.size();
  report.transport = world.name();
  report.hosts = collective.gather(host_name());
  const std::string identity = job.backend().identity();
  report.devices = collective.gather(job.backend().memory() == MemoryKind::kDevice
                                         ? fmt::format("GPU {}: {}", world.device(), identity)
                                         : fmt::format("{} ({})", cpu_model(), identity));
  if (job.backend().memory() == MemoryKind::kHost) report.processors = collective.gather(cpu_list_text(usable_cpus()));
  report.plan = job.plan(collective);
}

void gather_figures(Report& report, RankFigures mine, const Transport& world, const Collective& collective) {
  Backend& backend = report.job->backend();
  // Ranks that are threads share the process and its memory.
  const std::size_t ranks_here = world.name().ends_with("threads") ? static_cast<std::size_t>(world.size()) : 1;
  mine.memory_peak = backend.peak_memory() / (backend.memory() == MemoryKind::kHost ? ranks_here : 1);
  report.figures = collective.gather_values(mine);
}

}  // namespace ringattn
